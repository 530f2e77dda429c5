"""Convert German numbers to digits."""

from __future__ import annotations

import re
from fractions import Fraction

from simulmt.text.numbers import DECIMAL, VERSION, Ambiguous, Notation, NumberWords, Rule, any_of, with_values, words

# Case-folded, hence with ss for ß.
_ONES = words("ein zwei drei vier fünf sechs sieben acht neun")
_TEENS = words("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn")
_TENS = words("zwanzig dreissig vierzig fünfzig sechzig siebzig achtzig neunzig")
_ORDINALS = words("zweite dritte vierte fünfte sechste siebte achte neunte zehnte elfte zwölfte")
_MONTHS = words("januar februar märz april mai juni juli august september oktober november dezember")
_ENDINGS = ("", "n", "r", "s", "m")

_WHOLE = {
    **{word: value for value, word in enumerate(_ONES, start=1)},
    **{word: value for value, word in enumerate(_TEENS, start=10)},
    **{word: 10 * value for value, word in enumerate(_TENS, start=2)},
    **{f"{o}und{t}": 10 * ten + one for one, o in enumerate(_ONES, start=1) for ten, t in enumerate(_TENS, start=2)},
    "eins": 1,
    "zwo": 2,
}
_WHOLE |= {word.replace("ü", "ue").replace("ö", "oe"): value for word, value in _WHOLE.items()}
_VALUES: dict[str, Fraction | int] = {
    **_WHOLE,
    **{f"{word}einhalb": value + Fraction(1, 2) for word, value in _WHOLE.items()},
}
_MULTIPLIERS = {"hundert": 10**2, "tausend": 10**3, "million": 10**6, "milliarde": 10**9, "billion": 10**12}
_AFTER_NUMBER = {"millionen": 10**6, "milliarden": 10**9, "billionen": 10**12, "tsd": 10**3, "mio": 10**6}
_AFTER_NUMBER |= {"mrd": 10**9, "dutzend": 12, "jahrzehnte": 10, "jahrzehnten": 10}
_DENOMINATORS = words("drittel viertel fünftel sechstel siebtel achtel neuntel zehntel")
_FRACTIONS = {word: value for value, word in enumerate(_DENOMINATORS, start=3)}

_AMBIGUOUS: Ambiguous = {
    **with_values("null", 0),
    **with_values("ein eine einen einem einer eines eins einmal erste ersten erster erstes erstem", 1),
    **with_values("beide beiden beider beides paar doppelt doppelte zweit", 2),
    **with_values("dritt", 3),
    **with_values("jahrzehnt", 10),
    **with_values("dutzend mittag", 12),
    **with_values("mitternacht", 0, 12, 24),
    **with_values("halb halbe halben halbem halber halbes hälfte", Fraction(1, 2), 30),
    **with_values("drittel", Fraction(1, 3)),
    **with_values("viertel", Fraction(1, 4), 15),
    **{f"{word}{ending}": (value,) for value, word in enumerate(_ORDINALS, start=2) for ending in _ENDINGS},
    **{word: (value,) for value, word in enumerate(_MONTHS, start=1)},
}
_WORDS = NumberWords(_VALUES, _MULTIPLIERS | _AFTER_NUMBER, _AMBIGUOUS)

_CARDINAL = rf"(?:{any_of(_WHOLE)})(?:einhalb)?+"
_MORPHEMES = rf"{_CARDINAL}|hundert|tausend"
_COMPOUND = (  # but not "ein" or "einfach"
    rf"(?!ein(?:s|mal|fach)?(?:e[nrsm]?)?\b)(?:{_MORPHEMES})(?:(?:und)?+(?:{_MORPHEMES}))*+"
    r"(?:(?:mal|malig|fach|spurig|jährig|stündig|tägig|wöchig|monatig|köpfig|stellig)(?:e[nrsm]?)?|s?te[nrsm]?)?"
)
_WORD = rf"\b(?:{_COMPOUND}|million|milliarde|billion)\b"
_NEXT = rf"\b(?:{_COMPOUND}|{any_of([*_MULTIPLIERS, *_AFTER_NUMBER])})\b"
_RUN = rf"(?:{DECIMAL}|{_WORD})(?:[\s-]+(?:{DECIMAL}|{_NEXT}))*"
_SCALE = rf"(?:\s?%|\s+prozent\b|\s+(?:{any_of([*_MULTIPLIERS, *_AFTER_NUMBER])})\b)"
_SMALL = rf"(?:(?<![\d.,])\d{{1,3}}(?:\.\d+)?|\b{_CARDINAL}\b)"
_HOUR = rf"(\d{{1,2}}|{any_of([*_ONES, 'eins', *_TEENS[:3]])})\b"
_VALUE = rf"(?:{DECIMAL}|\b{_CARDINAL}\b)"


def _plain(match: re.Match[str]) -> str:
    return re.sub("[^0-9,]", "", match[0]).replace(",", ".")


def _clock(match: re.Match[str]) -> str:
    hour = int(_WORDS.value(match[2]))
    before = hour - 1 or 12
    return {"halb": f"{before}:30", "viertel nach": f"{hour}:15", "viertel vor": f"{before}:45"}[match[1]]


_RULES: list[Rule] = [
    (r"\b(\d{1,2})[.:](\d{2})(?=\s*uhr\b)", r"\1:\2"),
    (r"\b(\d{1,2})\s+uhr\s+(\d{2})\b", r"\1:\2"),
    (r"\b(?:mehrere|einige|viele|paar)n? (?:hundert|tausend|million|milliarde)(?:en?)?\b", ""),
    (r"\bausser acht\b|\bacht(?= (?:zu )?(?:geb|gib|lass|lässt))", ""),
    (r"\d{1,3}(?:[. \u00a0\u202f]\d{3})+(?!\d)(?:,\d+)?|\d+,\d+", _plain),
    VERSION,
    (rf"({_SMALL})(\s*[-–—]\s*|\s+(?:bis|oder)\s+)({_VALUE})({_SCALE})", r"\1\4\2\3\4"),
    (rf"(?<=zwischen )({_SMALL})(\s+und\s+)({_VALUE})({_SCALE})", r"\1\4\2\3\4"),
    (r"\banderthalb\b", "1.5"),
    (r"\beine[rn]?\s+halben?\s+(?=million|milliarde|billion)", "0.5 "),
    (r"\beine[rn]?\s+(?=million|milliarde|billion)", "1 "),
    (rf"\b(halb|viertel nach|viertel vor)\s+{_HOUR}", _clock),
    (rf"({_VALUE})\s+komma\s+(\d+|{any_of(_ONES)})\b", lambda m: f"{_WORDS.value(m[1])}.{_WORDS.value(m[2])}"),
    (rf"({_VALUE})\s+({any_of(_FRACTIONS)})\b", lambda m: f"{_WORDS.value(m[1])}⁄{_FRACTIONS[m[2]]}"),
    (_RUN, _WORDS.to_digits),
    (r"(?<=\d)[\s-]*prozent(?:punkten?)?\b", "%"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*uhr\b)", r"\1:00"),
    (r"(?<![\d:.])(\d{1,2})(?=\s*(?:[-–]|bis|und|oder)\s*\d{1,2}:\d\d)", r"\1:00"),
]
NOTATION = Notation(_RULES, _AMBIGUOUS)
