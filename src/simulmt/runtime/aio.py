"""Streams for an event loop: what arrives while one step is computed goes into the next step together.

    translator = AsyncTranslator(simulmt.load("en-zh"))
    stream = translator.stream(delay=3)
    commits = await stream.push("good morning ")

The event loop only takes text in; the computation runs in a thread, one step at a time. A step advances a few streams
by a little, and whoever has had a turn lines up again behind those who wait: a stream with pages to translate delays
nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from simulmt.runtime.decoding import ROWS
from simulmt.stream import Commit, Stream, Translator

logger = logging.getLogger("simulmt.runtime")

CANCELLATION_POLL = 0.001  # seconds

Turn = dict[Stream, asyncio.Future[None]]


class AsyncTranslator:
    """Advances the streams that wait, at most `together` at a time, first come first served; of one event loop."""

    def __init__(
        self, translator: Translator, together: int = ROWS, on_step: Callable[[int], None] = lambda _: None
    ) -> None:
        self.translator = translator
        self._together = together
        self._on_step = on_step  # is told how many streams a step advances
        self._waiting: Turn = {}
        self._turn: Turn = {}  # what is being computed
        self._worker: asyncio.Task[None] | None = None

    def stream(self, delay: int | None = None, beam: int = 1) -> AsyncStream:
        """Open a stream; without a delay at the model's own."""
        return AsyncStream(self, self.translator.stream(delay, beam))

    async def step(self, stream: Stream) -> list[Commit]:
        """Advance a stream a little, beside all others that wait; what it wrote."""
        await self.advance(stream)
        return stream.take()

    async def advance(self, stream: Stream) -> None:
        """`step` that leaves in the stream what it wrote, whether or not somebody still waits for it."""
        result = self._waiting[stream] = asyncio.get_running_loop().create_future()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            await result
        except asyncio.CancelledError:
            self._waiting.pop(stream, None)
            while stream in self._turn:  # whoever comes next must not touch it while it is being computed
                with suppress(asyncio.CancelledError):  # even of somebody who gives up twice
                    await asyncio.sleep(CANCELLATION_POLL)
            raise

    async def _work(self) -> None:
        try:
            while self._waiting:
                self._turn = dict(islice(self._waiting.items(), self._together))
                for stream in self._turn:
                    del self._waiting[stream]
                await self._take(self._turn)
                self._turn = {}
                await asyncio.sleep(0)  # those who are still due line up again
        finally:
            self._turn, self._worker = {}, None

    async def _take(self, turn: Turn) -> None:
        """Advance the streams of a turn together; if that fails, one by one, so that who is to blame fails alone."""
        try:
            self._on_step(len(turn))
            await asyncio.to_thread(self.translator.step, list(turn))
        except Exception as error:
            if len(turn) > 1:
                logger.warning("a step of %d streams failed: %s; each is now alone", len(turn), type(error).__name__)
                for stream, result in turn.items():
                    await self._take({stream: result})
                return
            for result in turn.values():
                if not result.cancelled():
                    result.set_exception(error)
            return
        for result in turn.values():
            if not result.cancelled():
                result.set_result(None)


class AsyncStream:
    """A live translation like `Stream`; calls made at once are taken in their order.

    A call that fails or is cancelled loses nothing of the translation: the next one returns it. Only a call that is
    cancelled while it waits for an earlier one has not taken its text in.
    """

    def __init__(self, translator: AsyncTranslator, stream: Stream) -> None:
        self.stream = stream
        self._translator = translator
        self._turn = asyncio.Lock()

    async def push(self, text: str, arrived: float | None = None) -> list[Commit]:
        """Take in any chunk of text; what can now be written."""
        async with self._turn:
            self.stream.accept(text, arrived)
            return await self._drain()

    async def end_sentence(self, arrived: float | None = None) -> list[Commit]:
        """The sentence is over; the rest of its translation."""
        async with self._turn:
            self.stream.accept_end(arrived)
            return await self._drain()

    async def finish(self, arrived: float | None = None) -> list[Commit]:
        """The text is over; the rest of the translation."""
        async with self._turn:
            self.stream.accept_finish(arrived)
            return await self._drain()

    async def set_delay(self, delay: int) -> None:
        """Change the delay; it counts from the next source word on."""
        async with self._turn:
            self.stream.set_delay(delay)

    async def _drain(self) -> list[Commit]:
        while self.stream.is_due:
            await self._translator.advance(self.stream)
        return self.stream.take()
