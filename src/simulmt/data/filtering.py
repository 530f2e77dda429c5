"""Leave out sentence pairs whose translation is wrong in a way that shows, and pairs of the test sets.

A translation shows that it is wrong by other numbers than its source has, or by words in a loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import Any

from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.data.derived import Dropped, Job, Report, Rewritten, write_pairs
from simulmt.data.parallel import cores, map_chunks
from simulmt.text import BACK_TRANSLATED
from simulmt.text.languages import guess_language
from simulmt.text.numbers import find_numbers, unmatched
from simulmt.text.words import HAN

NUMBERS, REPEATS, HELD_OUT = "numbers", "repeats", "held_out"  # why a pair is left out
CHUNK_PAIRS = 4096  # judged together, in about a second
LONGEST_PHRASE = 12  # words or ideographs of a phrase that is looked for in a row
LONG_PHRASE = 4  # of one that is never written twice in a row on purpose; shorter ones may be, as in "very, very"
SHARED_WORDS = 10  # in a row that only a sentence taken from a test set has in common with it
SHORTEST_SENTENCE = 4  # words of a test sentence that is kept out as a whole; anybody may say a shorter one

_UNIT = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")
_ONE = frozenset({Fraction(1)})  # often an article of the other language


def filter_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    languages: tuple[str, str] | None = None,
    overwrite: bool = False,
    report: Report = lambda _: None,
    held_out: Sequence[Path] = (),
) -> dict[str, Any]:
    """Keep the pairs whose numbers agree and whose target does not repeat itself; languages not given are guessed.

    Of a back-translation, the source must not repeat itself either.
    Pairs that share a sentence of at least four words, or ten words in a row, with a file of `held_out` are left out,
    too.
    """
    languages = languages or (guess_language(read_lines(source)), guess_language(read_lines(target)))
    inputs = {"source": file_sha256(source), "target": file_sha256(target)}
    if held_out:
        inputs["held out"] = " ".join(map(file_sha256, held_out))
    facts = {"rewrite": "filter", "settings": {"languages": [*languages]}, "inputs": inputs}
    job = Job(prefix, facts, [source, target, *held_out], overwrite)
    judge = _Judge(languages, HeldOut(chain.from_iterable(map(read_lines, held_out))))

    def judged() -> Iterator[Rewritten]:
        chunks = map_chunks(judge, ParallelFiles(source, target).pairs(), CHUNK_PAIRS, cores())
        return chain.from_iterable(verdicts for _, verdicts in chunks)

    return write_pairs(job, judged, report)


class HeldOut:
    """Sentences that must not be trained on."""

    def __init__(self, lines: Iterable[str]) -> None:
        sentences = [tuple(_words(line)) for line in lines]
        self._sentences = {sentence for sentence in sentences if len(sentence) >= SHORTEST_SENTENCE}
        self._passages = {passage for sentence in sentences for passage in _passages(sentence)}

    def __contains__(self, text: str) -> bool:
        """Whether a text is one of the sentences, or shares SHARED_WORDS words in a row with one."""
        words = tuple(_words(text))
        return words in self._sentences or not self._passages.isdisjoint(_passages(words))


def _words(text: str) -> list[str]:
    return _UNIT.findall(text.lower())


def _passages(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + SHARED_WORDS] for start in range(len(words) - SHARED_WORDS + 1))


@dataclass(frozen=True)
class _Judge:
    """Decides which pairs to keep."""

    languages: tuple[str, str]
    held_out: HeldOut

    def __call__(self, pairs: Sequence[Pair]) -> list[Rewritten]:
        return [*map(self._judge, pairs)]

    def _judge(self, pair: Pair) -> Rewritten:
        if pair.source in self.held_out or pair.target in self.held_out:
            return Dropped(HELD_OUT, pair.line)
        if repeats_itself(pair.target, pair.source):
            return Dropped(REPEATS, pair.line)
        if pair.source.startswith(BACK_TRANSLATED) and repeats_itself(pair.source, pair.target):
            return Dropped(REPEATS, pair.line)
        if numbers_disagree(pair.source, pair.target, self.languages):
            return Dropped(NUMBERS, pair.line)
        return pair.source, pair.target


def numbers_disagree(source: str, target: str, languages: tuple[str, str]) -> bool:
    """Whether one side has a number, by value, that the other does not have."""
    there, here = find_numbers(source, languages[0]), find_numbers(target, languages[1])
    return any(number.values != _ONE for number in (*unmatched(there, here), *unmatched(here, there)))


def repeats_itself(target: str, source: str) -> bool:
    """Whether a phrase of the target stands more often in a row than any of the source."""
    return most_in_a_row(_words(target)) > most_in_a_row(_words(source))


def most_in_a_row(words: Sequence[str]) -> int:
    """How often a phrase is written in a row, at most; twice counts for a long phrase only."""
    most = 1
    for length in range(1, min(LONGEST_PHRASE, len(words) // 2) + 1):
        same = 0
        for word, later in zip(words, islice(words, length, None)):  # noqa: B905 (the second is shorter)
            same = same + 1 if word == later else 0
            times = same // length + 1
            if times > (1 if length >= LONG_PHRASE else 2):
                most = max(most, times)
    return most
