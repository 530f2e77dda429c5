"""Measure how fast a model translates on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from simulmt.runtime.memory import peak_memory_mb
from simulmt.runtime.stream import Stream, Translator
from simulmt.text import split_words

SPEAKING_PACE = 2.5  # words per second
SAMPLES = 300  # minimum number of timed steps
SECONDS = 1.0  # minimum time for each batch size
BATCH_SIZES = (1, 8, 32)  # streams


@dataclass(frozen=True)
class Percentiles:
    median: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Throughput:
    """Throughput of streams advanced in one batch."""

    streams: int
    tokens_per_second: float
    speakers_per_core: float  # live streams of SPEAKING_PACE words per second


@dataclass(frozen=True)
class Measurements:
    model: str
    delay: int | None
    threads: int
    load_ms: float
    memory_mb: float | None  # peak resident memory with one stream; None if the system does not report it
    ms_per_token: Percentiles
    throughput: list[Throughput]


def measure(load: Callable[[], Translator], sentences: Sequence[str], delay: int | None, threads: int) -> Measurements:
    """Load a model and translate sentences word by word, first in one stream, then in several at once."""
    started = time.perf_counter()
    translator = load()
    load_ms = (time.perf_counter() - started) * 1000
    times = _seconds_per_token(translator, sentences, delay)
    memory_mb = peak_memory_mb()  # before the batches, which need more
    return Measurements(
        model=translator.bundle.name,
        delay=translator.stream(delay).delay,
        threads=threads,
        load_ms=load_ms,
        memory_mb=memory_mb,
        ms_per_token=_percentiles([seconds * 1000 for seconds in times]),
        throughput=[_throughput(translator, sentences, delay, streams, threads) for streams in BATCH_SIZES],
    )


def _seconds_per_token(translator: Translator, sentences: Sequence[str], delay: int | None) -> list[float]:
    """Time the steps of a stream after a warm-up; return seconds per source token."""
    for _ in _timed_steps(translator, sentences[0], delay):
        pass
    timed = (seconds for sentence in cycle(sentences) for seconds in _timed_steps(translator, sentence, delay))
    return list(islice(timed, SAMPLES))


def _timed_steps(translator: Translator, sentence: str, delay: int | None) -> Iterator[float]:
    """Translate a sentence word by word; yield the seconds per source token of each step."""
    stream = translator.stream(delay)
    pending = 0
    for word in split_words(sentence):
        stream.accept(f"{word} ")
        pending += len(translator.bundle.source.encode_word(word))
        if stream.is_due:
            yield _time_drain(translator, [stream]) / pending
            pending = 0
    stream.accept_finish()
    if stream.is_due:
        yield _time_drain(translator, [stream]) / (pending + 1)  # the end of the sentence is a token


def _time_drain(translator: Translator, streams: Sequence[Stream]) -> float:
    started = time.perf_counter()
    translator.drain(streams)
    return time.perf_counter() - started


def _percentiles(values: Sequence[float]) -> Percentiles:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[94], cuts[98])


def _throughput(
    translator: Translator, sentences: Sequence[str], delay: int | None, count: int, threads: int
) -> Throughput:
    words = [word for sentence in sentences for word in split_words(sentence)]
    tokens_per_word = sum(len(translator.bundle.source.encode_word(word)) for word in words) / len(words)
    streams = [translator.stream(delay) for _ in range(count)]
    seconds, words_read = 0.0, 0
    while seconds < SECONDS:
        for index, stream in enumerate(streams):
            # Streams start at different words, so that a batch mixes sentences of different lengths.
            stream.accept(f"{words[(words_read + index * len(words) // count) % len(words)]} ")
        seconds += _time_drain(translator, streams)
        words_read += 1
    rate = words_read * count * tokens_per_word / seconds
    return Throughput(count, rate, rate / (SPEAKING_PACE * tokens_per_word) / threads)
