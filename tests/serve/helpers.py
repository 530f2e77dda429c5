"""Real servers on loopback, in a thread of the test process, and raw conversations with them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from simulmt.serve.access import ApiKeys
from simulmt.serve.app import create_app
from simulmt.serve.limits import Limits
from simulmt.serve.server import DrainingServer, listen, server_for
from simulmt.synthetic import generate

PATIENCE = 30.0  # seconds before a test that waits gives up


class Served:
    """A running server."""

    def __init__(self, server: DrainingServer, port: int, thread: threading.Thread) -> None:
        self.server = server
        self.port = port
        self.thread = thread
        self.http = f"http://127.0.0.1:{port}"
        self.url = f"ws://127.0.0.1:{port}/v1/stream"

    @property
    def sessions(self) -> Any:
        return self.server.config.app.state.service.sessions  # type: ignore[union-attr]

    def talk(self, **headers: Any) -> Talk:
        """A connection to its WebSocket."""
        return Talk(connect(self.url, compression=None, max_size=None, close_timeout=1, **headers))

    def stop(self) -> None:
        """Ask it to drain and wait until it has."""
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

    def say(self, kind: str, **fields: Any) -> Talk:
        self.socket.send(json.dumps({"type": kind, **fields}))
        return self

    def hear(self) -> dict[str, Any]:
        """The next message."""
        return json.loads(self.socket.recv(timeout=PATIENCE))

    def start(self, **fields: Any) -> dict[str, Any]:
        """Open a session; what the server answers."""
        return self.say("start", **{"model": "toy", "delay": 3, **fields}).hear()

    def hear_all(self) -> list[dict[str, Any]]:
        """Everything until the server closes."""
        messages = []
        with suppress(ConnectionClosed):
            while True:
                messages.append(self.hear())
        return messages

    def hear_error(self) -> tuple[str, int]:
        """The code of the error that must come last, and the code that the connection was closed with."""
        last = self.hear_all()[-1]
        assert last["type"] == "error"
        assert last["message"]
        assert self.socket.close_code is not None
        return last["code"], self.socket.close_code


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["text"] for message in messages if message["type"] == "commit")


def synthetic_text(sentences: int, seed: int) -> str:
    return " ".join(pair.source for pair in generate(sentences, reorder=0.0, seed=seed))


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(keys: ApiKeys | None = None, origins: tuple[str, ...] = (), **limits: float) -> Iterator[Served]:
    """Serve the shipped model of the invented languages with other limits than usual."""
    app = create_app(["toy"], Limits(**limits), keys, origins, threads=1, host="127.0.0.1")  # type: ignore[arg-type]
    server = server_for(app)
    listener = listen("127.0.0.1", 0, Limits())
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
