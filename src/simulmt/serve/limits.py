"""Resource limits of a server, of one client address and of one stream."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path

import numpy as np

from simulmt.config import require


@dataclass(frozen=True)
class Limits:
    """All limits; each can be set with `simulmt serve --limit NAME=NUMBER`."""

    connections: int = 4_096  # TCP connections, also bounded by the number of open files allowed
    connections_per_address: int = 1_024
    streams: int = 256  # connected at once
    streams_per_address: int = 64
    requests: int = 32  # HTTP translations at once
    requests_per_address: int = 8
    viewers: int = 3_000  # of all rooms
    rooms: int = 256
    kept_sentences: int = 6  # of a room, for viewers that join late
    kept_seconds: float = 120.0  # after the end of a speech, for viewers whose connection was lost
    message_bytes: int = 65_536
    characters_per_second: float = 5_000.0  # translated per stream; then input is throttled
    burst_characters: int = 500_000  # translated without throttling, so that a long session can be replayed
    unread_characters: int = 1_000_000  # received and not yet translated; then the server stops reading
    unsent_messages: int = 256  # written and not yet sent; then the stream stops computing
    kept_messages: int = 4_096  # sent, and kept for a client that resumes
    audio_streams: int = 8  # sessions whose speech is recognised
    audio_seconds: float = 30.0  # of audio received and not yet recognised; then the server stops reading
    request_seconds: float = 15.0  # for a whole HTTP request to arrive
    opening_seconds: float = 10.0  # for the first message of a WebSocket to arrive
    idle_seconds: float = 900.0
    session_seconds: float = 6 * 3600.0
    grace_seconds: float = 120.0  # to resume in after a lost connection
    sending_seconds: float = 20.0  # for one message to be sent
    ping_seconds: float = 10.0  # between pings, and for the answer to one
    drain_seconds: float = 10.0  # for open streams to end when the server shuts down

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(value > 0, f"{field.name} must be above 0, got {value}")


class Counted(IntEnum):
    """What is counted per address."""

    CONNECTIONS = 0
    STREAMS = auto()
    REQUESTS = auto()
    VIEWERS = auto()
    WRONG_KEYS = auto()
    AUDIO = auto()
    ROOMS = auto()


class Counters:
    """Counts by client address, shared by all worker processes of a server.

    Every worker writes only its own row and reads the sum of all rows, so no lock is needed. Addresses are hashed into
    buckets; two addresses that fall into the same bucket are counted together.
    """

    BUCKETS = 16_384

    def __init__(self, file: Path | None = None, workers: int = 1, worker: int = 0) -> None:
        shape = (workers, len(Counted), self.BUCKETS + 1)  # the last column is the total
        size = int(np.prod(shape)) * np.dtype(np.int32).itemsize
        if file is None:
            memory = mmap.mmap(-1, size)
        else:
            with file.open("a+b") as opened:
                opened.truncate(size)
                memory = mmap.mmap(opened.fileno(), size)
        self._counts = np.frombuffer(memory, np.int32).reshape(shape)
        self._own = self._counts[worker]

    def add(self, kind: Counted, address: str, count: int = 1) -> None:
        self._own[kind, _bucket(address)] += count
        self._own[kind, -1] += count

    def total(self, kind: Counted) -> int:
        return int(self._counts[:, kind, -1].sum())

    def of(self, kind: Counted, address: str) -> int:
        return int(self._counts[:, kind, _bucket(address)].sum())

    def reset(self) -> None:
        """Reset the counts of this worker, or of the worker it replaces."""
        self._own[:] = 0


def _bucket(address: str) -> int:
    # Not hash(), which differs from process to process.
    return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=4).digest()) % Counters.BUCKETS


class Throttle:
    """A token bucket that fills at a constant rate."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._filled = clock()

    def take(self, tokens: int) -> float:
        """Take tokens out; return the seconds to wait before going on."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate)
        self._filled = now
        self._level -= tokens
        return max(0.0, -self._level / self._rate)
