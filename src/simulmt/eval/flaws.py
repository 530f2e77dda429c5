"""Flaws of translations: repeated and unknown words, and numbers and negations that were lost.

Repeated and unknown words, typical of models that predict frames independently, need no reference. A number of the
source counts if it also occurs in a reference, by value; a negation, if all references have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True)
class Facts:
    """Numbers and negation that the translation of a sentence must preserve."""

    numbers: tuple[Number, ...]
    negated: bool

    @staticmethod
    def of(source: str, references: Sequence[str], languages: tuple[str, str]) -> Facts:
        """Return the facts of a sentence that its references preserve; empty references are skipped."""
        given = [reference for reference in references if reference.strip()]
        in_references = [number for reference in given for number in find_numbers(reference, languages[1])]
        numbers = find_numbers(source, languages[0])
        lost = unmatched(numbers, in_references)
        kept = tuple(number for number in numbers if number.is_certain and number not in lost)
        negated = is_negated(source, languages[0]) and all(is_negated(each, languages[1]) for each in given)
        return Facts(kept, negated and bool(given))

    def numbers_lost(self, translation: str, language: str) -> int:
        """Return how many of the numbers a translation lacks."""
        return len(unmatched(self.numbers, find_numbers(translation, language)))

    def negation_lost(self, translation: str, language: str) -> bool:
        """Return whether a translation lacks a required negation."""
        return self.negated and not may_be_negated(translation, language)


class FactChecker:
    """Counts the facts of a test set that translations preserve; languages are guessed from the text."""

    def __init__(self, sources: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        languages = guess_language(sources), guess_language(references[0])
        self._language = languages[1]
        self.facts = [Facts.of(source, lines, languages) for source, *lines in zip(sources, *references, strict=True)]

    def count(self, translations: Sequence[str]) -> dict[str, int]:
        """Count numbers and negations, and how many are kept, by field of `Result`."""
        pairs = list(zip(self.facts, translations, strict=True))
        numbers = sum(len(facts.numbers) for facts in self.facts)
        negations = sum(facts.negated for facts in self.facts)
        return {
            "numbers": numbers,
            "numbers_kept": numbers - sum(facts.numbers_lost(text, self._language) for facts, text in pairs),
            "negations": negations,
            "negations_kept": negations - sum(facts.negation_lost(text, self._language) for facts, text in pairs),
        }

    def losses(self, index: int, translation: str) -> list[str]:
        """Describe what the translation of a sentence lost."""
        facts = self.facts[index]
        numbers = "number lost" if facts.numbers_lost(translation, self._language) else ""
        negation = "negation lost" if facts.negation_lost(translation, self._language) else ""
        return [*filter(None, (numbers, negation))]


def listing(
    sources: Sequence[str], hypotheses: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield each sentence with its translations and references below it; lost numbers and negations are marked."""
    checker = FactChecker(sources, references)
    width = max(map(len, (*hypotheses, "reference")))
    for index, source in enumerate(sources):
        yield f"{index + 1:>4}  {source}"
        for name, translations in hypotheses.items():
            losses = checker.losses(index, translations[index])
            mark = f"   <-- {', '.join(losses)}" if losses else ""
            yield f"      {name:<{width}}  {translations[index]}{mark}"
        for lines in references:
            if lines[index].strip():
                yield f"      {'reference':<{width}}  {lines[index]}"
        yield ""
