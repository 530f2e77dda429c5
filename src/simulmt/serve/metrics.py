"""Prometheus metrics; no label ever holds user input."""

from __future__ import annotations

import os
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from simulmt.runtime.stream import Commit

METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # environment variable: directory of the metrics of all workers
LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32)


class Metrics:
    """The metrics of one application."""

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
