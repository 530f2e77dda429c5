"""Flaws of translations: repeated and unknown words, and numbers and negations that were lost.

Repeated and unknown words, typical of models that predict frames independently, need no reference. A number of the
source counts if it also occurs in a reference, by value; a negation, if all references have one. Negations are found
by word lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

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


class _Markers(NamedTuple):
    """Negation words, idioms that contain one but do not negate, and indirect negations (unable, 难以)."""

    plain: re.Pattern[str]
    apparent: re.Pattern[str]
    indirect: re.Pattern[str]


_MARKERS = {
    "en": _Markers(
        plain=re.compile(
            r"\b(?:not|never|no|none|nobody|nothing|nowhere|neither|nor|cannot|without|no-one)\b|n['’]t\b"
            r"|\b(?:dont|doesnt|didnt|isnt|arent|wasnt|werent|cant|wont|couldnt|shouldnt|wouldnt|havent|hasnt)\b"
        ),
        apparent=re.compile(
            r"\bnot (?:only|just|until|least)\b|\bor not\b|\bno (?:doubt|matter|later|longer than|less|fewer|sooner)\b"
            r"|\bnothing but\b|\bwhy (?:not|don['’]t (?:you|we))\b|\bnever ?mind\b|\bno\.(?= ?\d)|^no(?=[,.!])"
            r"|, \w+n['’]t (?:it|you|he|she|we|they|i|there)\?"
        ),
        indirect=re.compile(
            r"\b(?:unable|unlikely|unsafe|unclear|unknown|unnecessary|unsuitable|unaware|impossible|incapable|hardly|barely"
            r"|fail\w*|lack\w*|refus\w*|out of)\b"
        ),
    ),
    "de": _Markers(
        plain=re.compile(
            r"\b(?:nicht|nie|niemals|nichts|niemand\w{0,2}|kein\w{0,2}|keinesfalls|weder|nirgend\w*|ohne)\b"
        ),
        apparent=re.compile(
            r"\bnicht (?:nur|zuletzt)\b|\boder nicht\b|\bwarum nicht\b|\bohne(?:hin| weiteres)\b|, nicht wahr"
        ),
        indirect=re.compile(r"\b(?:un(?:möglich|fähig|klar|bekannt|nötig)|kaum|fehl\w*|verweiger\w*|weiger\w*)\b"),
    ),
    "zh": _Markers(
        plain=re.compile(
            r"[不没無无未莫勿]|非(?![洲常])|(?:^|[，。！？；、请你您们就也都可万])别(?![人的墅名])|别[忘再担着怕让把动碰哭走跑太管想急]"
        ),
        apparent=re.compile(
            r"(.)[不没]\1|有没有|不[同错久断过仅但只管论少禁单止免足]|不到(?=[\d一二三四五六七八九十半])|无论|无疑|不好意思|对不起|差不多|了不起|(?<!从)未来|未必不|说不定"
            r"|不得不|不由得|不客气|没关系|毫不|无非|不是吗|好不好|要不然|要不是"
        ),
        indirect=re.compile(r"难以|很难|禁止|拒绝|缺乏|缺少|以免|避免|否认"),
    ),
}


def is_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word; always False for languages other than en, de and zh."""
    if language not in _MARKERS:
        return False
    markers = _MARKERS[language]
    return markers.plain.search(markers.apparent.sub(" ", text.casefold())) is not None


def may_be_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word or an indirect negation (unable, 难以)."""
    if language not in _MARKERS:
        return False
    return is_negated(text, language) or _MARKERS[language].indirect.search(text.casefold()) is not None
