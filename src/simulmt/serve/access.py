"""Access control (limits, API keys, allowed origins), and state shared by workers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import ipaddress
import mmap
import socket
from asyncio import sleep
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from starlette.datastructures import Headers
from websockets.asyncio.client import connect, unix_connect

from simulmt.config import require
from simulmt.errors import ConfigError, DataError
from simulmt.serve.protocol import ErrorCode, RefusedError

_BEARER = "bearer "
_ANY_ORIGIN = "*"
_LOCALHOST = "localhost"
FIRST_PENALTY, _MAX_PENALTY = 0.25, 8.0  # seconds before a wrong key is answered
_WRONG_KEY_MEMORY = 60.0  # seconds for which a wrong key counts
ADDRESS_HEADER = "x-simulmt-address"  # client address on whose behalf a worker connects; trusted only from workers


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
    characters_per_second: float = 5_000.0  # translated per stream; faster input is throttled
    burst_characters: int = 500_000  # translated without throttling, so that a long session can be replayed
    unread_characters: int = 1_000_000  # received but not yet translated; at the limit the server stops reading
    unsent_messages: int = 256  # queued but not yet sent; at the limit the stream stops computing
    kept_messages: int = 4_096  # sent, and kept for a client that resumes
    audio_streams: int = 8  # sessions whose speech is recognised
    audio_seconds: float = 30.0  # of audio received but not yet recognised; at the limit the server stops reading
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


def check_limit(count: int, limit: int, what: str) -> None:
    """Raise RefusedError if `count` has reached the limit."""
    if count >= limit:
        raise RefusedError(ErrorCode.TOO_MANY_STREAMS, f"too many {what} (limit {limit}); try again later")


class ApiKeys:
    """The API keys of a server, stored as hashes. A server without keys is open to everyone."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = [_hash(key) for key in keys]

    @staticmethod
    def read(path: Path) -> ApiKeys:
        """Read a file with one key per line; empty lines and lines that start with # are ignored."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise DataError(f"--api-keys-file {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise DataError(f"--api-keys-file {path}: not UTF-8 text; write one key per line") from None
        keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not keys:
            raise DataError(f"--api-keys-file {path}: contains no key; write one per line")
        return ApiKeys(keys)

    @property
    def are_optional(self) -> bool:
        """Whether requests need no key, because the server has none."""
        return not self._hashes

    def admit(self, key: str | None, headers: Headers) -> bool:
        """Return whether `key`, or without one the key in the Authorization header, is valid."""
        if self.are_optional:
            return True
        given = _hash(key or _bearer(headers))
        # Compare with all keys, so that timing reveals nothing.
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0


class Authenticator:
    """Checks API keys, with exponential back-off for addresses that send wrong ones."""

    def __init__(self, keys: ApiKeys, counters: Counters) -> None:
        self._keys = keys
        self._counters = counters

    async def admit(self, key: str | None, headers: Headers, address: str) -> bool:
        """Return whether the key is valid; delay the answer to a wrong one."""
        if self._keys.admit(key, headers):
            return True
        failures = self._counters.of(Counted.WRONG_KEYS, address)
        self._counters.add(Counted.WRONG_KEYS, address)
        asyncio.get_running_loop().call_later(_WRONG_KEY_MEMORY, self._counters.add, Counted.WRONG_KEYS, address, -1)
        await sleep(min(FIRST_PENALTY * 2.0 ** min(failures, 10), _MAX_PENALTY))
        return False


class Origins:
    """The allowed origins: the server's own, and those given.

    Anyone can point a domain name at a loopback address, and a page loaded under that name looks like the server's own
    (DNS rebinding). So a server that listens on loopback (`host`) accepts only pages loaded under a local name.
    """

    def __init__(self, origins: Iterable[str] = (), host: str | None = None) -> None:
        self.allowed = frozenset(_checked_origin(origin) for origin in origins)
        self._host = host.lower() if host is not None and is_loopback(host) else None

    def admit(self, headers: Headers) -> bool:
        """Return whether a request comes from an allowed origin, or has none."""
        origin = headers.get("origin")
        if origin is None or origin in self.allowed or _ANY_ORIGIN in self.allowed:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # such as http://[::1
            return False
        name = parts.hostname or ""
        is_own_name = self._host is None or name == self._host or _is_loopback_name(name)
        return is_own_name and parts.netloc == headers.get("host", "").lower()


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    try:
        return _is_loopback_name(str(socket.getaddrinfo(host, None)[0][4][0]))
    except OSError:  # nothing can listen there either
        return False


def _checked_origin(origin: str) -> str:
    if origin == _ANY_ORIGIN:
        return origin
    try:
        parts = urlsplit(origin)
        is_origin = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_origin = False
    if not is_origin or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"--origin {origin}: expected scheme and host, such as https://example.org, or *")
    return origin.rstrip("/").lower()


def _is_loopback_name(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == _LOCALHOST or name.endswith(f".{_LOCALHOST}")


def _bearer(headers: Headers) -> str:
    value = headers.get("authorization", "")
    return value[len(_BEARER) :] if value.lower().startswith(_BEARER) else ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


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
        return _bucket(name, self.workers)

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
    """Kinds of counters."""

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
        self._own[kind, _bucket(address, self.BUCKETS)] += count
        self._own[kind, -1] += count

    def total(self, kind: Counted) -> int:
        return int(self._counts[:, kind, -1].sum())

    def of(self, kind: Counted, address: str) -> int:
        return int(self._counts[:, kind, _bucket(address, self.BUCKETS)].sum())

    def reset(self) -> None:
        """Reset the counts of this worker, or of the worker it replaces."""
        self._own[:] = 0


def _bucket(text: str, buckets: int) -> int:
    # Not hash(), which differs from process to process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % buckets
