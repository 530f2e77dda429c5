"""Filter sentence pairs: drop mismatched numbers, repetition loops and overlap with test sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.data.derived import Dropped, Job, Report, Rewritten, write_pairs
from simulmt.data.parallel import cores, map_chunks
from simulmt.text import BACK_TRANSLATED
from simulmt.text.numbers import find_numbers, unmatched
from simulmt.text.words import HAN, guess_language

NUMBERS, REPEATS, HELD_OUT = "numbers", "repeats", "held_out"  # reasons to drop a pair
CHUNK_PAIRS = 4096  # about a second of work
LONGEST_PHRASE = 12  # words or ideographs; longer repeated phrases are not searched for
LONG_PHRASE = 4  # repeating a phrase of this length twice is an error; shorter ones may be meant, as in "very, very"
SHARED_WORDS = 10  # length of the n-grams that count as overlap with a test set
SHORTEST_SENTENCE = 4  # words; shorter test sentences are too common to count as overlap

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
    """Keep pairs whose numbers agree and whose target has no repetition loop; languages not given are guessed.

    The source of a back-translation must have no repetition loop, either. Pairs that share a sentence of at least four
    words, or ten consecutive words, with a `held_out` file are dropped, too.
    """
    languages = languages or (guess_language(read_lines(source)), guess_language(read_lines(target)))
    inputs = {"source": file_sha256(source), "target": file_sha256(target)}
    if held_out:
        inputs["held out"] = " ".join(map(file_sha256, held_out))
    metadata = {"rewrite": "filter", "settings": {"languages": [*languages]}, "inputs": inputs}
    job = Job(prefix, metadata, [source, target, *held_out], overwrite)
    work = partial(_filter, languages, HeldOut(chain.from_iterable(map(read_lines, held_out))))

    def filtered() -> Iterator[Rewritten]:
        chunks = map_chunks(work, ParallelFiles(source, target).pairs(), CHUNK_PAIRS, cores())
        return chain.from_iterable(results for _, results in chunks)

    return write_pairs(job, filtered, report)


class HeldOut:
    """Sentences that must not be trained on."""

    def __init__(self, lines: Iterable[str]) -> None:
        sentences = [tuple(_words(line)) for line in lines]
        self._sentences = {sentence for sentence in sentences if len(sentence) >= SHORTEST_SENTENCE}
        self._passages = {passage for sentence in sentences for passage in _passages(sentence)}

    def __contains__(self, text: str) -> bool:
        """Return whether a text is one of the sentences, or shares SHARED_WORDS consecutive words with one."""
        words = tuple(_words(text))
        return words in self._sentences or not self._passages.isdisjoint(_passages(words))


def _words(text: str) -> list[str]:
    return _UNIT.findall(text.lower())


def _passages(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + SHARED_WORDS] for start in range(len(words) - SHARED_WORDS + 1))


def _filter(languages: tuple[str, str], held_out: HeldOut, pairs: Sequence[Pair]) -> list[Rewritten]:
    """Return each pair, or why it is dropped."""
    reasons = (_reason_to_drop(pair, languages, held_out) for pair in pairs)
    return [
        (pair.source, pair.target) if reason is None else Dropped(reason, pair.line)
        for pair, reason in zip(pairs, reasons, strict=True)
    ]


def _reason_to_drop(pair: Pair, languages: tuple[str, str], held_out: HeldOut) -> str | None:
    if pair.source in held_out or pair.target in held_out:
        return HELD_OUT
    if has_repetition(pair.target, pair.source):
        return REPEATS
    if pair.source.startswith(BACK_TRANSLATED) and has_repetition(pair.source, pair.target):
        return REPEATS
    return NUMBERS if numbers_disagree(pair.source, pair.target, languages) else None


def numbers_disagree(source: str, target: str, languages: tuple[str, str]) -> bool:
    """Return whether one side has a number, by value, that the other does not have."""
    ours, theirs = find_numbers(source, languages[0]), find_numbers(target, languages[1])
    return any(number.values != _ONE for number in (*unmatched(ours, theirs), *unmatched(theirs, ours)))


def has_repetition(target: str, source: str) -> bool:
    """Return whether the target repeats a phrase more often in a row than the source does."""
    return max_repetitions(_words(target)) > max_repetitions(_words(source))


def max_repetitions(words: Sequence[str]) -> int:
    """Return how often a phrase is repeated in a row, at most; twice counts for long phrases only."""
    most = 1
    for length in range(1, min(LONGEST_PHRASE, len(words) // 2) + 1):
        same = 0
        for word, later in zip(words, islice(words, length, None)):  # noqa: B905 (the second is shorter)
            same = same + 1 if word == later else 0
            times = same // length + 1
            if times > (1 if length >= LONG_PHRASE else 2):
                most = max(most, times)
    return most
