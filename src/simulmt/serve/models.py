"""The models of a server, each with its own scheduler, and the metrics for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from simulmt.errors import BundleError, StreamError
from simulmt.runtime.aio import AsyncTranslator
from simulmt.runtime.bundle import Bundle, find
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.serve.protocol import ErrorCode, RefusedError

logger = logging.getLogger("simulmt.serve")

CHUNK_CHARACTERS = 512
LINES_PER_REQUEST = 4  # translated concurrently
MAX_LINES = 16  # translated concurrently, for all requests
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # environment variable: directory of the metrics of all workers
LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32)


class ModelInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model, as clients see it."""

    name: str
    kind: Literal["ctc", "transducer", "wait-k", "full-sentence"]
    source: str
    target: str
    delays: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    default_delay: int | None
    audio: bool = False  # whether speech in its source language is recognised


class Model:
    """A translator shared by many clients."""

    def __init__(self, translator: Translator, metrics: Metrics, inline: bool, spoken: Collection[str]) -> None:
        config = translator.config
        self.translator = translator
        self.name = translator.bundle.name
        source, target = config.source_language, config.target_language
        delays, default = config.delays, config.default_delay
        self.info = ModelInfo(self.name, config.kind, source, target, delays, default, audio=source in spoken)
        self._scheduler = AsyncTranslator(translator, on_step=metrics.batch.labels(self.name).observe, inline=inline)
        self._lines = asyncio.Semaphore(MAX_LINES)

    def check_delay(self, delay: int | None) -> None:
        """Raise RefusedError if the model was not trained for this delay."""
        try:
            self.translator.checked_delay(delay)
        except StreamError as error:
            raise RefusedError(ErrorCode.BAD_DELAY, str(error)) from None

    async def step(self, stream: Stream) -> list[Commit]:
        """Compute a step of a stream, batched with other waiting streams; return its commits."""
        return await self._scheduler.step(stream)

    async def translate(self, text: str, delay: int | None = None) -> str:
        """Translate a whole text line by line, in the background; by default with the largest, best delay."""
        if delay is None:
            delay = self.translator.config.largest_delay
        lines = text.split("\n")
        translated: list[str] = []
        for start in range(0, len(lines), LINES_PER_REQUEST):
            some = lines[start : start + LINES_PER_REQUEST]
            translated += await asyncio.gather(*(self._translate_line(line, delay) for line in some))
        return "\n".join(translated)

    async def _translate_line(self, line: str, delay: int | None) -> str:
        async with self._lines:
            stream = self._scheduler.stream(delay, background=True)
            commits = [commit for chunk in chunks(line) for commit in await stream.push(chunk)]
            commits += await stream.finish()
        return "".join(commit.text for commit in commits)


def log_failure(model: Model, error: Exception) -> None:
    """Log the type and traceback of an error, but not its message, which may quote user input."""
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed to translate: %s\n%s", model.name, type(error).__name__, place)


def chunks(text: str) -> Iterator[str]:
    """Split a text into chunks that are short enough not to block the event loop."""
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


def load_models(
    names_or_paths: Sequence[str], metrics: Metrics, threads: int, inline: bool, spoken: Collection[str] = ()
) -> dict[str, Model]:
    """Load models and return them by name; `spoken` are the languages with a speech recogniser."""
    models: dict[str, Model] = {}
    for name_or_path in names_or_paths:
        model = Model(Translator(Bundle(find(name_or_path)), threads), metrics, inline, spoken)
        if model.name in models:
            raise BundleError(f"{name_or_path}: duplicate model name {model.name}; rename one of the directories")
        models[model.name] = model
    return models


class Metrics:
    """The metrics of one application; no label ever holds user input."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.live = self._gauge("simulmt_live_streams", "Connected streams", "model")
        self.viewers = self._gauge("simulmt_viewers", "Viewers of rooms")
        self.audio = self._gauge("simulmt_audio_streams", "Sessions with audio")
        self.audio_seconds = self._counter("simulmt_audio_seconds", "Seconds of audio recognised", "language")
        self.recognition_seconds = self._counter(
            "simulmt_recognition_seconds", "Seconds spent recognising it", "language"
        )
        self.words = self._counter("simulmt_source_words", "Source words translated in streams", "model")
        self.commits = self._counter("simulmt_commits", "Pieces of translation written to streams", "model")
        self.sentences = self._counter("simulmt_sentences", "Sentences finished in streams", "model")
        self.requests = self._counter("simulmt_requests", "HTTP translations by status", "status")
        self.errors = self._counter("simulmt_errors", "Errors sent to streams", "code")
        self.lost = self._counter("simulmt_lost_connections", "Connections lost during a stream", "model")
        meaning = "From a source word to its translation, by cause"
        self.lag = self._histogram("simulmt_lag_seconds", meaning, LAG_BUCKETS, "model", "part")
        self.batch = self._histogram("simulmt_batch_streams", "Streams advanced by one step", BATCH_BUCKETS, "model")

    def count(self, model: str, commit: Commit, words: int) -> None:
        """Count a commit that read `words` more words."""
        self.commits.labels(model).inc()
        self.words.labels(model).inc(words)
        for part in ("policy", "queue", "compute", "recognition"):
            milliseconds = getattr(commit.lag, part)
            if milliseconds or part != "recognition":  # text has none
                self.lag.labels(model, part).observe(milliseconds / 1000)

    def text(self) -> bytes:
        """Return all metrics, of all workers, in the Prometheus text format."""
        if METRICS_DIRECTORY not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(name, meaning, labels, registry=self._registry, multiprocess_mode="livesum")

    def _counter(self, name: str, meaning: str, label: str) -> Counter:
        return Counter(name, meaning, [label], registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, meaning, labels, buckets=buckets, registry=self._registry)
