"""Extract numbers by value, independent of language and notation: 3,000 equals 3.000 and 三千, 1.5 billion 15亿."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import ModuleType
from typing import NamedTuple

from simulmt.text.numbers import chinese, english, german
from simulmt.text.numbers.composing import DECIMAL, words

_LANGUAGES: Mapping[str, ModuleType] = {"en": english, "de": german, "zh": chinese}
_NUMBER = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>[0-5]\d)(?!\d)"
    r"|(?P<numerator>\d{1,30}+)(?P<slash>[/⁄])(?P<denominator>[1-9]\d{0,30}+)"
    rf"|(?P<figures>{DECIMAL})(?P<suffix>\s?%|[a-z]+|年代|世纪|成|月)?"
)
_MAGNITUDES = {"k": 10**3, "m": 10**6}  # "m" may also mean metres
_UNITS = frozenset(words("km kg g mg cm mm ml l c f x h mph kmh gb mb tb am pm"))
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
    module = _LANGUAGES.get(language)
    if module is None:
        return list(_digit_numbers(_without_separators(text)))
    plain = module.to_digits(text)
    return [*_digit_numbers(plain), *_ambiguous(plain, module)]


def unmatched(numbers: Sequence[Number], others: Sequence[Number]) -> list[Number]:
    """Return the certain numbers that share no value with any of the others."""
    known = frozenset[Fraction]().union(*(other.values for other in others))
    return [number for number in numbers if number.is_certain and not number.values & known]


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


def _ambiguous(text: str, module: ModuleType) -> Iterator[Number]:
    for match in module.AMBIGUOUS_WORD.finditer(text):
        yield Number(frozenset(map(Fraction, module.AMBIGUOUS[match[0]])), is_certain=False)
