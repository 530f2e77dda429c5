"""Slow, silent, malicious or lost peers must not affect others."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.serve.access import FIRST_PENALTY, ApiKeys, Authenticator, Counted, Counters, Limits, Peers
from simulmt.serve.app import Settings
from simulmt.serve.models import Metrics
from simulmt.serve.server import RepeatFilter, listen, log_address
from simulmt.serve.transport import ConnectionLimiter

from .helpers import (
    PATIENCE,
    Served,
    eventually,
    frame,
    free_port,
    get,
    post,
    raw_websocket,
    received,
    synthetic_text,
    text_of,
)

TEXT = synthetic_text(sentences=4, seed=71)
PAIR = {"source": "synthetic", "target": "synthetic"}
PING, PONG, CONTINUATION = 9, 10, 0
PING_HEAD = b"\x89\x04"
Serve = Callable[..., Served]


def connect(served: Served) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.port))
    client.settimeout(PATIENCE)
    return client


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: a\r\n",
        b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["silent", "slow headers", "slow body"],
)
def test_a_slow_request_is_refused(serve: Serve, beginning: bytes) -> None:
    with connect(serve(request_seconds=0.2)) as client:
        client.sendall(beginning)
        answer = received(client)
    assert b"HTTP/1.1 408" in answer
    assert b"no complete request within 0.2 seconds" in answer


def test_a_slow_second_request_is_refused(serve: Serve) -> None:
    with connect(serve(request_seconds=0.5)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\n")
        assert b"HTTP/1.1 408" in received(client)


def test_a_slow_response_does_not_count_as_a_slow_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    deadlines: list[object] = []

    async def translate(*_: object) -> str:
        connections: Any = served.server.server_state.connections
        deadlines.extend(connection._deadline for connection in connections)
        return "late"

    monkeypatch.setattr(served.service.models["toy"], "translate", translate)
    answer = post(f"{served.http}/translate", json={"q": TEXT, **PAIR})
    assert answer.json() == {"translatedText": "late"}
    assert deadlines == [None]


def test_silent_connections_are_closed_for_new_ones(serve: Serve) -> None:
    served = serve(connections=8)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(served))
        assert get(f"{served.http}/health").status_code == 200
        assert served.service.counters.total(Counted.CONNECTIONS) <= 8


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_active_connections_are_not_closed_for_new_ones(serve: Serve, limit: str) -> None:
    served = serve(**{limit: 2})
    with served.talk() as first, served.talk():
        refused = get(f"{served.http}/health")
        assert refused.status_code == 503
        assert "too many connections" in refused.json()["error"]
        first.start()
        first.send("source", text=TEXT).send("finish")
        assert first.receive_all()[-1] == {"type": "done"}
    eventually(lambda: served.service.counters.total(Counted.CONNECTIONS) == 0)
    assert get(f"{served.http}/health").status_code == 200


def test_more_connections_than_files_neither_stop_the_server_nor_fill_its_log(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--threads", "1", "--port", str(port)]

    def allow_few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))

    with log.open("w") as file, subprocess.Popen(command, stderr=file, preexec_fn=allow_few_files) as process:
        try:
            eventually(lambda: _is_healthy(port))
            with ExitStack() as stack:
                for _ in range(600):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                assert get(f"http://127.0.0.1:{port}/health").status_code == 200
        finally:
            process.terminate()
            process.wait()
    assert len(log.read_text().splitlines()) < 10


def _is_healthy(port: int) -> bool:
    try:
        return get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_repeated_log_line_is_rate_limited() -> None:
    now = 0.0
    repeats = RepeatFilter(lambda: now)

    def log(text: str) -> str | None:
        record = logging.LogRecord("a", logging.INFO, "", 0, "%s happened", (text,), None)
        return record.getMessage() if repeats.filter(record) else None

    assert [log("this"), log("this"), log("that"), log("this")] == ["this happened", None, "that happened", None]
    now = 11.0
    assert [log("this"), log("this")] == ["this happened (and 2 more)", None]


def test_a_disconnected_client_cancels_its_translation(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    async def never(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(served.service.models["toy"], "translate", never)
    body = b'{"q": "kyo", "source": "auto", "target": "synthetic"}'
    with connect(served) as client:
        client.sendall(b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: served.service.counters.total(Counted.REQUESTS) == 1)
    eventually(lambda: served.service.counters.total(Counted.REQUESTS) == 0)


def test_translations_of_one_address_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(requests_per_address=1)

    async def never(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(served.service.models["toy"], "translate", never)
    body = b'{"q": "kyo", "source": "auto", "target": "synthetic"}'
    with connect(served) as client:
        client.sendall(b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: served.service.counters.total(Counted.REQUESTS) == 1)
        answer = post(f"{served.http}/translate", json={"q": "kyo", **PAIR})
        assert answer.status_code == 429
        assert "address" in answer.json()["error"]


@pytest.mark.parametrize(
    "flood",
    [5_000 * frame(b"x" * 100, PING), frame(b"", is_last=False) + 5_000 * frame(b"", CONTINUATION, is_last=False)],
    ids=["pings", "empty fragments"],
)
def test_a_flood_of_frames_is_ended_with_a_reason(served: Served, flood: bytes) -> None:
    with raw_websocket(served) as client:
        client.sendall(flood)
        answer = received(client)
    assert b'"code":"flooding"' in answer
    assert len(answer) < 200_000


def test_a_bad_frame_gets_a_reason_and_one_line_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for bad in (frame(b"", opcode=3), frame(b"\xff"), b"\x81\x01a"):
            caplog.clear()
            with raw_websocket(served) as client:
                client.sendall(bad)
                answer = received(client)
            assert b'"code":"bad_message"' in answer
            lines = [record for record in caplog.records if record.name.startswith(("simulmt", "uvicorn", "asyncio"))]
            assert [record.getMessage() for record in lines] == ["connection closed: bad_message"]
            assert lines[0].exc_info is None


def test_a_ping_is_answered_while_text_waits_to_be_translated(serve: Serve) -> None:
    served = serve(characters_per_second=3_000, burst_characters=1)
    with raw_websocket(served) as client:
        client.sendall(frame(b'{"type": "start", "model": "toy"}'))
        source = frame(b'{"type": "source", "text": "%s "}' % TEXT[:200].encode())
        client.sendall(4 * source + frame(b'{"type": "finish"}') + frame(b"are you there", PING))
        answer = received(client, until=b'{"type":"done"}')
    assert b'{"type":"done"}' in answer
    assert answer.index(b"are you there") < answer.index(b'{"type":"commit"')


def hold_translation(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Block translation on the server; return a function that releases it."""
    model, may_translate = served.service.models["toy"], threading.Event()
    step = model.step

    async def wait(stream: Stream) -> list[Commit]:
        while not may_translate.is_set():
            await asyncio.sleep(0.01)
        return await step(stream)

    monkeypatch.setattr(model, "step", wait)
    return may_translate.set


def test_a_long_text_is_read_to_its_end_in_whatever_parts_it_comes(
    serve: Serve, translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(unread_characters=2 * len(TEXT))
    release = hold_translation(served, monkeypatch)
    with served.talk() as talk:
        session = served.sessions._sessions[talk.start()["session"]]
        for start in range(0, len(TEXT), 5):
            talk.send("source", text=TEXT[start : start + 5])
        talk.send("finish")
        assert talk.socket.ping().wait(PATIENCE)
        eventually(lambda: session.received == len(range(0, len(TEXT), 5)) + 1)
        release()
        assert text_of(talk.receive_all()) == translator.translate(TEXT, 3)


def test_queued_text_survives_many_pings(serve: Serve, translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(unread_characters=100)
    release = hold_translation(served, monkeypatch)
    words = [f"{word} " for word in TEXT.split()[:60]]
    with served.talk() as talk:
        connection: Any = next(iter(served.server.server_state.connections))
        talk.start()
        for word in words:
            talk.send("source", text=word)
        talk.send("finish")
        eventually(lambda: connection.read_paused)  # so pongs are not read either
        for _ in range(3):
            served.server._loop.call_soon_threadsafe(connection.keepalive_timeout)
        release()
        messages = talk.receive_all()
    assert messages[-1] == {"type": "done"}
    assert text_of(messages) == translator.translate("".join(words), 3)


def test_sending_waits_for_a_slow_reader(served: Served) -> None:
    text = 100 * f"{TEXT} "
    with raw_websocket(served) as client:
        client.sendall(frame(b'{"type": "start", "model": "toy"}'))
        for start in range(0, len(text), 1_000):
            client.sendall(frame(b'{"type": "source", "text": "%s"}' % text[start : start + 1_000].encode()))
        client.sendall(frame(b'{"type": "finish"}'))
        answer = b""
        while PING_HEAD not in answer:
            answer += client.recv(65_536)
        (session,) = served.sessions._attached()
        eventually(lambda: not session.outbox._has_space.is_set())  # so it waits, although everything was received
        while b'{"type":"done"}' not in answer:
            while PING_HEAD in answer:
                _, answer = answer.split(PING_HEAD, 1)
                client.sendall(frame(answer[:4], PONG))
            answer = answer[-20:] + client.recv(65_536)


def test_an_unresponsive_peer_gets_the_reason(serve: Serve) -> None:
    with raw_websocket(serve(ping_seconds=0.1)) as client:
        assert b'"code":"unresponsive"' in received(client)


def test_a_connection_without_a_session_is_notified_of_the_shutdown(serve: Serve) -> None:
    served = serve()
    with served.talk() as talk:
        served.server.stop()
        assert talk.receive_error() == ("draining", 1012)


def test_small_packets_are_sent_at_once(served: Served) -> None:
    with served.talk():
        (connection,) = served.server.server_state.connections
        accepted: Any = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_server_open_to_everyone_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), listen("127.0.0.1", 0, Limits())[0] as listener:
        log_address(listener, Settings(("toy",), "127.0.0.1"))
        log_address(listener, Settings(("toy",), keys=ApiKeys(["a"])))
        assert "--api-keys-file" not in caplog.text
        log_address(listener, Settings(("toy",)))
        assert "--api-keys-file" in caplog.text


def test_wrong_keys_slow_their_address_down(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def guess(key: str, address: str) -> bool:
        return await authenticator.admit(key, Headers(), address)

    async def guess_all() -> None:
        assert [await guess("wrong", "10.0.0.1") for _ in range(3)] == 3 * [False]
        assert not await guess("wrong", "10.0.0.2")
        assert await guess("sesame", "10.0.0.1")

    authenticator = Authenticator(ApiKeys(["sesame"]), Counters())
    monkeypatch.setattr("simulmt.serve.access.sleep", sleep)  # not asyncio's: servers of other tests may be running
    asyncio.run(guess_all())
    assert waits == [FIRST_PENALTY, 2 * FIRST_PENALTY, 4 * FIRST_PENALTY, FIRST_PENALTY]


def test_metrics_need_a_key_unless_they_are_open(serve: Serve) -> None:
    keys = ApiKeys(["sesame"])
    url = f"{serve(keys=keys).http}/metrics"
    assert get(url).status_code == 403
    assert get(url, headers={"Authorization": "Bearer sesame"}).status_code == 200
    assert get(f"{serve(keys=keys, open_metrics=True).http}/metrics").status_code == 200


def test_counters_add_up_over_workers(tmp_path: Path) -> None:
    first, second = (Counters(Peers(worker, 2, tmp_path)) for worker in range(2))
    first.add(Counted.STREAMS, "10.0.0.1", 2)
    second.add(Counted.STREAMS, "10.0.0.1")
    second.add(Counted.STREAMS, "10.0.0.2")
    assert (first.total(Counted.STREAMS), first.of(Counted.STREAMS, "10.0.0.1")) == (4, 3)
    assert first.total(Counted.CONNECTIONS) == 0
    second.reset()
    assert (first.total(Counted.STREAMS), first.of(Counted.STREAMS, "10.0.0.2")) == (2, 0)


@pytest.mark.parametrize(("proxies", "is_refused"), [((), True), (("10.0.0.1",), False), (("*",), False)])
def test_a_trusted_proxy_may_have_many_connections(proxies: tuple[str, ...], is_refused: bool) -> None:
    limiter = ConnectionLimiter(Limits(connections_per_address=1), Counters(), Metrics(), 100, proxies)
    transports: list[Any] = [object(), object()]
    assert limiter.add(transports[0], "10.0.0.1") is None
    assert (limiter.add(transports[1], "10.0.0.1") is not None) is is_refused
