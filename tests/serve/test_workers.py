"""Several workers behind one port: clients must not notice that there is more than one, nor when one dies."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from simulmt.runtime.stream import Translator
from simulmt.serve import server as server_module
from simulmt.serve.access import Peers
from simulmt.serve.app import Settings
from simulmt.serve.client import LiveTranslation
from simulmt.serve.models import METRICS_DIRECTORY
from simulmt.serve.protocol import Commit, Error, Room, parse_room
from simulmt.serve.server import READY, Supervisor

from .helpers import PATIENCE, Served, eventually, free_port, get, synthetic_text, text_of

TEXT = synthetic_text(sentences=6, seed=91)
WORKERS = 2


class Server:
    """`simulmt serve --workers 2` in a separate process."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port = free_port()
        self.log = log
        command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--port", str(self.port)]
        with log.open("w") as file:
            self.process = subprocess.Popen([*command, "--workers", str(WORKERS), *options], stderr=file)
        eventually(lambda: f"127.0.0.1:{self.port}" in log.read_text() or self.process.poll() is not None)
        self.url = f"ws://127.0.0.1:{self.port}/v1/stream"
        self.served = Served(None, self.port, None)  # type: ignore[arg-type]

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in _command_line(child)]

    def live_streams(self) -> float:
        text = get(f"http://127.0.0.1:{self.port}/metrics").text
        return sum(map(float, re.findall(r"^simulmt_live_streams{[^}]*} (.*)$", text, re.MULTILINE)))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _command_line(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("server") / "log.txt",
        *("--limit", "streams=4", "--limit", "grace_seconds=60", "--limit", "rooms=2"),
    )
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log.txt")
    yield server
    server.stop()


def test_a_session_is_resumed_at_whichever_worker_answers(shared: Server, translator: Translator) -> None:
    words = [f"{word} " for word in TEXT.split()]
    with shared.served.talk() as talk:
        session = talk.start()["session"]
    for word in words[:12]:  # one connection each
        with shared.served.talk() as talk:
            assert talk.send("resume", session=session, seq=0).receive()["session"] == session
            talk.send("source", text=word)
            assert talk.socket.ping().wait(PATIENCE)
    with shared.served.talk() as talk:
        assert talk.send("resume", session=session, seq=0).receive()["received"] == 12
        talk.send("finish")
        messages = talk.receive_all()
        assert talk.socket.close_code == 1000
    text = "".join(message["text"] for message in messages if message["type"] == "commit")
    assert text == translator.translate("".join(words[:12]), 3)


def test_limits_and_metrics_add_up(shared: Server) -> None:
    talks = [shared.served.talk().__enter__() for _ in range(4)]
    try:
        assert [talk.start()["type"] for talk in talks] == 4 * ["ready"]
        eventually(lambda: shared.live_streams() == 4)
        for _ in range(6):
            with shared.served.talk() as talk:
                assert talk.send("start", model="toy").receive_error() == ("too_many_streams", 1013)
    finally:
        for talk in talks:
            talk.__exit__()
    eventually(lambda: shared.live_streams() == 0)


def test_rooms_of_all_workers_add_up(shared: Server) -> None:
    homes = {Peers(0, WORKERS).home(name): name for name in "abcdefgh"}  # a room of each worker
    assert len(homes) == WORKERS
    talks = [shared.served.talk().__enter__() for _ in homes]
    try:
        assert [talk.start(room=room)["type"] for talk, room in zip(talks, homes.values(), strict=True)] == 2 * [
            "ready"
        ]
        for room in ("x", "y", "z"):
            with shared.served.talk() as talk:
                assert talk.send("start", model="toy", room=room).receive_error() == ("too_many_streams", 1013)
    finally:
        for talk in talks:
            talk.send("finish").receive_all()
            talk.__exit__()
    eventually(lambda: _can_open(shared, "x"))  # once its worker knows that the others are closed


def _can_open(server: Server, room: str) -> bool:
    with server.served.talk() as talk:
        if talk.start(room=room)["type"] == "error":
            return False
        talk.send("finish").receive_all()
    return True


async def speak(url: str, text: str) -> str:
    async with LiveTranslation(url, "toy", 3) as live:

        async def talk() -> None:
            for word in text.split():
                live.source(f"{word} ")
                await asyncio.sleep(0.02)
            live.finish()

        speaker = asyncio.create_task(talk())
        commits = [message async for message in live if isinstance(message, Commit)]
        await speaker
    assert [commit.seq for commit in commits] == list(range(1, len(commits) + 1))
    return "".join(commit.text for commit in commits)


def test_a_worker_that_is_killed_loses_no_text(server: Server, translator: Translator) -> None:
    async def run() -> list[str]:
        speakers = [asyncio.create_task(speak(server.url, TEXT)) for _ in range(8)]
        await asyncio.sleep(0.8)
        victim = server.workers()[0]
        os.kill(victim, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*speakers), PATIENCE)

    assert asyncio.run(run()) == 8 * [translator.translate(TEXT, 3)]
    eventually(lambda: "starting another" in server.log.read_text())
    eventually(lambda: len(server.workers()) == WORKERS)


class Reader:
    """A viewer that reconnects, as the page does."""

    def __init__(self, port: int, room: str) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/rooms/{room}"
        self.commits: dict[int, str] = {}
        self.speeches: list[str] = []
        self.is_closed = False

    async def run(self) -> None:
        while not self.is_closed:
            with suppress(OSError, ConnectionClosed, InvalidHandshake):
                async with connect(self._url, compression=None) as connection:
                    async for text in connection:
                        self._take(parse_room(str(text)))
                        if self.is_closed:
                            return
            await asyncio.sleep(0.05)

    def _take(self, message: Any) -> None:
        assert not isinstance(message, Error)
        if isinstance(message, Room) and message.speech not in self.speeches:
            self.speeches.append(message.speech)
        if isinstance(message, Commit):
            self.commits.setdefault(message.seq, message.text)
        self.is_closed |= type(message).__name__ == "Closed"


@pytest.mark.parametrize("victim", [None, "home", "other"])
def test_viewers_of_all_workers_read_the_same(server: Server, translator: Translator, victim: str | None) -> None:
    home = Peers(0, WORKERS).home("hall")

    async def run() -> list[Reader]:
        readers = [Reader(server.port, "hall") for _ in range(6)]
        tasks = [asyncio.create_task(reader.run()) for reader in readers]
        async with LiveTranslation(server.url, "toy", 3, room="hall") as live:
            for number, word in enumerate(TEXT.split()):
                live.source(f"{word} ")
                await asyncio.sleep(0.02)
                if victim is not None and number == 20:
                    kill_worker(home if victim == "home" else 1 - home)
            live.finish()
            async for _ in live:
                pass
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        return readers

    def kill_worker(number: int) -> None:
        os.kill(server.workers()[number], signal.SIGKILL)

    for reader in asyncio.run(run()):
        assert "".join(reader.commits[seq] for seq in sorted(reader.commits)) == translator.translate(TEXT, 3)
        assert len(reader.speeches) == 1


def test_a_second_speech_is_new_to_the_viewers_of_all_workers(shared: Server, translator: Translator) -> None:
    for room in {Peers(0, WORKERS).home(name): name for name in "ijklmnop"}.values():  # a room of each worker
        with ExitStack() as stack:
            viewers = [stack.enter_context(shared.served.watch(room)) for _ in range(6)]
            assert {viewer.receive()["type"] for viewer in viewers} == {"waiting"}
            for text in ("kyo tsi myi za.", "yok jao sho chai."):
                with shared.served.talk() as talk:
                    talk.start(room=room, room_key="secret")
                    talk.send("source", text=text).send("finish").receive_all()
                for viewer in viewers:
                    assert text_of(viewer.receive_until("closed")) == translator.translate(text, 3)


def test_workers_stop_with_their_supervisor(server: Server) -> None:
    workers = server.workers()
    with server.served.talk() as talk:
        talk.start()
        for process in (server.process.pid, *workers):  # as systemd does
            os.kill(process, signal.SIGTERM)
        assert talk.receive_error() == ("draining", 1012)
    assert server.process.wait(PATIENCE) == 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert "Traceback" not in server.log.read_text()


def test_a_signal_during_the_start_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--port", str(free_port()), "--workers", "2"]
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            eventually(lambda: any(b"spawn_main" in _command_line(child) for child in children.read_text().split()))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_worker_started_while_a_signal_arrives_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replacement: bool
) -> None:
    started: list[Mock] = []
    signal_at = 3 if is_replacement else 1

    def start(_settings: Settings, peers: Peers, _listener: socket.socket) -> Mock:
        started.append(Mock(number=peers.worker, **{"await_ready.return_value": READY}))
        if len(started) == signal_at:
            supervisor.stop()
        return started[-1]

    monkeypatch.setattr(server_module, "Worker", start)
    monkeypatch.setenv(METRICS_DIRECTORY, str(tmp_path))
    with socket.socket() as listener:
        supervisor = Supervisor(Settings(("toy",)), [listener] * 2, tmp_path)
        supervisor.start()
        if is_replacement:
            supervisor._replace(Mock(number=0, started=-math.inf))
    assert len(started) == signal_at
    started[-1].process.kill.assert_called()


def test_workers_do_not_outlive_a_supervisor_that_is_killed(server: Server) -> None:
    workers = server.workers()
    assert len(workers) == WORKERS
    server.stop()
    eventually(lambda: not any(Path(f"/proc/{worker}/exe").exists() for worker in workers))


def test_a_worker_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "log.txt", "--model", "nowhere")
    assert server.process.wait(PATIENCE) == 1
    assert "nowhere" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
