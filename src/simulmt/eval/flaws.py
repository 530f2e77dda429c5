"""Flaws of translations: repeated and unknown words, and numbers and negations that were lost.

Repeated and unknown words, typical of models that predict frames independently, need no reference. A number of the
source counts if it also occurs in a reference, by value; a negation, if all references have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from simulmt.text.negation import is_negated, may_be_negated
from simulmt.text.numbers import Number, find_numbers, unmatched
from simulmt.text.words import HAN, KANA, Unit, guess_language

_REPEATED = re.compile(rf"(?=([{HAN}]{{1,2}})\1)")  # overlaps count, so three in a row count twice
_WORD = re.compile(rf"[^\W\d_{KANA}{HAN}]+(?:['’-][^\W\d_{KANA}{HAN}]+)*")


def repeated_words(text: str, unit: Unit) -> int:
    """Count words that occur twice in a row; in text counted in characters, one or two ideographs."""
    if unit == "char":
        return len(_REPEATED.findall(text))
    return sum(one == other and one.isalpha() for one, other in pairwise(text.lower().split()))


def words_of(text: str) -> list[str]:
    """Return the lower-cased alphabetic words, without numbers, punctuation and ideographs."""
    return _WORD.findall(text.lower())


class Lexicon:
    """A vocabulary of full words, to find words that subword models made up."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words = {word for line in lines for word in words_of(line)}

    def unknown(self, translation: str, source: str) -> list[str]:
        """Return the words of a translation that are neither in the lexicon nor in its source."""
        copied = words_of(source)
        return [word for word in words_of(translation) if word not in self._words and word not in copied]


class Facts(NamedTuple):
    """Numbers and negation that the translation of a sentence must preserve."""

    numbers: tuple[Number, ...]
    negated: bool


class FactChecker:
    """Counts the facts of a test set that translations preserve; languages are guessed from the text."""

    def __init__(self, sources: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        self._languages = guess_language(sources), guess_language(references[0])
        self.facts = [self._find(source, lines) for source, *lines in zip(sources, *references, strict=True)]

    def lost(self, index: int, translation: str) -> tuple[int, bool]:
        """Return how many numbers the translation of a sentence lacks, and whether it lacks a negation."""
        (numbers, negated), language = self.facts[index], self._languages[1]
        missing = unmatched(numbers, find_numbers(translation, language))
        return len(missing), negated and not may_be_negated(translation, language)

    def count(self, translations: Sequence[str]) -> dict[str, int]:
        """Count numbers and negations, and how many are kept, by field of `Result`."""
        lost = [self.lost(index, text) for index, text in enumerate(translations)]
        numbers = sum(len(facts.numbers) for facts in self.facts)
        negations = sum(facts.negated for facts in self.facts)
        return {
            "numbers": numbers,
            "numbers_kept": numbers - sum(count for count, _ in lost),
            "negations": negations,
            "negations_kept": negations - sum(negation for _, negation in lost),
        }

    def _find(self, source: str, references: Sequence[str]) -> Facts:
        """Return the facts of a sentence that its references preserve; empty references are skipped."""
        language, target = self._languages
        given = [reference for reference in references if reference.strip()]
        numbers = find_numbers(source, language)
        lost = unmatched(numbers, [number for reference in given for number in find_numbers(reference, target)])
        kept = tuple(number for number in numbers if number.is_certain and number not in lost)
        negated = is_negated(source, language) and all(is_negated(each, target) for each in given)
        return Facts(kept, negated and bool(given))


def listing(
    sources: Sequence[str], hypotheses: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield each sentence with its translations and references below it; lost numbers and negations are marked."""
    checker = FactChecker(sources, references)
    width = max(map(len, (*hypotheses, "reference")))
    for index, source in enumerate(sources):
        yield f"{index + 1:>4}  {source}"
        for name, translations in hypotheses.items():
            number, negation = checker.lost(index, translations[index])
            losses = ["number lost"] * bool(number) + ["negation lost"] * negation
            mark = f"   <-- {', '.join(losses)}" if losses else ""
            yield f"      {name:<{width}}  {translations[index]}{mark}"
        for lines in references:
            if lines[index].strip():
                yield f"      {'reference':<{width}}  {lines[index]}"
        yield ""
