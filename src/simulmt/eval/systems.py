"""Runs a bundle over a test set: many sentences at once for what it writes, one alone for how long that takes.

Every line of a test set is one sentence, whatever punctuation is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from simulmt.eval.instances import spaced_words_read, unit_delays
from simulmt.eval.results import Unit
from simulmt.stream import Commit, Stream, Translator
from simulmt.text import split_words

STREAMS = 64  # translated together


class SentenceStream(Stream):
    """A stream whose whole text is one sentence; it is cut only where it is too long for the model."""

    def __init__(self, translator: Translator, delay: int | None) -> None:
        super().__init__(translator, translator.checked_delay(delay), beam=1)
        self._ends = False

    def accept_end(self, arrived: float | None = None) -> None:
        self.accept(" ", arrived)  # the last word is read like any other
        self._ends = True
        super().accept_end(arrived)

    def _close(self, arrived: float) -> None:
        if self._ends or self._is_full():
            super()._close(arrived)

    def _is_full(self) -> bool:
        return self._is_reading() and len(self._passages[-1].words) >= self._translator.config.longest - 1


class Translation(NamedTuple):
    """A hypothesis with the delay of each of its units."""

    text: str
    delays: tuple[int, ...]


def translate_all(
    translator: Translator, sources: Sequence[str], delay: int | None, unit: Unit, progress: Callable[[int], None]
) -> list[Translation]:
    """Translate all sentences, those of like length together; `progress` is told how many are done."""
    translations: dict[int, Translation] = {}
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), STREAMS):
        batch = order[start : start + STREAMS]
        streams = [SentenceStream(translator, delay) for _ in batch]
        for stream, index in zip(streams, batch, strict=True):
            stream.accept(sources[index])
            stream.accept_finish()
        for index, commits in zip(batch, translator.drain(streams), strict=True):
            translations[index] = _translation(sources[index], commits, unit, translator.bundle.target.spaced)
        progress(len(translations))
    return [translations[index] for index in range(len(sources))]


def _translation(source: str, commits: Sequence[Commit], unit: Unit, spaced: bool) -> Translation:
    texts = [commit.text for commit in commits]
    read = spaced_words_read(source, [commit.source_words for commit in commits])
    delays = unit_delays(zip(texts, read, strict=True), len(source.split()), unit, spaced)
    return Translation("".join(texts), tuple(delays))


def time_words(
    translator: Translator, source: str, delay: int | None, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The seconds that each word of a sentence costs when it is pushed; the last bears the end of the sentence."""
    stream = SentenceStream(translator, delay)
    words = source.split()
    seconds = []
    for number, word in enumerate(words, start=1):
        begun = clock()
        stream.push(f"{word} ")
        if number == len(words):
            stream.finish()
        seconds.append(clock() - begun)
    return seconds


def count_pieces(translator: Translator, source: str) -> list[int]:
    """The pieces that the model reads for each word of a sentence, its end being one of the last word."""
    encode = translator.bundle.source.encode_word
    counts = [sum(len(encode(word)) for word in split_words(spaced)) for spaced in source.split()]
    counts[-1] += 1
    return [max(1, count) for count in counts]
