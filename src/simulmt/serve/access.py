"""Who may use the server: API keys, and the web pages that browsers may come from."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from simulmt.errors import ConfigError

BEARER = "bearer "
ANY_ORIGIN = "*"


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
            raise ConfigError(f"--api-keys-file {path}: cannot be read ({type(error).__name__})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"--api-keys-file {path}: there is no key in it; write one a line")
        return ApiKeys(keys)

    def admit(self, key: str | None, headers: Headers) -> bool:
        """Whether a key, or else the one in the header Authorization, opens this server."""
        if not self._hashes:
            return True
        given = _hash(key if key is not None else _bearer(headers))
        # All are compared, so that the time it takes says nothing about which one is nearly right.
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0


def is_same_origin(headers: Headers, others: Collection[str]) -> bool:
    """Whether a request comes from a page of this server, from one of other origins, or from no browser at all."""
    origin = headers.get("origin")
    if origin is None or origin in others or ANY_ORIGIN in others:
        return True
    return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def _bearer(headers: Headers) -> str:
    value = headers.get("authorization", "")
    return value[len(BEARER) :] if value.lower().startswith(BEARER) else ""


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
