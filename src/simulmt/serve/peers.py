"""The other workers of a server, reached over Unix sockets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect, unix_connect

ADDRESS_HEADER = "x-simulmt-address"  # client address on whose behalf a worker connects; trusted only from workers


@dataclass(frozen=True)
class Peers:
    """All workers of a server, seen from one of them; without a directory it is the only one."""

    worker: int = 0
    workers: int = 1
    directory: Path | None = None  # of the Unix sockets; private

    @property
    def counters_file(self) -> Path | None:
        return self.directory and self.directory / "counters"

    def socket_path(self, worker: int) -> Path:
        assert self.directory is not None
        return self.directory / f"worker-{worker}.sock"

    def home(self, name: str) -> int:
        """Return the worker that is responsible for a room."""
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        return int.from_bytes(digest) % self.workers

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
        settings: dict[str, Any] = {"compression": None, "ping_interval": None, "max_size": None}
        headers = {ADDRESS_HEADER: address}
        return unix_connect(
            str(self.socket_path(worker)), uri=f"ws://localhost{path}", additional_headers=headers, **settings
        )
