"""What the server tells Prometheus; no label ever holds what a user said."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simulmt.stream import Commit

LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.live = Gauge("simulmt_live_streams", "Streams that are connected", ["model"], registry=self._registry)
        self.words = self._counter("simulmt_source_words", "Source words translated in streams", "model")
        self.commits = self._counter("simulmt_commits", "Pieces of translation written to streams", "model")
        self.sentences = self._counter("simulmt_sentences", "Sentences finished in streams", "model")
        self.requests = self._counter("simulmt_requests", "HTTP translations by status", "status")
        self.errors = self._counter("simulmt_errors", "Errors sent to streams", "code")
        self.lost = self._counter("simulmt_lost_connections", "Connections that broke off in mid-stream", "model")
        self.lag = Histogram(
            "simulmt_lag_seconds",
            "From a source word to its translation, by cause",
            ["model", "part"],
            buckets=LAG_BUCKETS,
            registry=self._registry,
        )
        self.batch = Histogram(
            "simulmt_batch_streams",
            "Streams advanced by one step",
            ["model"],
            buckets=BATCH_BUCKETS,
            registry=self._registry,
        )

    def count(self, model: str, commit: Commit, words: int) -> None:
        """Note a commit that read so many more words."""
        self.commits.labels(model).inc()
        self.words.labels(model).inc(words)
        for part, milliseconds in (
            ("policy", commit.lag.policy),
            ("queue", commit.lag.queue),
            ("compute", commit.lag.compute),
        ):
            self.lag.labels(model, part).observe(milliseconds / 1000)

    def text(self) -> bytes:
        """All of it in the format that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, label: str) -> Counter:
        return Counter(name, meaning, [label], registry=self._registry)
