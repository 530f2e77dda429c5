"""Asyncio streams with dynamic batching: streams that wait while a step runs share the next step.

    translator = AsyncTranslator(simulmt.load("en-zh"))
    stream = translator.stream(delay=3)
    commits = await stream.push("good morning ")

The event loop only accepts text; steps run in a thread, one at a time, or with `inline` in the event loop itself, which
is faster if there is one process per core. A step advances each of its streams by a few positions, and streams that are
still due are queued again (round robin), so a long text does not delay other streams. Background streams, such as whole
documents, get only a few rows of a batch while live streams wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any

from simulmt.config import require
from simulmt.runtime.decoding import ROWS
from simulmt.runtime.stream import Commit, Stream, Translator, Undone

logger = logging.getLogger("simulmt.runtime")

CANCELLATION_POLL = 0.001  # seconds
ROUNDS = 4  # of the event loop between two steps, for received text to reach the queue
BACKGROUND_ROWS = 4  # rows of background streams while live streams wait

Batch = dict[Stream, asyncio.Future[None]]


class AsyncTranslator:
    """Advances waiting streams in batches of at most `max_batch_size`, first come, first served; for one event loop."""

    def __init__(
        self,
        translator: Translator,
        max_batch_size: int = ROWS,
        on_step: Callable[[int], None] = lambda _: None,
        inline: bool = False,
    ) -> None:
        require(max_batch_size >= 1, f"max_batch_size must be at least 1, got {max_batch_size}")
        self.translator = translator
        self._inline = inline
        self._max_batch_size = max_batch_size
        self._on_step = on_step  # called with the number of streams of each step
        self._live: Batch = {}
        self._background: Batch = {}
        self._running: Batch = {}
        self._worker: asyncio.Task[None] | None = None

    def stream(self, delay: int | None = None, background: bool = False) -> AsyncStream:
        """Open a stream, by default with the model's own delay."""
        return AsyncStream(self, self.translator.stream(delay), background)

    async def step(self, stream: Stream) -> list[Commit]:
        """Compute a step of a stream, batched with other waiting streams; return its commits."""
        await self.advance(stream)
        return stream.take()

    async def advance(self, stream: Stream, background: bool = False) -> None:
        """Like `step`, but leave the commits in the stream, so that a cancelled caller loses nothing."""
        queue = self._background if background else self._live
        result = queue[stream] = asyncio.get_running_loop().create_future()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            await result
        except asyncio.CancelledError:
            queue.pop(stream, None)
            while stream in self._running:  # the stream must not be used while it is computed
                with suppress(asyncio.CancelledError):  # even when cancelled twice
                    await asyncio.sleep(CANCELLATION_POLL)
            raise

    async def _work(self) -> None:
        try:
            while self._live or self._background:
                self._running = self._next_batch()
                await self._run(self._running)
                self._running = {}
                for _ in range(ROUNDS):  # let streams that are still due, or have new text, queue up
                    await asyncio.sleep(0)
        finally:
            self._running, self._worker = {}, None

    def _next_batch(self) -> Batch:
        reserved = min(len(self._background), BACKGROUND_ROWS, self._max_batch_size // 2)
        batch = _take(self._live, self._max_batch_size - reserved)
        return batch | _take(self._background, reserved if batch else self._max_batch_size)

    async def _run(self, batch: Batch) -> None:
        """Advance a batch; if that fails, advance its streams one by one, so that only the faulty one fails."""
        try:
            self._on_step(len(batch))
            if self._inline:
                self.translator.step(list(batch))
            else:
                await asyncio.to_thread(self.translator.step, list(batch))
        except Exception as error:
            if len(batch) > 1:
                logger.warning(
                    "a step of %d streams failed (%s); retrying one by one", len(batch), type(error).__name__
                )
                for stream, result in batch.items():
                    await self._run({stream: result})
                return
            for result in batch.values():
                if not result.cancelled():
                    result.set_exception(error)
            return
        for result in batch.values():
            if not result.cancelled():
                result.set_result(None)


def _take(queue: Batch, count: int) -> Batch:
    """Remove the first entries of a queue."""
    taken = dict(islice(queue.items(), count))
    for stream in taken:
        del queue[stream]
    return taken


class AsyncStream:
    """The asyncio counterpart of `Stream`; concurrent calls are served in order.

    If a call fails or is cancelled, no output is lost: the next call returns it. A call cancelled while it waits for an
    earlier one has not accepted its text.
    """

    def __init__(self, translator: AsyncTranslator, stream: Stream, background: bool = False) -> None:
        self.stream = stream
        self._translator = translator
        self._background = background
        self._lock = asyncio.Lock()

    async def push(self, text: str, arrived: float | None = None) -> list[Commit]:
        """Push a chunk of text of any size; return the new commits."""
        async with self._lock:
            self.stream.accept(text, arrived)
            return await self._drain()

    async def end_sentence(self, arrived: float | None = None) -> list[Commit]:
        """End the sentence; return the rest of its translation."""
        async with self._lock:
            self.stream.accept_end(arrived)
            return await self._drain()

    async def finish(self, arrived: float | None = None) -> list[Commit]:
        """End the text; return the rest of the translation."""
        async with self._lock:
            self.stream.accept_finish(arrived)
            return await self._drain()

    async def undo(self) -> Undone | None:
        """Undo the last sentence; see `Stream.undo`."""
        async with self._lock:
            await self._advance()
            return self.stream.undo()

    async def set_delay(self, delay: int) -> None:
        """Change the delay, from the next source word on."""
        async with self._lock:
            self.stream.set_delay(delay)

    async def _drain(self) -> list[Commit]:
        await self._advance()
        return self.stream.take()

    async def _advance(self) -> None:
        while self.stream.is_due:
            await self._translator.advance(self.stream, self._background)


@asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run coroutines as tasks; at the end of the block cancel them and wait until they have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
