"""What the languages share: substitution rules, and the value of number words.

Two hundred fifty thousand is ((2 * 100) + 50) * 1000.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

Rule = tuple[str | re.Pattern[str], str | Callable[[re.Match[str]], str]]  # pattern and replacement, as in re.sub
Ambiguous = dict[str, tuple[Fraction | int, ...]]  # words that may or may not be numbers, with their values
DECIMAL = r"\d{1,30}+(?:\.\d{1,30}+)?+"  # possessive and bounded, to avoid quadratic backtracking
VERSION = r"\d{1,30}+(?:\.\d{1,30}+){2,}"  # or a date; read as several numbers
_YEAR_BEGINNINGS = range(13, 21)  # nineteen ninety-five, twenty twenty-six


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


def compile_rules(rules: Iterable[Rule]) -> Callable[[str], str]:
    """Return a function that applies the substitutions in order."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def apply(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return apply


def words(text: str) -> list[str]:
    """Split a string of words."""
    return text.split()


def with_values(text: str, *values: Fraction | int) -> Ambiguous:
    """Map each word of a string to the given values."""
    return dict.fromkeys(text.split(), values)


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
