"""What the worker processes of a server share: Unix sockets to each other, and counts by client address."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path

import numpy as np
from websockets.asyncio.client import connect, unix_connect

ADDRESS_HEADER = "x-simulmt-address"  # client address on whose behalf a worker connects; trusted only from workers


@dataclass(frozen=True)
class Peers:
    """All workers of a server, seen from one of them; without a directory it is the only one."""

    worker: int = 0
    workers: int = 1
    directory: Path | None = None  # of the Unix sockets; private

    def socket_path(self, worker: int) -> Path:
        assert self.directory is not None
        return self.directory / f"worker-{worker}.sock"

    def home(self, name: str) -> int:
        """Return the worker that is responsible for a room."""
        return _hash(name, self.workers)

    def session_name(self, token: str) -> str:
        """Return a session id that includes the number of this worker."""
        return f"{self.worker}.{token}"

    def owner(self, session: str) -> int:
        """Return the worker that has a session; this one for an id without a worker."""
        worker, dot, _ = session.partition(".")
        is_worker = bool(dot) and worker.isascii() and worker.isdigit() and len(worker) < 5
        return int(worker) if is_worker and int(worker) < self.workers else self.worker

    def connect(self, worker: int, path: str, address: str = "") -> connect:
        """Open a WebSocket to another worker, on behalf of a client address."""
        file, uri, headers = str(self.socket_path(worker)), f"ws://localhost{path}", {ADDRESS_HEADER: address}
        return unix_connect(file, uri, additional_headers=headers, compression=None, ping_interval=None, max_size=None)


ALONE = Peers()


class Counted(IntEnum):
    """What is counted, most of it by client address."""

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

    def __init__(self, peers: Peers = ALONE) -> None:
        shape = (peers.workers, len(Counted), self.BUCKETS + 1)  # the last column is the total
        size = int(np.prod(shape)) * np.dtype(np.int32).itemsize
        if peers.directory is None:
            memory = mmap.mmap(-1, size)
        else:
            with (peers.directory / "counters").open("a+b") as file:
                file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        self._counts = np.frombuffer(memory, np.int32).reshape(shape)
        self._own = self._counts[peers.worker]

    def add(self, kind: Counted, address: str, count: int = 1) -> None:
        self._own[kind, _hash(address, self.BUCKETS)] += count
        self._own[kind, -1] += count

    def total(self, kind: Counted) -> int:
        return int(self._counts[:, kind, -1].sum())

    def of(self, kind: Counted, address: str) -> int:
        return int(self._counts[:, kind, _hash(address, self.BUCKETS)].sum())

    def reset(self) -> None:
        """Reset the counts of this worker, or of the worker it replaces."""
        self._own[:] = 0


def _hash(text: str, buckets: int) -> int:
    # Not hash(), which differs from process to process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % buckets
