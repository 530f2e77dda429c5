"""Replace numbers in sentence pairs with other numbers of the same kind, consistently on both sides.

Trained on such pairs, a model learns to copy and convert numbers instead of remembering those it has seen. A wrong
pair would teach errors, so a number is replaced only if it is unambiguous: its value occurs exactly once on each side,
written in figures, in figures with a scale (1.5 billion, 15亿) or as a word up to ninety-nine.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, map_chunks
from simulmt.data.transforms import CHUNK_PAIRS, Dropped, Job, Report, Rewritten, sample_pairs, write_pairs
from simulmt.files import cores
from simulmt.text.numbers import (
    DE_ONES,
    DE_TEENS,
    DE_TENS,
    EN_MULTIPLIERS,
    EN_ONES,
    EN_TENS,
    Number,
    find_numbers,
    unmatched,
)

_UNCERTAIN = "uncertain"  # reason to drop a pair
_ATTEMPTS = 20  # attempts to find a value that both languages can write
_LARGEST_WORD = 99
_LARGEST_SMALL_WORD = 12
_SMALLEST_NEW_WORD = 3  # "all two" and 二个 would be wrong
_MAX_CHINESE_DECIMALS = 3
_NEW_YEARS = range(1900, 2030)
_LAST_DAY = 31
_CONTEXT = 20  # characters of left context to search
_ONE = Fraction(1)
_PERCENT = Fraction(1, 100)


@dataclass(frozen=True)
class NumberSwapConfig:
    """Languages of the pairs, the probability that a pair is used, and the seed."""

    languages: tuple[str, str]
    share: float = 0.2
    seed: int = 1

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")
        known = ", ".join(_LANGUAGES)
        for language in self.languages:
            require(language in _LANGUAGES, f"numbers of {language} cannot be replaced; expected one of {known}")


def swap_corpus_numbers(
    source: Path,
    target: Path,
    prefix: Path,
    config: NumberSwapConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Sample pairs and replace their numbers; skip pairs without replaceable numbers."""
    job = Job.on_files(prefix, "numbers", as_table(config), {"source": source, "target": target}, overwrite)

    def results() -> Iterator[Rewritten]:
        pairs = sample_pairs(source, target, config.share, config.seed)
        chunks = map_chunks(partial(_swap_pairs, config), pairs, CHUNK_PAIRS, cores())
        return chain.from_iterable(rewritten for _, rewritten in chunks)

    return write_pairs(job, results, report)


def _swap_pairs(config: NumberSwapConfig, pairs: Sequence[Pair]) -> list[Rewritten]:
    return [swapped for pair in pairs if (swapped := _swap_pair(config, pair)) is not None]


def _swap_pair(config: NumberSwapConfig, pair: Pair) -> Rewritten | None:
    """Replace the numbers of a pair, seeded by its line, so independent of other lines; None if it has none."""
    texts = pair.source, pair.target
    matches = match_numbers(texts, config.languages)
    if not matches:
        return None
    swapped = swap_matches(texts, config.languages, matches, random.Random(f"{config.seed}:{pair.line}"))
    return swapped or Dropped(_UNCERTAIN, pair.line)


class Span(NamedTuple):
    """A number in a text: figures times a unit, such as 10^9 or 1/100, or a word (`figures` is empty)."""

    start: int
    end: int
    value: Fraction
    figures: str = ""  # without thousands separators, and with a decimal point
    unit: Fraction = _ONE
    is_grouped: bool = False  # has thousands separators
    is_year: bool = False
    is_replaceable: bool = True


Match = tuple[Span, Span]  # the same number in source and target


def match_numbers(texts: tuple[str, str], languages: tuple[str, str]) -> list[Match]:
    """Return the replaceable numbers whose value occurs exactly once on each side."""
    source, target = (_LANGUAGES[language] for language in languages)
    if not (target.may_have_number(texts[1]) and source.may_have_number(texts[0])):
        return []
    ours, theirs = _by_unique_value(source.spans(texts[0])), _by_unique_value(target.spans(texts[1]))
    shared = [(ours[value], theirs[value]) for value in ours if value in theirs and value != 1]
    return [match for match in shared if match[0].is_replaceable and match[1].is_replaceable]


def _by_unique_value(spans: Sequence[Span]) -> dict[Fraction, Span]:
    count = Counter(span.value for span in spans)
    return {span.value: span for span in spans if count[span.value] == 1}


def swap_matches(
    texts: tuple[str, str], languages: tuple[str, str], matches: Sequence[Match], rng: random.Random
) -> tuple[str, str] | None:
    """Replace the matched numbers with random ones; return None if the result cannot be verified."""
    old = {match[0].value for match in matches}
    new: set[Fraction] = set()
    edits: tuple[list[_Edit], list[_Edit]] = [], []
    for match in matches:
        replacement = _replacement(texts, languages, match, rng, old | new)
        if replacement is None:
            old.remove(match[0].value)
            continue
        new.add(replacement[0])
        for span, text, side in zip(match, replacement[1], edits, strict=True):
            side.append((span.start, span.end, text))
    swapped = _apply_edits(texts[0], edits[0]), _apply_edits(texts[1], edits[1])
    return swapped if new and _is_verified(swapped, languages, old, new) else None


_Edit = tuple[int, int, str]  # start, end, and the new text


def _replacement(
    texts: tuple[str, str], languages: tuple[str, str], match: Match, rng: random.Random, taken: set[Fraction]
) -> tuple[Fraction, tuple[str, str]] | None:
    """Return a new value that is not taken, and how each side writes it."""
    for _ in range(_ATTEMPTS):
        value = _new_value(*match, rng)
        if value in taken or value == 1:
            continue
        source, target = (
            _LANGUAGES[language].write(value, span, text)
            for language, span, text in zip(languages, match, texts, strict=True)
        )
        if source and target:
            return value, (source, target)
    return None


def _new_value(source: Span, target: Span, rng: random.Random) -> Fraction:
    """Return a random number of the same kind."""
    if not (source.figures and target.figures):
        return Fraction(_new_word_value(int(source.value), rng))
    if source.is_year and target.is_year:
        return Fraction(rng.choice(_NEW_YEARS))
    return Fraction(_new_figures(source.figures, rng)) * source.unit


def _new_word_value(value: int, rng: random.Random) -> int:
    if value <= _LARGEST_SMALL_WORD:
        return rng.randint(_SMALLEST_NEW_WORD, _LARGEST_SMALL_WORD)
    return 10 * rng.randint(2, 9) if value % 10 == 0 else rng.randint(_LARGEST_SMALL_WORD + 1, _LARGEST_WORD)


def _new_figures(figures: str, rng: random.Random) -> str:
    """Replace the digits of a number, keeping its length and final zeros: 3500 becomes 8200, 0.25 0.71."""
    significant = len(figures.rstrip("0.")) or 1
    lead = figures[:2] if figures.startswith("0.") else ""
    digits = [*figures]
    for index in range(len(lead), significant):
        if digits[index] != ".":
            is_at_end = index in (0, significant - 1)
            digits[index] = str(rng.randint(1 if is_at_end else 0, 9))
    return "".join(digits)


def _apply_edits(text: str, edits: Iterable[_Edit]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _is_verified(texts: tuple[str, str], languages: tuple[str, str], old: set[Fraction], new: set[Fraction]) -> bool:
    """Return whether no old number remains, every new number occurs once, and all numbers agree."""
    ours, theirs = (find_numbers(text, language) for text, language in zip(texts, languages, strict=True))
    if not all(_has_swapped(numbers, old, new) for numbers in (ours, theirs)):
        return False
    return all(number.values == {_ONE} for number in (*unmatched(ours, theirs), *unmatched(theirs, ours)))


def _has_swapped(numbers: Sequence[Number], old: set[Fraction], new: set[Fraction]) -> bool:
    count = Counter(value for number in numbers for value in number.values)
    return not any(count[value] for value in old) and all(count[value] == 1 for value in new)


# How languages write numbers.

# Contexts in which a number may not be an amount. Before it: words and names (COVID-19), negative numbers, code. After
# it: words (3D, 25th), clock times, fractions, larger numbers.
_BEFORE = r"[-–—−+*/\\^=<>_#&@~×±.,:'’|]$"
_AFTER = r"['’*/\\^=<>_@×±|]|\s?[-–—~:][0-9]|[-–—](?!\w)"
_LETTER = r"[^\W0-9]"
_CURRENCY = "[$£€¥]"
_DIGIT, _WORD = re.compile("[0-9]"), re.compile(r"\w+")
_LINK = re.compile(  # between the numbers of a range, score or list
    r"(?:\s?%|\s?per\s?cent|\s?prozent|\s[mbtr]+illion|\smilli(?:on|ard)en|\sbillionen)?\s*"
    r"(?:[-–—/:x×~～：比到至或和与、&]|to|or|and|through|by|versus|vs\.?|out\sof|bis|oder|und|von|zu|mal"
    rf"|\.(?:\s(?:und|bis|oder))?)?\s*{_CURRENCY}?",
    re.IGNORECASE,
)
_YEAR = re.compile("1[0-9]{3}|20[0-9]{2}")
_FIGURES = r"(?P<figures>[0-9]+(?:[.,][0-9]+)*)"


class _Language:
    """The number format of a language, and the contexts in which numbers are not replaced. Patterns ignore case."""

    def __init__(
        self,
        number: str,  # with the groups figures, scale and word
        words: Mapping[int, str],
        scales: Mapping[str, int],
        before: str,
        after: str,
        percent: str,
        month: str,  # before a day
        day: str,  # after a day
        decimal: str = ".",
        year: str = "",  # after a year
    ) -> None:
        self._words, self._scales, self._decimal = words, scales, decimal
        self._separator = "," if decimal == "." else "."
        self._values = {word.casefold(): value for value, word in words.items()}
        grouped = rf"[1-9][0-9]{{0,2}}(?:\{self._separator}[0-9]{{3}})+"
        self._well_formed = re.compile(rf"(?:{grouped}|0|[1-9][0-9]*)(?:\{decimal}[0-9]+)?")
        patterns = number, f"{_BEFORE}|{before}", f"{_AFTER}|{after}", percent, f"(?:{month})\\s?$", day, year
        self._number, self._before, self._after, self._percent, self._month, self._day, self._year = (
            re.compile(pattern, re.IGNORECASE) for pattern in patterns
        )

    def may_have_number(self, text: str) -> bool:
        """Return whether a text may have a replaceable number; much faster than finding it."""
        return bool(_DIGIT.search(text)) or not self._values.keys().isdisjoint(_WORD.findall(text.casefold()))

    def spans(self, text: str) -> list[Span]:
        """Return all numbers in a text; the parts of ranges and lists are not replaceable."""
        spans = [self._span(text, match) for match in self._number.finditer(text)]
        linked = [bool(_LINK.fullmatch(text, one.end, other.start)) for one, other in pairwise(spans)]
        return [
            span._replace(is_replaceable=False) if before or after else span
            for span, before, after in zip(spans, [False, *linked], [*linked, False], strict=True)
        ]

    def _span(self, text: str, match: re.Match[str]) -> Span:
        if match["word"]:
            named = Fraction(self._values.get(match["word"].casefold(), 0))
            return Span(*match.span(), named, is_replaceable=self._is_amount(text, match, named))
        figures = match["figures"].replace(self._separator, "").replace(self._decimal, ".")
        if not self._well_formed.fullmatch(match["figures"]):
            return Span(*match.span("figures"), Fraction(0), is_replaceable=False)
        unit = Fraction(self._scales[match["scale"].strip().lstrip("-").casefold()] if match["scale"] else 1)
        if self._is_percentage(text, match):
            unit = _PERCENT
        value = Fraction(figures) * unit
        return Span(
            *self._replaced_span(match),
            value,
            figures,
            unit,
            is_grouped=self._separator in match["figures"],
            is_year=bool(_YEAR.fullmatch(match[0]) and self._year.match(text, match.end())),
            is_replaceable=self._is_amount(text, match, value),
        )

    def _replaced_span(self, match: re.Match[str]) -> tuple[int, int]:
        """Return the part of figures and scale that is replaced."""
        return match.span("figures")

    def _is_percentage(self, text: str, match: re.Match[str]) -> bool:
        return self._percent.match(text, match.end()) is not None

    def _is_amount(self, text: str, match: re.Match[str], value: Fraction) -> bool:
        """Return whether a number is an amount, not a part of something else, such as a day or a larger number."""
        start, first = match.start(), max(0, match.start() - _CONTEXT)
        if value <= _LAST_DAY and (self._month.search(text, first, start) or self._day.match(text, match.end())):
            return False
        return value > 0 and not (self._before.search(text, first, start) or self._after.match(text, match.end()))

    def write(self, value: Fraction, span: Span, text: str) -> str | None:
        """Format a value like the number it replaces; return None if it cannot take the same form."""
        if span.figures:
            return self._write_figures(value / span.unit, span)
        word, old = self._words.get(int(value)), text[span.start : span.end]
        if word is None or old.islower():
            return word
        return word.upper() if old.isupper() else word.capitalize()

    def _write_figures(self, value: Fraction, span: Span) -> str | None:
        decimals = len(span.figures.partition(".")[2])
        figures = _decimal(value, decimals)
        if figures is None or len(figures) != len(span.figures) or figures == "1":
            return None
        whole, _, fraction = figures.partition(".")
        if span.is_grouped:
            whole = f"{int(whole):,}".replace(",", self._separator)
        return f"{whole}{self._decimal}{fraction}" if fraction else whole


def _decimal(value: Fraction, decimals: int) -> str | None:
    """Write a value with the given number of decimals, or return None if they are not enough."""
    scaled = value * 10**decimals
    if scaled.denominator != 1:
        return None
    figures = f"{scaled.numerator:0{decimals + 1}d}"
    return f"{figures[:-decimals]}.{figures[-decimals:]}" if decimals else figures


_EN_ARTICLE = re.compile(rf"\b(an?)\s{_CURRENCY}?$", re.IGNORECASE)
_EN_VOWEL = re.compile(r"8|1[18](?:[0-9]{2}|,[0-9]{3}|)(?![0-9,])|eight|eleven", re.IGNORECASE)  # an 18-year-old


class _English(_Language):
    def write(self, value: Fraction, span: Span, text: str) -> str | None:
        new = super().write(value, span, text)
        article = _EN_ARTICLE.search(text, max(0, span.start - _CONTEXT), span.start)
        if new and article and (article[1].casefold() == "an") != bool(_EN_VOWEL.match(new)):
            return None
        return new


_ZH_DIGITS = "零一二三四五六七八九"
_ZH_NUMERAL = "[零〇一二三四五六七八九十百千万亿兆两]"
_ZH_HINT = re.compile("[0-9三四五六七八九十]")
_ZH_COUNTED = re.compile(  # follows a single character that is a number, not part of a word
    "[个名位岁年天次种座家人只条件张本辆艘架枚票届章集场轮代层倍所篇首支组队项类款片块棵头匹间幅份封杯瓶]"
    "|小时|分钟|美元|英里|公里|英尺|英镑|部(?!分)"
)
_ZH_APPROXIMATE = re.compile("[多余来]")  # follows round numbers only


class _Chinese(_Language):
    def may_have_number(self, text: str) -> bool:
        return _ZH_HINT.search(text) is not None

    def _replaced_span(self, match: re.Match[str]) -> tuple[int, int]:
        return match.start("figures"), match.end()

    def _is_percentage(self, text: str, match: re.Match[str]) -> bool:
        return match["percent"] is not None or super()._is_percentage(text, match)

    def _is_amount(self, text: str, match: re.Match[str], value: Fraction) -> bool:
        if match["word"]:
            is_counted = len(match["word"]) > 1 or _ZH_COUNTED.match(text, match.end())
            if not is_counted or _ZH_APPROXIMATE.match(text, match.end()):
                return False
        return super()._is_amount(text, match, value)

    def _write_figures(self, value: Fraction, span: Span) -> str | None:
        """Write figures with the largest scale that fits, if the span has a scale."""
        if span.unit < min(self._scales.values()):
            return super()._write_figures(value, span)
        value *= span.unit
        for name, unit in self._scales.items():
            if value >= unit:
                shortest = (_decimal(value / unit, decimals) for decimals in range(_MAX_CHINESE_DECIMALS + 1))
                figures = next(filter(None, shortest), None)
                return figures and f"{figures}{name}"
        return None


_EN_WORDS = {
    **{value: word for value, word in enumerate(EN_ONES, start=1) if value > 1},
    **{10 * tens: ten for tens, ten in enumerate(EN_TENS, start=2)},
    **{
        10 * tens + ones: f"{ten}-{one}"
        for tens, ten in enumerate(EN_TENS, start=2)
        for ones, one in enumerate(EN_ONES[:9], start=1)
    },
}
_EN_MULTIPLIER = "hundred|thousand|[mbtr]+illion|dozen"
_EN_MONTH = r"\b(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)(?:\w*ary|ch|il|ust|\w*ber)?\b\.?"
_EN_SCALE_WORDS = {word: value for word, value in EN_MULTIPLIERS.items() if word != "hundred"}
_EN_SCALE_SYMBOLS = {"mn": 10**6, "bn": 10**9, "tn": 10**12}  # £1.5bn
_DE_WORDS = {
    **{value: word for value, word in enumerate([*DE_ONES, *DE_TEENS], start=1) if value > 1},
    **{10 * tens: ten for tens, ten in enumerate(DE_TENS, start=2)},
    **{
        10 * tens + ones: f"{one}und{ten}"
        for tens, ten in enumerate(DE_TENS, start=2)
        for ones, one in enumerate(DE_ONES, start=1)
    },
}
_DE_WORDS = {value: word.replace("dreissig", "dreißig") for value, word in _DE_WORDS.items()}  # they are case-folded
_DE_MULTIPLIER = "hundert|tausend|milli(?:on|arde)(?:en|n)?|billion(?:en)?|dutzend"
_DE_MONTH = r"\b(?:jan|feb|märz|apr|mai|juni|juli|aug|sep|okt|nov|dez)(?:uar|il|ust|\w*ber)?\b\.?"
_DE_SCALES = {"tausend": 10**3, "millionen": 10**6, "milliarden": 10**9, "billionen": 10**12}
_DE_SCALES |= {"mio.": 10**6, "mio": 10**6, "mrd.": 10**9, "mrd": 10**9}
_ZH_WORDS = {  # without 2, which is 二 or 两 depending on the next word
    value: f"{_ZH_DIGITS[value // 10] if value >= 20 else ''}{'十' if value >= 10 else ''}{_ZH_DIGITS[value % 10]}"
    for value in range(3, _LARGEST_WORD + 1)
}
_ZH_WORDS = {value: word.removesuffix("零") for value, word in _ZH_WORDS.items()}
_ZH_SCALES = {"万亿": 10**12, "亿": 10**8, "万": 10**4}  # largest first


def _any_of(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


_LANGUAGES: Mapping[str, _Language] = {
    "en": _English(
        rf"{_FIGURES}(?P<scale>(?:[\s-](?:{_any_of(_EN_SCALE_WORDS)})|\s?(?:{_any_of(_EN_SCALE_SYMBOLS)}))\b)?"
        rf"|\b(?P<word>(?:{_any_of(EN_TENS)})(?:-(?:{_any_of(EN_ONES[:9])}))?|{_any_of(EN_ONES[1:])})\b",
        _EN_WORDS,
        _EN_SCALE_WORDS | _EN_SCALE_SYMBOLS,
        before=rf"{_LETTER}$|\b(?:past|quarter to|half|point|minus|zero|version|{_EN_MULTIPLIER}(?: and)?"
        r"|one (?:or|to|and))[\s-]$",
        after=rf"{_LETTER}|[\s-]*(?:[ap]\.?m\b|o['’]?\s?clock|and[\s-]an?[\s-]|{_EN_MULTIPLIER}|[mbt]l?n\b|hal(?:f|ves)\b"
        r"|(?:quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?\b|point\s|past\b)",
        percent=r"\s?%|\s?per\s?cent(?:age\spoints?)?\b|\spct\b",
        month=_EN_MONTH,
        day=rf"\s?(?:of\s)?{_EN_MONTH}",
    ),
    "de": _Language(
        rf"{_FIGURES}(?P<scale>\s(?:{_any_of(_DE_SCALES)})(?!\w))?"
        rf"|\b(?P<word>(?:(?:{_any_of(DE_ONES)})und)?(?:dreißig|{_any_of(DE_TENS)})"
        rf"|{_any_of([*DE_ONES[1:], *DE_TEENS])})\b",
        _DE_WORDS,
        _DE_SCALES,
        before=rf"{_LETTER}$|\b(?:halb|viertel (?:nach|vor)|komma|minus|null|version|{_DE_MULTIPLIER}(?: und)?"
        r"|eins? (?:oder|bis))[\s-]$",
        after=rf"{_LETTER}|[\s-]*(?:uhr\b|{_DE_MULTIPLIER}|mio\b|mrd\b|tsd\b|halb|komma\s"
        r"|(?:drit|vier|fünf|sechs|sieb|ach|neun|zehn|hunderts|tausends)tel)|\.\s*\w",  # or an ordinal
        percent=r"\s?%|[\s-]?prozent(?:punkten?)?\b",
        month=_DE_MONTH,
        day=rf"\s?{_DE_MONTH}",
        decimal=",",
    ),
    "zh": _Chinese(
        rf"(?P<percent>百分之)?{_FIGURES}(?P<scale>{_any_of(_ZH_SCALES)})?|(?P<word>{_ZH_NUMERAL}+)",
        _ZH_WORDS,
        _ZH_SCALES,
        before=rf"[a-z]$|(?:[几数负周期拜]|{_ZH_NUMERAL}|[0-9]\s?[点时：]|分之)\s?$",
        after=rf"[a-z]|\s?(?:[月点时刻成几半]|(?:个|年|天|周|小时|岁|倍)半|世纪|年代|分之|(?!个百分点)个?[多余来]?{_ZH_NUMERAL}"
        r"|[到至或、：～]\s?[0-9])",
        percent=r"\s?%|个百分点",
        month=rf"(?:[0-9]|{_ZH_NUMERAL})\s?月",
        day=r"\s?[日号]",
        year=r"\s?年",
    ),
}
