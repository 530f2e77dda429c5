"""Fault injection: every client ends up with the text of an undisturbed translation."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from simulmt.runtime.stream import Translator
from simulmt.serve.client import LiveTranslation
from simulmt.serve.protocol import Commit

from .helpers import PATIENCE, free_port, synthetic_text

STREAMS = 50
CUTS = 20  # of lines to a server before it is killed
GARBAGE = [b"\x00" * 500, b"GET / HTTP/1.1\r\n\r\n", b'{"type":', b"\x81\x7f" + b"\xff" * 8, os.urandom(2_000)]


class Server:
    """A server process that can be killed, and restarted on the same port."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--threads", "1"]
        with self.log.open("a") as log:
            return subprocess.Popen([*command, "--port", str(self.port)], stderr=log)

    async def ready(self) -> None:
        """Wait until the server is ready."""
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with aborting(writer):
                    writer.write(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
                    if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                        return
            await asyncio.sleep(0.05)

    async def restart(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        await asyncio.to_thread(self._process.wait)
        self._process = self._begin()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Proxy:
    """A proxy that, while unreliable, breaks connections at random, every few hundred bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._chance = random.Random(3)
        self.is_reliable = False
        self._cuts = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), aborting(writer):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
            with aborting(there_writer):
                pumps = [self._pump(reader, there_writer), self._pump(there_reader, writer)]
                tasks = [asyncio.create_task(pump) for pump in pumps]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for_cuts(self, times: int) -> None:
        """Wait until a number of connections have been broken."""
        cuts = self._cuts
        while self._cuts < cuts + times:
            await asyncio.sleep(0.02)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._chance.randrange(300, 6_000)
        while data := await reader.read(1_000):
            left -= len(data)
            if left < 0 and not self.is_reliable:
                self._cuts += 1
                return
            writer.write(data)
            await writer.drain()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log.txt")
    yield server
    server.stop()


@contextmanager
def aborting(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Abort the connection at the end of the context."""
    try:
        yield
    finally:
        writer.transport.abort()


async def speak(url: str, text: str, delay: int, chance: random.Random) -> list[Commit]:
    """Translate a text in chunks of various sizes; return the commits."""
    async with LiveTranslation(url, "toy", delay) as live:

        async def talk() -> None:
            rest = text
            while rest:
                size = chance.choice([1, 5, 12, 60])
                live.source(rest[:size])
                rest = rest[size:]
                await asyncio.sleep(chance.uniform(0, 0.5))
            live.finish()

        speaker = asyncio.create_task(talk())
        commits = [message async for message in live if isinstance(message, Commit)]
        await speaker
        return commits


async def talk_nonsense(port: int) -> None:
    while True:
        for garbage in GARBAGE:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                with aborting(writer):
                    writer.write(garbage)
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)


def test_fifty_streams_through_cuts_kills_restarts_and_garbage(server: Server, translator: Translator) -> None:
    texts = [synthetic_text(sentences=4, seed=100 + index) for index in range(STREAMS)]
    delays = [(1, 3, 5)[index % 3] for index in range(STREAMS)]

    async def ordeal() -> list[list[Commit]]:
        line = Proxy(server.port)
        proxy = await asyncio.start_server(line, "127.0.0.1", 0)
        url = f"ws://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/v1/stream"
        nonsense = asyncio.create_task(talk_nonsense(server.port))
        speakers = [
            asyncio.create_task(speak(url, text, delay, random.Random(index)))
            for index, (text, delay) in enumerate(zip(texts, delays, strict=True))
        ]
        for number in (signal.SIGKILL, signal.SIGTERM):
            await line.wait_for_cuts(CUTS)
            await server.restart(number)
        await line.wait_for_cuts(CUTS)
        line.is_reliable = True
        found = await asyncio.gather(*speakers)
        nonsense.cancel()
        proxy.close()
        await asyncio.gather(proxy.wait_closed(), nonsense, return_exceptions=True)
        return found

    found = asyncio.run(asyncio.wait_for(ordeal(), PATIENCE))
    for commits, text, delay in zip(found, texts, delays, strict=True):
        assert [commit.seq for commit in commits] == list(range(1, len(commits) + 1))
        assert "".join(commit.text for commit in commits) == translator.translate(text, delay)
    log = server.log.read_text()
    assert "shutting down" in log
    assert not {word for text in texts for word in text.split() if len(word) > 3} & set(log.split())
