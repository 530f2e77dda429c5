"""Streams for an event loop: what arrives while one step is computed goes into the next step together.

    translator = AsyncTranslator(simulmt.load("en-zh"))
    stream = translator.stream(delay=3)
    commits = await stream.push("good morning ")

The event loop only takes text in; the computation runs in a thread, one step at a time for all streams.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from simulmt.stream import Commit, Stream, Translator


class _Waiting(NamedTuple):
    commits: list[Commit]
    result: asyncio.Future[list[Commit]]


class AsyncTranslator:
    """Advances all streams that are due together; belongs to one event loop."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self._waiting: dict[Stream, _Waiting] = {}
        self._worker: asyncio.Task[None] | None = None

    def stream(self, delay: int | None = None, beam: int = 1) -> AsyncStream:
        """Open a stream; without a delay at the model's own."""
        return AsyncStream(self, self.translator.stream(delay, beam))

    async def drain(self, stream: Stream) -> list[Commit]:
        """What a stream writes until it is no longer due, advanced beside all others."""
        if not stream.is_due:
            return []
        waiting = _Waiting([], asyncio.get_running_loop().create_future())
        self._waiting[stream] = waiting
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await waiting.result

    async def _work(self) -> None:
        while self._waiting:
            streams = list(self._waiting)
            try:
                steps = await asyncio.to_thread(self.translator.step, streams)
            except Exception as error:
                for stream in streams:
                    self._settle(stream, error)
                continue
            for stream, commits in zip(streams, steps, strict=True):
                self._waiting[stream].commits.extend(commits)
                if not stream.is_due:
                    self._settle(stream)
        self._worker = None

    def _settle(self, stream: Stream, error: Exception | None = None) -> None:
        commits, result = self._waiting.pop(stream)
        if result.done():  # whoever waited was cancelled
            return
        if error is None:
            result.set_result(commits)
        else:
            result.set_exception(error)


class AsyncStream:
    """A live translation like `Stream`; calls made at once are taken in their order."""

    def __init__(self, translator: AsyncTranslator, stream: Stream) -> None:
        self.stream = stream
        self._translator = translator
        self._turn = asyncio.Lock()

    async def push(self, text: str, arrived: float | None = None) -> list[Commit]:
        """Take in any chunk of text; what can now be written."""
        async with self._turn:
            self.stream.accept(text, arrived)
            return await self._translator.drain(self.stream)

    async def end_sentence(self, arrived: float | None = None) -> list[Commit]:
        """The sentence is over; the rest of its translation."""
        async with self._turn:
            self.stream.accept_end(arrived)
            return await self._translator.drain(self.stream)

    async def finish(self, arrived: float | None = None) -> list[Commit]:
        """The text is over; the rest of the translation."""
        async with self._turn:
            self.stream.accept_finish(arrived)
            return await self._translator.drain(self.stream)

    async def set_delay(self, delay: int) -> None:
        """Change the delay; it counts from the next source piece on."""
        async with self._turn:
            self.stream.set_delay(delay)
