"""Extract numbers by value, independent of language and notation: 3,000 equals 3.000 and 三千, 1.5 billion 15亿.

A language has a `_Notation`: rules that convert its numbers to digits, and words that may or may not be numbers. The
code for digits comes first, then the notations of English, German and Chinese.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple
from unicodedata import normalize

from simulmt.text.words import HAN

_Rule = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]  # pattern and replacement, as in re.sub
_Ambiguous = dict[str, tuple[Fraction | int, ...]]  # words that may or may not be numbers, with their values
_DECIMAL = r"\d{1,30}+(?:\.\d{1,30}+)?+"  # possessive and bounded, to avoid quadratic backtracking
_VERSION: _Rule = (r"\d{1,30}+(?:\.\d{1,30}+){2,}", lambda match: match[0].replace(".", " "))  # or a date: 24.12.1990
_YEAR_BEGINNINGS = range(13, 21)  # nineteen ninety-five, twenty twenty-six

_NUMBER = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)(?!\d)"
    r"|(?P<numerator>\d{1,30}+)(?P<slash>[/⁄])(?P<denominator>[1-9]\d{0,30}+)"
    rf"|(?P<figures>{_DECIMAL})(?P<suffix>\s?%|[a-z]+|年代|世纪|成|月)?"
)
_MAGNITUDES = {"k": 10**3, "m": 10**6}  # "m" may also mean metres
_UNITS = ("km", "kg", "g", "mg", "cm", "mm", "ml", "l", "c", "f", "x", "h", "mph", "kmh", "gb", "mb", "tb", "am", "pm")
_CLOCK = {  # minutes, and whether the hour named is the next one
    "half past": (30, False),
    "quarter past": (15, False),
    "quarter to": (45, True),
    "viertel nach": (15, False),
    "halb": (30, True),
    "viertel vor": (45, True),
}
_HALF = re.compile(r"(?P<whole>\d+)\s?½")
_IN_NAME = re.compile(r"[a-z][-.]?$")  # before the figures of mp3 or COVID-19


class Number(NamedTuple):
    """A number in a text: its possible values, and whether it is certainly a number.

    Ambiguous words such as "one", "second" or 一 are not certain: they may match a number, but need no match.
    """

    values: frozenset[Fraction]
    is_certain: bool = True


def find_numbers(text: str, language: str) -> list[Number]:
    """Return the numbers in a text; in languages other than en, de and zh only those written in digits."""
    text = _HALF.sub(r"\g<whole>.5", text.casefold())
    notation = _notations().get(language)
    if notation is None:
        return list(_digit_numbers(_without_separators(text)))
    plain = notation.to_digits(text)
    return [*_digit_numbers(plain), *notation.ambiguous_numbers(plain)]


def unmatched(numbers: Sequence[Number], others: Sequence[Number]) -> list[Number]:
    """Return the certain numbers that share no value with any of the others."""
    known = frozenset[Fraction]().union(*(other.values for other in others))
    return [number for number in numbers if number.is_certain and not number.values & known]


@cache
def _notations() -> Mapping[str, _Notation]:
    return {
        "en": _Notation(_EN_RULES, _EN_AMBIGUOUS, _EN_HINT),
        "de": _Notation(_DE_RULES, _DE_AMBIGUOUS, _DE_HINT),
        "zh": _Notation(_ZH_RULES, _ZH_AMBIGUOUS, _ZH_HINT, boundary=""),
    }


def _without_separators(text: str) -> str:
    """Convert 3,000 and 3.000 to 3000, and 1,5 to 1.5, in a language whose decimal separator is unknown."""
    return re.sub(r"(?<=\d),(?=\d)", ".", re.sub(r"(?<=\d)[.,](?=\d{3}(?!\d))", "", text))


def _digit_numbers(text: str) -> Iterator[Number]:
    for match in _NUMBER.finditer(text):
        is_certain = _IN_NAME.search(text, max(0, match.start() - 2), match.start()) is None
        if match["hour"]:
            yield Number(_hours(int(match["hour"])), is_certain)
            if int(match["minute"]):
                yield Number(frozenset({Fraction(int(match["minute"]))}), is_certain)
        elif match["slash"]:
            yield from _fraction(int(match["numerator"]), int(match["denominator"]), match["slash"] == "⁄")
        else:
            yield _plain(Fraction(match["figures"]), (match["suffix"] or "").strip(), is_certain)


def _hours(hour: int) -> frozenset[Fraction]:
    """Return an hour on the 12-hour and the 24-hour clock."""
    return frozenset({Fraction(hour), Fraction(hour - 12 if hour > 12 else hour + 12)})


def _fraction(numerator: int, denominator: int, is_certain: bool) -> Iterator[Number]:
    """Yield a fraction, which may also be written as two numbers: a quarter is one in four."""
    yield Number(frozenset({Fraction(numerator, denominator), Fraction(denominator)}), is_certain)
    yield Number(frozenset({Fraction(numerator)}), is_certain=False)


def _plain(value: Fraction, suffix: str, is_certain: bool) -> Number:
    values = {value}
    if suffix == "%":
        values = {value / 100}
    elif suffix in _MAGNITUDES:
        values.add(value * _MAGNITUDES[suffix])
    elif suffix in ("s", "er", "年代"):  # the 1990s are the 90s
        values.add(value % 100 if value >= 1000 else 1900 + value)
    elif suffix == "世纪":  # the 20th century is the 1900s
        values.add(100 * (value - 1))
    elif suffix == "成":
        values.add(value / 10)
    elif suffix:
        is_certain &= suffix in _UNITS
    return Number(frozenset(values), is_certain)


class _Notation:
    """How a language writes numbers: rules that convert them to digits, and ambiguous words between boundaries.

    Text without the hint, a cheap pattern, has nothing to convert.
    """

    def __init__(self, rules: Iterable[_Rule], ambiguous: _Ambiguous, hint: str, boundary: str = r"\b") -> None:
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules]
        self._hint = re.compile(hint)
        self._ambiguous = ambiguous
        self._ambiguous_word = re.compile(f"{boundary}(?:{_any_of(ambiguous)}){boundary}")

    def to_digits(self, text: str) -> str:
        """Convert all numbers in a case-folded text to digits: 3,000 to 3000, half past three to 3:30."""
        if not self._hint.search(text):
            return text
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text

    def ambiguous_numbers(self, text: str) -> Iterator[Number]:
        """Yield the ambiguous words of a text."""
        for match in self._ambiguous_word.finditer(text):
            yield Number(frozenset(map(Fraction, self._ambiguous[match[0]])), is_certain=False)


class _Part(NamedTuple):
    """A word or digit string of a number; a multiplier (hundred, 万) applies to all smaller terms before it."""

    value: Fraction
    multiplies: bool = False
    is_word: bool = True


class _NumberWords:
    """Number words of a language, by value; multipliers such as million apply to what precedes them."""

    def __init__(
        self, values: Mapping[str, Fraction | int], multipliers: Mapping[str, int], ambiguous: Collection[str]
    ) -> None:
        self._values = values
        self._multipliers = multipliers
        self._ambiguous = ambiguous
        self._token = re.compile(rf"{_DECIMAL}|{_any_of([*values, *multipliers])}")

    def value(self, token: str) -> Fraction:
        """Return the value of a word or a decimal."""
        return Fraction(self._values.get(token, token))

    def to_digits(self, run: re.Match[str]) -> str:
        """Convert a run of number words and decimals to digits; an ambiguous word alone is left as it is."""
        if run[0] in self._ambiguous or run[0].isdecimal():
            return run[0]
        return " ".join(map(_format_number, _compose(map(self._part, self._token.findall(run[0])))))

    def clock(self, match: re.Match[str]) -> str:
        """Convert a fraction of an hour, such as quarter to, and the hour to digits."""
        minutes, is_before = _CLOCK[match[1]]
        hour = int(self.value(match[2]))
        return f"{hour - 1 or 12 if is_before else hour}:{minutes}"

    def _part(self, token: str) -> _Part:
        if token in self._multipliers:
            return _Part(Fraction(self._multipliers[token]), multiplies=True)
        return _Part(self.value(token), is_word=not token[0].isdecimal())


def _compose(parts: Iterable[_Part]) -> list[Fraction]:
    """Combine consecutive parts into numbers: usually one, several where a part cannot continue the last."""
    numbers: list[Fraction] = []
    terms: list[Fraction] = []
    last = _Part(Fraction(0))
    for part in parts:
        term = part.value
        if part.multiplies:
            smaller = terms.pop() if terms and not last.is_word else Fraction(0)  # 55000万
            while terms and terms[-1] < part.value:
                smaller += terms.pop()
            term *= smaller or 1
        if _is_year(terms, last, part):
            terms = [100 * last.value + term]
        elif terms and (terms[-1] <= term or not (part.multiplies or _continues(last, part))):
            numbers.append(sum(terms, Fraction(0)))
            terms = [term]
        else:
            terms.append(term)
        last = part
    return [*numbers, sum(terms, Fraction(0))] if terms else numbers


def _continues(last: _Part, part: _Part) -> bool:
    """Return whether `part` continues a number: one to nine after tens, any smaller value after a multiplier."""
    if last.multiplies:
        return part.value < last.value
    return last.is_word and part.is_word and last.value >= 20 and last.value % 10 == 0 and 0 < part.value < 10


def _is_year(terms: list[Fraction], last: _Part, part: _Part) -> bool:
    if part.multiplies or last.multiplies or not (part.is_word and last.is_word):
        return False
    return terms == [last.value] and last.value in _YEAR_BEGINNINGS and 10 <= part.value < 100


def _format_number(value: Fraction) -> str:
    """Format a value in digits: 1500, 0.25, or 1⁄3 if 12 decimal places are not enough."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((n for n in range(1, 13) if 10**n % value.denominator == 0), 0)
    if not places:
        return f"{value.numerator}⁄{value.denominator}"
    whole, rest = divmod(value.numerator * 10**places // value.denominator, 10**places)
    return f"{whole}.{rest:0{places}d}"


def _words(text: str) -> list[str]:
    """Split a string at whitespace; shorter than a list of quoted words."""
    return text.split()


def _with_values(text: str, *values: Fraction | int) -> _Ambiguous:
    """Map each word of a string to the given values."""
    return dict.fromkeys(text.split(), values)


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


# English.

EN_ONES = _words("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")
EN_ONES += _words("seventeen eighteen nineteen")
EN_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_EN_ORDINALS = _words("third fourth fifth sixth seventh eighth ninth tenth")
_EN_TEENTHS = _words("eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth")
_EN_MONTHS = _words("january february march april may june july august september october november december")

_EN_VALUES = {
    **{word: value for value, word in enumerate(EN_ONES, start=1)},
    **{word: 10 * value for value, word in enumerate(EN_TENS, start=2)},
    **{word: value for value, word in enumerate(_EN_TEENTHS, start=11)},
    **{f"{word[:-1]}ieth": 10 * value for value, word in enumerate(EN_TENS, start=2)},
    **{
        f"{ten}-{one}": 10 * tens + ones
        for tens, ten in enumerate(EN_TENS, start=2)
        for ones, one in enumerate(["first", "second", *_EN_ORDINALS[:7]], start=1)
    },
}
_EN_COUNTS = {word: value for word, value in _EN_VALUES.items() if word in {*EN_ONES, *EN_TENS}}
EN_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_EN_AFTER_NUMBER = {f"{word}s": value for word, value in EN_MULTIPLIERS.items()}  # "hundreds" alone is not a number
_EN_AFTER_NUMBER |= {"dozen": 12, "decades": 10, "mn": 10**6, "bn": 10**9, "tn": 10**12}
_EN_FRACTIONS = {f"{word}s": value for value, word in enumerate(_EN_ORDINALS, start=3)} | {"quarters": 4}

_EN_AMBIGUOUS: _Ambiguous = {
    **_with_values("zero", 0),
    **_with_values("one once first single", 1),
    **_with_values("second twice both couple pair double doubled", 2),
    **_with_values("triple tripled", 3),
    **_with_values("decade", 10),
    **_with_values("dozen noon", 12),
    **_with_values("midnight", 0, 12, 24),
    **_with_values("half", Fraction(1, 2), 30),
    **_with_values("quarter", Fraction(1, 4), 15),
    **{word: (value, Fraction(1, value)) for value, word in enumerate(_EN_ORDINALS, start=3)},
    **{word: (value,) for value, month in enumerate(_EN_MONTHS, start=1) for word in (month, month[:3])},
    **_with_values("sept", 9),
}
_EN_WORDS = _NumberWords(_EN_VALUES, EN_MULTIPLIERS | _EN_AFTER_NUMBER, _EN_AMBIGUOUS)

_EN_VALUE = rf"(?:{_DECIMAL}|\b(?:{_any_of(_EN_COUNTS)})\b)"
_EN_SMALL = rf"(?:(?<![\d.])\d{{1,3}}(?:\.\d+)?|\b(?:{_any_of(_EN_COUNTS)})\b)"
_EN_FIRST = rf"(?:{_DECIMAL}|\b(?:{_any_of([*_EN_VALUES, *EN_MULTIPLIERS])})\b)"
_EN_NEXT = rf"(?:{_DECIMAL}|\b(?:{_any_of([*_EN_VALUES, *EN_MULTIPLIERS, *_EN_AFTER_NUMBER])})\b)"
_EN_RUN = rf"{_EN_FIRST}(?:[\s-]+{_EN_NEXT}|\s+and\s+\b(?:{_any_of(_EN_VALUES)})\b)*"
_EN_SCALE = rf"(?:\s?%|\s+per\s?cent\b|\s+(?:{_any_of([*EN_MULTIPLIERS, 'mn', 'bn', 'tn'])})\b)"
_EN_HINT = rf"\d|\b(?:{_any_of([*_EN_VALUES, *EN_MULTIPLIERS, *_EN_AFTER_NUMBER, 'half', 'zero'])})\b"
_EN_HOUR = rf"(\d{{1,2}}|{_any_of(EN_ONES[:12])})\b"
_EN_DIGITS = rf"(?:{_any_of(['zero', *EN_ONES[:9]])})"


def _english_point(match: re.Match[str]) -> str:
    return f"{_EN_WORDS.value(match[1])}.{''.join(str(_EN_VALUES.get(word, 0)) for word in match[2].split())}"


_EN_RULES: list[_Rule] = [
    ("’", "'"),
    (r"(?<=\d),(?=\d{3}(?!\d))|(?<=\d) (?=000(?!\d))", ""),
    _VERSION,
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
    (r"\b(\d{1,2})\.(\d{2})(?=\s?[ap]\.?m\b)", r"\1:\2"),
    (r"(?<=\d)(?=(?:[mbt]n|[mbtr]+illion)\b)", " "),
    (rf"({_EN_SMALL})(\s*[-–—]\s*|\s+(?:to|or)\s+)({_EN_VALUE})({_EN_SCALE})", r"\1\4\2\3\4"),
    (rf"(?<=between )({_EN_SMALL})(\s+and\s+)({_EN_VALUE})({_EN_SCALE})", r"\1\4\2\3\4"),
    (rf"\b(?:several|few|many|some|of)\s+(?:{_any_of(EN_MULTIPLIERS)})\b", ""),
    (r"\bhalf\s+an?\s+(?=[mbtr]+illion|dozen)", "0.5 "),
    (r"\b(?:an?|one)\s+([a-z]+)\s+and\s+a\s+half\b", r"1.5 \1"),
    (
        rf"({_EN_VALUE})[\s-]and[\s-](?:a[\s-])?half\b",
        lambda match: _format_number(_EN_WORDS.value(match[1]) + Fraction(1, 2)),
    ),
    (rf"\b(half past|quarter past|quarter to)\s+{_EN_HOUR}", _EN_WORDS.clock),
    (rf"({_EN_VALUE})\s+point\s+({_EN_DIGITS}(?:\s{_EN_DIGITS})*)\b", _english_point),
    (
        rf"({_EN_VALUE})[\s-]({_any_of(_EN_FRACTIONS)})\b",
        lambda match: f"{_EN_WORDS.value(match[1])}⁄{_EN_FRACTIONS[match[2]]}",
    ),
    (rf"\bone\s+(?:in|out\s+of)\s+({_EN_VALUE})", lambda match: f"1⁄{_EN_WORDS.value(match[1])}"),
    (r"\bone[\s-](third|quarter|fifth)\b", lambda match: f"1⁄{_EN_FRACTIONS[match[1] + 's']}"),
    (_EN_RUN, _EN_WORDS.to_digits),
    (r"(?<=\d)\s*(?:per\s?cent(?:age\s+points?)?|pct)\b", "%"),
    (r"(?<![\d:.])(\d{1,2})(?=\s?[ap]\.?m\b|\s?o'?\s?clock\b)", r"\1:00"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*(?:[-–]|to|and|or|until|till)\s*\d{1,2}:\d\d)", r"\1:00"),
]


# German; case-folded, hence with ss for ß.

DE_ONES = _words("ein zwei drei vier fünf sechs sieben acht neun")
DE_TEENS = _words("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn")
DE_TENS = _words("zwanzig dreissig vierzig fünfzig sechzig siebzig achtzig neunzig")
_DE_ORDINALS = _words("zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte")
_DE_MONTHS = _words("januar februar märz april mai juni juli august september oktober november dezember")
_DE_ENDINGS = ("", "n", "r", "s", "m")

_DE_WHOLE = {
    **{word: value for value, word in enumerate(DE_ONES, start=1)},
    **{word: value for value, word in enumerate(DE_TEENS, start=10)},
    **{word: 10 * value for value, word in enumerate(DE_TENS, start=2)},
    **{
        f"{o}und{t}": 10 * ten + one for one, o in enumerate(DE_ONES, start=1) for ten, t in enumerate(DE_TENS, start=2)
    },
    "eins": 1,
    "zwo": 2,
}
_DE_WHOLE |= {word.replace("ü", "ue").replace("ö", "oe"): value for word, value in _DE_WHOLE.items()}
_DE_VALUES: dict[str, Fraction | int] = {
    **_DE_WHOLE,
    **{f"{word}einhalb": value + Fraction(1, 2) for word, value in _DE_WHOLE.items()},
}
_DE_MULTIPLIERS = {"hundert": 10**2, "tausend": 10**3, "million": 10**6, "milliarde": 10**9, "billion": 10**12}
_DE_AFTER_NUMBER = {"millionen": 10**6, "milliarden": 10**9, "billionen": 10**12, "tsd": 10**3, "mio": 10**6}
_DE_AFTER_NUMBER |= {"mrd": 10**9, "dutzend": 12, "jahrzehnte": 10, "jahrzehnten": 10}
_DE_DENOMINATORS = _words("drittel viertel fünftel sechstel siebtel achtel neuntel zehntel")
_DE_FRACTIONS = {word: value for value, word in enumerate(_DE_DENOMINATORS, start=3)}

_DE_AMBIGUOUS: _Ambiguous = {
    **_with_values("null", 0),
    **_with_values("ein eine einen einem einer eines eins einmal erste ersten erster erstes erstem", 1),
    **_with_values("beide beiden beider beides paar doppelt doppelte zweit", 2),
    **_with_values("dritt", 3),
    **_with_values("jahrzehnt", 10),
    **_with_values("dutzend mittag", 12),
    **_with_values("mitternacht", 0, 12, 24),
    **_with_values("halb halbe halben halbem halber halbes hälfte", Fraction(1, 2), 30),
    **_with_values("drittel", Fraction(1, 3)),
    **_with_values("viertel", Fraction(1, 4), 15),
    **{f"{word}{ending}": (value,) for value, word in enumerate(_DE_ORDINALS, start=2) for ending in _DE_ENDINGS},
    **{word: (value,) for value, word in enumerate(_DE_MONTHS, start=1)},
}
_DE_WORDS = _NumberWords(_DE_VALUES, _DE_MULTIPLIERS | _DE_AFTER_NUMBER, _DE_AMBIGUOUS)

_DE_CARDINAL = rf"(?:{_any_of(_DE_WHOLE)})(?:einhalb)?+"
_DE_MORPHEMES = rf"{_DE_CARDINAL}|hundert|tausend"
_DE_HINT_WORDS = [*_DE_WHOLE.keys() - {"ein", "eins"}, *_DE_MULTIPLIERS, *_DE_AFTER_NUMBER, *_DE_FRACTIONS]
_DE_HINT = rf"\d|\b(?:{_any_of(['halb', 'anderthalb', *_DE_HINT_WORDS])}|ein(?!(?:e[nrsm]?|s|mal)?\b))"
_DE_COMPOUND = (  # but not "ein" or "einfach"
    rf"(?!ein(?:s|mal|fach)?(?:e[nrsm]?)?\b)(?:{_DE_MORPHEMES})(?:(?:und)?+(?:{_DE_MORPHEMES}))*+"
    r"(?:(?:mal|malig|fach|spurig|jährig|stündig|tägig|wöchig|monatig|köpfig|stellig)(?:e[nrsm]?)?|s?te[nrsm]?)?"
)
_DE_WORD = rf"\b(?:{_DE_COMPOUND}|million|milliarde|billion)\b"
_DE_NEXT = rf"\b(?:{_DE_COMPOUND}|{_any_of([*_DE_MULTIPLIERS, *_DE_AFTER_NUMBER])})\b"
_DE_RUN = rf"(?:{_DECIMAL}|{_DE_WORD})(?:[\s-]+(?:{_DECIMAL}|{_DE_NEXT}))*"
_DE_SCALE = rf"(?:\s?%|\s+prozent\b|\s+(?:{_any_of([*_DE_MULTIPLIERS, *_DE_AFTER_NUMBER])})\b)"
_DE_SMALL = rf"(?:(?<![\d.,])\d{{1,3}}(?:\.\d+)?|\b{_DE_CARDINAL}\b)"
_DE_HOUR = rf"(\d{{1,2}}|{_any_of([*DE_ONES, 'eins', *DE_TEENS[:3]])})\b"
_DE_VALUE = rf"(?:{_DECIMAL}|\b{_DE_CARDINAL}\b)"


def _german_plain(match: re.Match[str]) -> str:
    return re.sub("[^0-9,]", "", match[0]).replace(",", ".")


_DE_RULES: list[_Rule] = [
    (r"\b(\d{1,2})[.:](\d{2})(?=\s*uhr\b)", r"\1:\2"),
    (r"\b(\d{1,2})\s+uhr\s+(\d{2})\b", r"\1:\2"),
    (r"\b(?:mehrere|einige|viele|paar)n? (?:hundert|tausend|million|milliarde)(?:en?)?\b", ""),
    (r"\bausser acht\b|\bacht(?= (?:zu )?(?:geb|gib|lass|lässt))", ""),
    (r"\d{1,3}(?:[. \u00a0\u202f]\d{3})+(?!\d)(?:,\d+)?|\d+,\d+", _german_plain),
    _VERSION,
    (rf"({_DE_SMALL})(\s*[-–—]\s*|\s+(?:bis|oder)\s+)({_DE_VALUE})({_DE_SCALE})", r"\1\4\2\3\4"),
    (rf"(?<=zwischen )({_DE_SMALL})(\s+und\s+)({_DE_VALUE})({_DE_SCALE})", r"\1\4\2\3\4"),
    (r"\banderthalb\b", "1.5"),
    (r"\beine[rn]?\s+halben?\s+(?=million|milliarde|billion)", "0.5 "),
    (r"\beine[rn]?\s+(?=million|milliarde|billion)", "1 "),
    (rf"\b(halb|viertel nach|viertel vor)\s+{_DE_HOUR}", _DE_WORDS.clock),
    (
        rf"({_DE_VALUE})\s+komma\s+(\d+|{_any_of(DE_ONES)})\b",
        lambda m: f"{_DE_WORDS.value(m[1])}.{_DE_WORDS.value(m[2])}",
    ),
    (rf"({_DE_VALUE})\s+({_any_of(_DE_FRACTIONS)})\b", lambda m: f"{_DE_WORDS.value(m[1])}⁄{_DE_FRACTIONS[m[2]]}"),
    (_DE_RUN, _DE_WORDS.to_digits),
    (r"(?<=\d)[\s-]*prozent(?:punkten?)?\b", "%"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*uhr\b)", r"\1:00"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*(?:[-–]|bis|und|oder)\s*\d{1,2}:\d\d)", r"\1:00"),
]


# Chinese.

_ZH_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_ZH_SMALL_UNITS = {"十": 10, "百": 100, "千": 1000}
_ZH_UNITS = {**_ZH_SMALL_UNITS, "万": 10**4, "亿": 10**8, "兆": 10**12}
_ZH_FINAL_DIGITS = {**_ZH_DIGITS, **{str(value): value for value in range(1, 10)}}
_ZH_DIGIT = f"[{''.join(_ZH_DIGITS)}]"
_ZH_NUMERAL = rf"(?:{_DECIMAL}|[{''.join(_ZH_DIGITS)}{''.join(_ZH_UNITS)}]){{1,24}}"
_ZH_HINT = rf"\d|[一周期拜]一|一点|[半成{''.join((_ZH_DIGITS | _ZH_UNITS).keys() - {'一'})}]"
_ZH_TOKEN = re.compile(rf"{_DECIMAL}|.")

# One character alone is often part of a word.
_ZH_AMBIGUOUS: _Ambiguous = {
    **{character: (value,) for character, value in {**_ZH_DIGITS, **_ZH_SMALL_UNITS}.items()},
    **_with_values("首", 1),
    **_with_values("俩 双", 2),
    **_with_values("仨", 3),
    **_with_values("刻", 15),
    **_with_values("半", Fraction(1, 2), 30),
}

_ZH_FIRST = rf"(?<![\d{''.join(_ZH_DIGITS)}{''.join(_ZH_UNITS)}])"  # not inside a numeral
_ZH_NOT_NUMBERS = re.compile(
    r"(?:星期|礼拜|周)[一二三四五六](?![次个])"
    rf"|{_ZH_FIRST}(?:十分(?![之钟])|千万(?=[别不要记小注])|万一|亿万|万千|百姓|百万富翁|一万步|三明治|四川)"
    rf"|[几数][十百千万亿]+|数以[百千万亿]+计|成千上万|{_ZH_FIRST}十几|(?<!以)上[百千万亿]+(?![分{''.join(_ZH_DIGITS)}])"
    rf"|{_ZH_FIRST}[一二两三四五六七八九]{{2}}[十百千万亿]+"  # 六七十, sixty or seventy
)


def _chinese_value(text: str) -> Fraction:
    """Return the value of a numeral: 三千五百, 3万5千, 1.5亿, 二〇二六, 三万五."""
    tokens = _ZH_TOKEN.findall(text)
    if all(token in _ZH_DIGITS for token in tokens):
        return Fraction(int("".join(str(_ZH_DIGITS[token]) for token in tokens)))
    *_, unit, digit = "", *tokens
    if digit in _ZH_FINAL_DIGITS and _ZH_UNITS.get(unit, 0) > 10:  # 三万五 is 35,000
        tokens[-1] = _format_number(Fraction(_ZH_FINAL_DIGITS[digit] * _ZH_UNITS[unit], 10))
    parts = []
    for token in tokens:
        if token in _ZH_UNITS:
            parts.append(_Part(Fraction(_ZH_UNITS[token]), multiplies=True))
        elif token not in "零〇":
            is_word = token in _ZH_DIGITS
            parts.append(_Part(Fraction(_ZH_DIGITS[token] if is_word else token), is_word=is_word))
    return sum(_compose(parts), Fraction(0))


def _chinese_digits(text: str) -> str:
    return _format_number(_chinese_value(text))


def _chinese_numeral(match: re.Match[str]) -> str:
    """Convert a numeral to digits, except single characters and two digits in a row, which are approximate (三四个)."""
    text = match[0]
    is_approximate = len(text) == 2 and all(c in _ZH_DIGITS and c not in "零〇" for c in text)
    is_kept = text in _ZH_AMBIGUOUS or text in "万亿兆" or text.isdecimal() or is_approximate
    return text if is_kept else _chinese_digits(text)


def _chinese_clock(match: re.Match[str]) -> str:
    hour, minute = match["hour"], match["minute"]
    if hour == "一" and not match["rest"]:
        return match[0]  # 一点, a little
    value = _chinese_value(hour)
    if minute and all(c in _ZH_DIGITS for c in minute) and not match["mark"]:
        return f"{_format_number(value)}.{''.join(str(_ZH_DIGITS[c]) for c in minute)}"  # 三点五
    if value > 24:
        return f"{_format_number(value)}{match[0][len(hour) :]}"
    minutes = {"半": 30, "一刻": 15, "三刻": 45}.get(match["rest"] or "") or (
        int(_chinese_value(minute)) if minute else 0
    )
    return f"{_format_number(value)}:{minutes:02d} " if minutes < 60 else match[0]


def _chinese_decimals(match: re.Match[str]) -> str:
    return f"{_chinese_digits(match[1])}.{''.join(str(_ZH_DIGITS.get(c, c)) for c in match[2])}"


_ZH_RULES: list[_Rule] = [
    ("[０-９％．：]", lambda match: normalize("NFKC", match[0])),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    _VERSION,
    (_ZH_NOT_NUMBERS, "·"),
    (rf"(?<=[\d%])\s+(?=[{HAN}])|(?<=[{HAN}])\s+(?=\d)", ""),
    (r"(?<=[\d十百千])[多余来](?=[万亿])|(?<=\d)个(?=[万亿])", ""),
    (rf"{_ZH_NUMERAL}世纪(?={_ZH_NUMERAL}年代)", ""),
    (
        rf"(?<![\d.])({_DECIMAL}|{_ZH_DIGIT}+)(\s*(?:到|至|-|–|—|~|、)\s*)({_DECIMAL}|[十百千]|{_ZH_DIGIT}+)(万亿|[百千万亿%])",
        r"\1\4\2\3\4",
    ),
    (rf"百分之({_ZH_NUMERAL})点({_ZH_DIGIT}+)", lambda match: f"{_chinese_decimals(match)}%"),
    (rf"百分之({_ZH_NUMERAL})", lambda match: f"{_chinese_digits(match[1])}%"),
    (rf"({_ZH_NUMERAL})个百分点", lambda match: f"{_chinese_digits(match[1])}%"),
    (rf"({_ZH_NUMERAL})分之({_ZH_NUMERAL})", lambda match: f"{_chinese_digits(match[2])}⁄{_chinese_digits(match[1])}"),
    (rf"差一刻({_ZH_NUMERAL})点", lambda match: f"{int(_chinese_value(match[1])) - 1 or 12}:45"),
    (
        rf"(?P<hour>{_ZH_NUMERAL})(?:点|(?<=\d)时)(?P<rest>半|[一三]刻|钟|整|(?P<minute>{_ZH_NUMERAL})(?P<mark>分?))?(?!{_ZH_DIGIT})",
        _chinese_clock,
    ),
    (
        rf"({_ZH_NUMERAL})(个|年|天|周|星期|小时|岁|倍|公里|里)半",
        lambda match: f"{_format_number(_chinese_value(match[1]) + Fraction(1, 2))}{match[2]}",
    ),
    (rf"({_ZH_NUMERAL})块({_ZH_DIGIT}|\d)(?=美元|钱|的|$|[，。！？、；])", _chinese_decimals),
    (rf"({_ZH_NUMERAL})千(?=[米克瓦卡])", lambda match: f"{_chinese_digits(match[1])}k"),
    (rf"({_ZH_NUMERAL})(?=成(?![为了功员立本人就长交绩果熟年]))", lambda match: _chinese_digits(match[1])),
    (_ZH_NUMERAL, _chinese_numeral),
]
