"""Who may use the server: API keys, and the web pages that browsers may come from."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from simulmt.errors import DataError

BEARER = "bearer "
ANY_ORIGIN = "*"
LOCALHOST = "localhost"


class ApiKeys:
    """The keys that open a server, kept as hashes only; a server without any is open to all."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = [_hash(key) for key in keys]

    @staticmethod
    def read(path: Path) -> ApiKeys:
        """Read a file of one key a line; empty lines and those that begin with # do not count."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--api-keys-file {path}: cannot be read ({type(error).__name__})") from None
        keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not keys:
            raise DataError(f"--api-keys-file {path}: there is no key in it; write one a line")
        return ApiKeys(keys)

    @property
    def are_optional(self) -> bool:
        """Whether there are none, so that nobody needs one."""
        return not self._hashes

    def admit(self, key: str | None, headers: Headers) -> bool:
        """Whether a key, or else the one in the header Authorization, opens this server."""
        if self.are_optional:
            return True
        given = _hash(key or _bearer(headers))
        # All are compared, so that the time it takes says nothing about which one is nearly right.
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0


class Pages:
    """The web pages that may use a server: its own, and those of other origins.

    Anybody can give a name to a loopback address, and what a page loads under that name looks like its own server. So a
    server that listens at one (`host`) takes for its own only pages that were loaded by a name of this machine.
    """

    def __init__(self, origins: Iterable[str] = (), host: str | None = None) -> None:
        self.origins = frozenset(origin.rstrip("/") for origin in origins)
        self._host = host.lower() if host is not None and _leads_to_loopback(host) else None

    def admit(self, headers: Headers) -> bool:
        """Whether a request comes from a page that may use the server, or from no browser at all."""
        origin = headers.get("origin")
        if origin is None or origin in self.origins or ANY_ORIGIN in self.origins:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # such as http://[::1
            return False
        return parts.netloc == headers.get("host", "").lower() and self._is_own_name(parts.hostname or "")

    def _is_own_name(self, name: str) -> bool:
        return self._host is None or name == self._host or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == LOCALHOST or name.endswith(f".{LOCALHOST}")


def _leads_to_loopback(host: str) -> bool:
    try:
        return _is_loopback(str(socket.getaddrinfo(host, None)[0][4][0]))
    except OSError:  # nothing can listen there either
        return False


def _bearer(headers: Headers) -> str:
    value = headers.get("authorization", "")
    return value[len(BEARER) :] if value.lower().startswith(BEARER) else ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
