"""Translate sample sentences word by word: live at speaking pace (`simulmt demo`), or timed (`simulmt bench`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from simulmt.errors import ConfigError, DataError
from simulmt.files import peak_memory_mb
from simulmt.runtime.bundle import SYNTHETIC, BundleConfig
from simulmt.runtime.stream import Commit, Lag, Stream, Translator
from simulmt.text import split_words

SYNTHETIC_SENTENCES = 5
SYNTHETIC_SEED = 2023
SPEAKING_PACE = 2.5  # words per second
SAMPLES = 300  # minimum number of timed steps
SECONDS = 1.0  # minimum time for each batch size
BATCH_SIZES = (1, 8, 32)  # streams

SENTENCES = {
    "en": (
        "Good morning, everyone, and welcome to our school.",
        "My name is Anna, and I am a teacher.",
        "Today I would like to talk about languages.",
        "Learning a new language is not easy.",
        "Last year, 40 percent of our students came from China.",
        "The course takes 12 weeks and costs 300 dollars.",
        "You do not need to be afraid of making mistakes.",
        "Computers can help us, but they cannot replace teachers.",
        "If you have any questions, please raise your hand.",
        "Let's take a break and have some tea.",
    ),
    "de": (
        "Guten Morgen, und herzlich willkommen in unserer Schule.",
        "Mein Name ist Anna, und ich bin Lehrerin.",
        "Heute möchte ich über Sprachen sprechen.",
        "Es ist nicht einfach, eine neue Sprache zu lernen.",
        "Der Kurs dauert 12 Wochen und kostet 300 Euro.",
        "Wenn Sie Fragen haben, heben Sie bitte die Hand.",
        "Vielen Dank für Ihre Aufmerksamkeit.",
    ),
}


def sentences_for(config: BundleConfig, file: Path | None) -> list[str]:
    """Return the lines of a file or, without one, samples in the model's source language."""
    if file is not None:
        return _lines_of(file)
    if config.source_language == SYNTHETIC:
        from simulmt.data.synthetic import generate

        return [pair.source for pair in generate(SYNTHETIC_SENTENCES, reorder=0.0, seed=SYNTHETIC_SEED)]
    if config.source_language not in SENTENCES:
        raise ConfigError(f"no sample text in '{config.source_language}': give a file with --text")
    return list(SENTENCES[config.source_language])


def _lines_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: contains no text")
    return lines


class DemoStep(NamedTuple):
    """Text read, and the commits that followed."""

    read: str
    commits: list[Commit]
    ends_sentence: bool = False


def play(
    translator: Translator,
    sentences: Iterable[str],
    delay: int | None,
    pace: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[DemoStep]:
    """Translate sentences live at `pace` words per second, or without pauses if 0."""
    due = clock()
    for sentence in sentences:
        stream = translator.stream(delay)
        for word in spoken(sentence):
            if pace:
                due += 1 / pace
                sleep(max(0.0, due - clock()))
            yield DemoStep(word, stream.push(word))
        yield DemoStep("", stream.finish(), ends_sentence=True)


def spoken(sentence: str) -> list[str]:
    """Split a sentence into words, each with its trailing whitespace."""
    parts, end = list[str](), 0
    for word in split_words(sentence):
        start = sentence.index(word, end)
        if parts:
            parts[-1] += sentence[end:start]
        end = start + len(word)
        parts.append(word)
    return parts


@dataclass
class DemoStatistics:
    """Totals of a demonstration."""

    words: int = 0
    sentences: int = 0
    lags: list[Lag] = field(default_factory=list)  # one per commit

    def count(self, step: DemoStep) -> None:
        self.words += bool(step.read)
        self.sentences += step.ends_sentence
        self.lags += [commit.lag for commit in step.commits]

    def summary(self) -> str:
        """Return the totals as two lines."""
        policy = statistics.median([lag.policy for lag in self.lags] or [0.0])
        compute = statistics.median([lag.compute for lag in self.lags] or [0.0])
        return (
            f"{self.sentences} sentences, {self.words} words read, {len(self.lags)} commits written, none revised\n"
            f"median lag per commit: {policy:.0f} ms waiting for source words, {compute:.1f} ms computing"
        )


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a measured time."""

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
    """Speed and memory of a model."""

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
    if not any(map(translator.bundle.source.encode, sentences)):
        raise DataError(f"the text has no word that {translator.bundle.name} knows; give another one")
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
