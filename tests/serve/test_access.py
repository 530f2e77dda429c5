from __future__ import annotations

import socket
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from simulmt.errors import ConfigError, DataError
from simulmt.serve.access import ApiKeys, Limits, Origins


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_must_be_above_zero(value: int) -> None:
    with pytest.raises(ConfigError, match="streams must be above 0"):
        Limits(streams=value)


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\nfirst\n\n  second  \n  # old\n")
    keys = ApiKeys.read(file)
    assert all(keys.admit(key, Headers()) for key in ("first", "second"))
    assert not any(keys.admit(key, Headers()) for key in ("# ours", "# old", "", "firs", "first ", None))
    assert "first" not in repr(vars(keys))
    file.write_text("# nothing\n")
    with pytest.raises(DataError, match="no key"):
        ApiKeys.read(file)
    with pytest.raises(DataError, match="missing"):
        ApiKeys.read(file.with_name("missing"))


@pytest.mark.parametrize(
    ("value", "is_admitted"),
    [("Bearer sesame", True), ("bearer sesame", True), ("sesame", False), ("Basic sesame", False), ("Bearer ", False)],
)
def test_keys_in_the_header(value: str, is_admitted: bool) -> None:
    for key in (None, ""):
        assert ApiKeys(["sesame"]).admit(key, Headers({"Authorization": value})) is is_admitted


def test_a_server_without_keys_is_open() -> None:
    assert ApiKeys().admit(None, Headers())


@pytest.mark.parametrize(
    ("origin", "host", "others", "expected"),
    [
        (None, "a.example", (), True),
        ("https://a.example", "a.example", (), True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", (), True),
        ("http://A.example", "a.example", (), True),
        ("http://127.0.0.1:8001", "127.0.0.1:8000", (), False),
        ("https://b.example", "a.example", (), False),
        ("https://b.example", "a.example", ("https://b.example",), True),
        ("https://b.example", "a.example", ("*",), True),
        ("https://a.example.b.example", "a.example", (), False),
        ("null", "a.example", (), False),
        ("", "", (), True),
    ],
)
def test_origins(origin: str | None, host: str, others: tuple[str, ...], expected: bool) -> None:
    headers = Headers({"host": host, **({} if origin is None else {"origin": origin})})
    assert Origins(others).admit(headers) is expected


@pytest.mark.parametrize(
    ("host", "name", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "LocalHost", True),
        ("127.0.0.1", "simulmt.localhost:8000", True),
        ("localhost", "[::1]:8000", True),
        ("127.0.0.1", "evil.example:8000", False),
        ("::1", "evil.example:8000", False),
        ("localhost", "evil.example:8000", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "192.168.0.7:8000", False),
        ("0.0.0.0", "a.example:8000", True),
        ("192.168.0.7", "a.example:8000", True),
        (None, "a.example:8000", True),
    ],
)
def test_on_loopback_only_local_names_are_allowed_origins(host: str | None, name: str, expected: bool) -> None:
    headers = Headers({"host": name, "origin": f"http://{name}"})
    assert Origins(host=host).admit(headers) is expected
    assert Origins([f"http://{name}/"], host).admit(headers)


def test_the_host_of_a_server_is_an_allowed_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: resolved)
    origins = Origins(host="Workshop")
    assert origins.admit(Headers({"host": "workshop:8000", "origin": "http://workshop:8000"}))
    assert not origins.admit(Headers({"host": "evil.example", "origin": "http://evil.example"}))


def test_an_invalid_origin_is_refused() -> None:
    assert not Origins().admit(Headers({"host": "[::1", "origin": "http://[::1"}))
