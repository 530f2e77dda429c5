"""Real servers on loopback, in a thread of the test process, and raw WebSocket clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import httpx
from starlette.applications import Starlette
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from simulmt.data.synthetic import generate
from simulmt.serve.access import ApiKeys, Limits
from simulmt.serve.app import Service, Settings, create_app
from simulmt.serve.server import DrainingServer, listen, server_for

PATIENCE = 180.0  # seconds before a test that waits gives up; the machine may be busy with much else
# Limits of the server that a busy machine must not reach, unless a test is about them.
PATIENT = dict.fromkeys(("request_seconds", "opening_seconds", "sending_seconds", "ping_seconds"), PATIENCE)

get, post = partial(httpx.get, timeout=PATIENCE), partial(httpx.post, timeout=PATIENCE)


class Served:
    """A running server."""

    def __init__(self, server: DrainingServer, port: int, thread: threading.Thread) -> None:
        self.server = server
        self.port = port
        self.thread = thread
        self.http = f"http://127.0.0.1:{port}"
        self.url = f"ws://127.0.0.1:{port}/v1/stream"

    @property
    def service(self) -> Service:
        return self.server.config.app.state.service  # type: ignore[union-attr]

    @property
    def sessions(self) -> Any:
        return self.service.sessions

    def talk(self, path: str = "/v1/stream", **headers: Any) -> Talk:
        """Connect to a WebSocket."""
        url = f"ws://127.0.0.1:{self.port}{path}"
        settings: Any = {"compression": None, "max_size": None, "open_timeout": PATIENCE, "close_timeout": 1}
        return Talk(connect(url, ping_interval=None, **settings, **headers))

    def watch(self, room: str) -> Talk:
        """Connect as a viewer of a room."""
        return self.talk(f"/v1/rooms/{room}")

    def stop(self) -> None:
        """Stop the server and wait until it has drained."""
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


class Talk:
    """A raw WebSocket that speaks JSON."""

    socket: ClientConnection

    def __init__(self, connection: AbstractContextManager[ClientConnection]) -> None:
        self._connection = connection

    def __enter__(self) -> Talk:
        self.socket = self._connection.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.__exit__(None, None, None)

    def send(self, kind: str, **fields: Any) -> Talk:
        self.socket.send(json.dumps({"type": kind, **fields}))
        return self

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        return json.loads(self.socket.recv(timeout=PATIENCE))

    def start(self, **fields: Any) -> dict[str, Any]:
        """Open a session; return the answer of the server."""
        return self.send("start", **{"model": "toy", "delay": 3, **fields}).receive()

    def receive_until(self, kind: str) -> list[dict[str, Any]]:
        """Return all messages up to one of this type."""
        messages = [self.receive()]
        while messages[-1]["type"] != kind:
            messages.append(self.receive())
        return messages

    def receive_all(self) -> list[dict[str, Any]]:
        """Return all messages until the server closes the connection."""
        messages = []
        with suppress(ConnectionClosed):
            while True:
                messages.append(self.receive())
        return messages

    def receive_error(self) -> tuple[str, int]:
        """Return the code of the error, which must be the last message, and the close code."""
        last = self.receive_all()[-1]
        assert last["type"] == "error"
        assert last["message"]
        assert self.socket.close_code is not None
        return last["code"], self.socket.close_code


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["text"] for message in messages if message["type"] == "commit")


def synthetic_text(sentences: int, seed: int) -> str:
    return " ".join(pair.source for pair in generate(sentences, reorder=0.0, seed=seed))


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that another thread fulfils."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def raw_websocket(served: Served, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """Open a WebSocket without a library, which would read and answer pings."""
    with socket.socket() as client:
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", served.port))
        client.settimeout(PATIENCE)
        client.sendall(
            b"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 101")
        yield client


def frame(payload: bytes, opcode: int = 1, is_last: bool = True) -> bytes:
    """Encode a frame, masked with zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xff" + size.to_bytes(8, "big")
    return bytes([0x80 * is_last | opcode]) + length + b"\0\0\0\0" + payload


def received(client: socket.socket, until: bytes | None = None) -> bytes:
    """Receive everything until the server closes the connection, or has sent this."""
    data = b""
    with suppress(ConnectionError):
        while (until is None or until not in data) and (part := client.recv(65_536)):
            data += part
    return data


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(
    keys: ApiKeys | None = None,
    origins: tuple[str, ...] = (),
    open_metrics: bool = False,
    room_keys: bool = False,
    recognisers: Mapping[str, str] | None = None,
    **limits: float,
) -> Iterator[Served]:
    """Serve the toy model with other than the default limits."""
    bounds = Limits(**{**PATIENT, **limits})  # type: ignore[arg-type]
    settings = Settings(
        ("toy",), "127.0.0.1", bounds, keys or ApiKeys(), origins, 1, open_metrics, room_keys, recognisers or {}
    )
    with running(create_app(settings)) as served:
        yield served


@contextmanager
def running(app: Starlette) -> Iterator[Served]:
    """Run an application in a thread."""
    server = server_for(app)
    (listener,) = listen("127.0.0.1", 0, Limits())
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    eventually(lambda: server.started)
    served = Served(server, port, thread)
    try:
        yield served
    finally:
        if thread.is_alive():
            server.should_exit = True
            thread.join(PATIENCE)
