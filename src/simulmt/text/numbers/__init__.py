"""Extract numbers by value, independent of language and notation: 3,000 equals 3.000 and 三千, 1.5 billion 15亿.

The module of a language defines its `Notation`: substitutions that convert its numbers to digits, and ambiguous words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

Rule = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]  # pattern and replacement, as in re.sub
Ambiguous = dict[str, tuple[Fraction | int, ...]]  # words that may or may not be numbers, with their values
DECIMAL = r"\d{1,30}+(?:\.\d{1,30}+)?+"  # possessive and bounded, to avoid quadratic backtracking
VERSION: Rule = (r"\d{1,30}+(?:\.\d{1,30}+){2,}", lambda match: match[0].replace(".", " "))  # or a date: 24.12.1990
_YEAR_BEGINNINGS = range(13, 21)  # nineteen ninety-five, twenty twenty-six

_NUMBER = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)(?!\d)"
    r"|(?P<numerator>\d{1,30}+)(?P<slash>[/⁄])(?P<denominator>[1-9]\d{0,30}+)"
    rf"|(?P<figures>{DECIMAL})(?P<suffix>\s?%|[a-z]+|年代|世纪|成|月)?"
)
_MAGNITUDES = {"k": 10**3, "m": 10**6}  # "m" may also mean metres
_UNITS = ("km", "kg", "g", "mg", "cm", "mm", "ml", "l", "c", "f", "x", "h", "mph", "kmh", "gb", "mb", "tb", "am", "pm")
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
def _notations() -> Mapping[str, Notation]:
    from simulmt.text.numbers import chinese, english, german  # these import this module

    return {"en": english.NOTATION, "de": german.NOTATION, "zh": chinese.NOTATION}


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


class Notation:
    """How a language writes numbers: rules that convert them to digits, and ambiguous words between boundaries."""

    def __init__(self, rules: Iterable[Rule], ambiguous: Ambiguous, boundary: str = r"\b") -> None:
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules]
        self._ambiguous = ambiguous
        self._ambiguous_word = re.compile(f"{boundary}(?:{any_of(ambiguous)}){boundary}")

    def to_digits(self, text: str) -> str:
        """Convert all numbers in a case-folded text to digits: 3,000 to 3000, half past three to 3:30."""
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text

    def ambiguous_numbers(self, text: str) -> Iterator[Number]:
        """Yield the ambiguous words of a text."""
        for match in self._ambiguous_word.finditer(text):
            yield Number(frozenset(map(Fraction, self._ambiguous[match[0]])), is_certain=False)


class Part(NamedTuple):
    """A word or digit string of a number; a multiplier (hundred, 万) applies to all smaller terms before it."""

    value: Fraction
    multiplies: bool = False
    is_word: bool = True


class NumberWords:
    """Number words of a language, by value; multipliers such as million apply to what precedes them."""

    def __init__(
        self, values: Mapping[str, Fraction | int], multipliers: Mapping[str, int], ambiguous: Collection[str]
    ) -> None:
        self._values = values
        self._multipliers = multipliers
        self._ambiguous = ambiguous
        self._token = re.compile(rf"{DECIMAL}|{any_of([*values, *multipliers])}")

    def value(self, token: str) -> Fraction:
        """Return the value of a word or a decimal."""
        return Fraction(self._values.get(token, token))

    def to_digits(self, run: re.Match[str]) -> str:
        """Convert a run of number words and decimals to digits; an ambiguous word alone is left as it is."""
        if run[0] in self._ambiguous or run[0].isdecimal():
            return run[0]
        return " ".join(map(format_number, compose(map(self._part, self._token.findall(run[0])))))

    def _part(self, token: str) -> Part:
        if token in self._multipliers:
            return Part(Fraction(self._multipliers[token]), multiplies=True)
        return Part(self.value(token), is_word=not token[0].isdecimal())


def compose(parts: Iterable[Part]) -> list[Fraction]:
    """Combine consecutive parts into numbers: usually one, several where a part cannot continue the last."""
    numbers: list[Fraction] = []
    terms: list[Fraction] = []
    last = Part(Fraction(0))
    for part in parts:
        term = part.value
        if part.multiplies:
            smaller = Fraction(0)
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


def _continues(last: Part, part: Part) -> bool:
    """Return whether `part` continues a number: one to nine after tens, any smaller value after a multiplier."""
    if last.multiplies:
        return part.value < last.value
    return last.is_word and part.is_word and last.value >= 20 and last.value % 10 == 0 and 0 < part.value < 10


def _is_year(terms: list[Fraction], last: Part, part: Part) -> bool:
    if part.multiplies or last.multiplies or not (part.is_word and last.is_word):
        return False
    return terms == [last.value] and last.value in _YEAR_BEGINNINGS and 10 <= part.value < 100


def format_number(value: Fraction) -> str:
    """Format a value in digits: 1500, 0.25, or 1⁄3 if there is no finite decimal."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((n for n in range(1, 13) if 10**n % value.denominator == 0), 0)
    if not places:
        return f"{value.numerator}⁄{value.denominator}"
    whole, rest = divmod(value.numerator * 10**places // value.denominator, 10**places)
    return f"{whole}.{rest:0{places}d}"


def words(text: str) -> list[str]:
    """Split a string at white space; shorter than a list of quoted words."""
    return text.split()


def with_values(text: str, *values: Fraction | int) -> Ambiguous:
    """Map each word of a string to the given values."""
    return dict.fromkeys(text.split(), values)


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
