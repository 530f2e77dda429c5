"""Measure how fast a model translates on this machine."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from simulmt.runtime.stream import Stream, Translator
from simulmt.text import split_words

SPEAKING_PACE = 2.5  # words a second
SAMPLES = 300  # timed answers, at least
SECONDS = 1.0  # for each number of streams, at least
TOGETHER = (1, 8, 32)


@dataclass(frozen=True)
class Percentiles:
    median: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Throughput:
    """Of so many streams advanced together."""

    streams: int
    tokens_per_second: float
    speakers_per_core: float  # that a core keeps up with when each says SPEAKING_PACE words a second


@dataclass(frozen=True)
class Measurements:
    model: str
    delay: int | None
    threads: int
    load_ms: float
    memory_mb: float | None  # the most that was resident while one stream ran; None where the system does not tell
    ms_per_token: Percentiles
    throughput: list[Throughput]


def measure(load: Callable[[], Translator], sentences: Sequence[str], delay: int | None, threads: int) -> Measurements:
    """Load a model and translate sentences word by word, first in one stream, then in several at once."""
    started = time.perf_counter()
    translator = load()
    load_ms = (time.perf_counter() - started) * 1000
    times = _answer_times(translator, sentences, delay)
    memory_mb = _peak_megabytes()  # before many streams need more
    return Measurements(
        model=translator.bundle.name,
        delay=translator.stream(delay).delay,
        threads=threads,
        load_ms=load_ms,
        memory_mb=memory_mb,
        ms_per_token=_percentiles([seconds * 1000 for seconds in times]),
        throughput=[_throughput(translator, sentences, delay, streams, threads) for streams in TOGETHER],
    )


def _answer_times(translator: Translator, sentences: Sequence[str], delay: int | None) -> list[float]:
    """Seconds per source token of each answer of a stream, once it is warm."""
    for _ in _answers(translator, sentences[0], delay):
        pass
    answers = (answer for sentence in cycle(sentences) for answer in _answers(translator, sentence, delay))
    return list(islice(answers, SAMPLES))


def _answers(translator: Translator, sentence: str, delay: int | None) -> Iterator[float]:
    stream = translator.stream(delay)
    unanswered = 0
    for word in split_words(sentence):
        stream.accept(f"{word} ")
        unanswered += len(translator.bundle.source.encode_word(word))
        if stream.is_due:
            yield _seconds_to_answer(translator, [stream]) / unanswered
            unanswered = 0
    stream.accept_finish()
    if stream.is_due:
        yield _seconds_to_answer(translator, [stream]) / (unanswered + 1)  # the end of the sentence is a token


def _seconds_to_answer(translator: Translator, streams: Sequence[Stream]) -> float:
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
    seconds, spoken = 0.0, 0
    while seconds < SECONDS:
        for index, stream in enumerate(streams):
            # Each is elsewhere in the text, so that sentences of all ages come together.
            stream.accept(f"{words[(spoken + index * len(words) // count) % len(words)]} ")
        seconds += _seconds_to_answer(translator, streams)
        spoken += 1
    rate = spoken * count * tokens_per_word / seconds
    return Throughput(count, rate, rate / (SPEAKING_PACE * tokens_per_word) / threads)


def _peak_megabytes() -> float | None:
    """The most memory that this process ever had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1000
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # in bytes, on macOS
