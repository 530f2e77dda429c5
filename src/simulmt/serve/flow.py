"""Concurrency and flow control: background tasks, bounded queues and token buckets."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from simulmt.serve.protocol import Ack, Commit, Done, Error, Sentence, Transcript, Undone

Output = Commit | Sentence | Undone | Ack | Transcript | Done | Error


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


class Throttle:
    """A token bucket that fills at a constant rate."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._filled = clock()

    def take(self, tokens: int) -> float:
        """Take tokens out; return the seconds to wait before continuing."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled) * self._rate) - tokens
        self._filled = now
        return max(0.0, -self._level / self._rate)


class Budget:
    """Back-pressure: a bound on outstanding characters or samples; `spend` waits while it is exceeded."""

    def __init__(self, most: float) -> None:
        self._all = self._left = most
        self._available = asyncio.Event()
        self._available.set()

    @property
    def is_used(self) -> bool:
        """Whether anything is outstanding."""
        return self._left < self._all

    async def spend(self, cost: int) -> None:
        """Wait until anything is left, then spend `cost`, even if it is more than what is left."""
        await self._available.wait()
        self.refund(-cost)

    def refund(self, cost: int) -> None:
        self._left += cost
        self._available.set() if self._left > 0 else self._available.clear()


class Entry(NamedTuple):
    message: Output
    seq: int  # of the last commit up to here
    received_at: float  # a client that has this commit, perhaps from an earlier session, must have the message


class Outbox:
    """A bounded queue that can be rewound to a commit; `full` and `kept` count messages.

    `commit` is the type of message that clients resume after: Transcript in a session that only recognises.
    """

    def __init__(self, full: int, kept: int, commit: type[Commit | Transcript] = Commit) -> None:
        self._full = full
        self._kept = kept
        self._commit = commit
        self._entries: deque[Entry] = deque()
        self._sent = 0  # number of entries sent
        self._seq = 0  # of the last commit
        self._last_dropped = 0  # the last commit that is no longer kept
        self._last_received = 0  # the last commit that the client has
        self._has_messages = asyncio.Event()
        self._has_space = asyncio.Event()
        self._has_space.set()

    def put(self, message: Output) -> None:
        """Add a message, even if the queue is full; await `wait_for_space` before writing more."""
        received_at: float = self._seq + 1
        if isinstance(message, self._commit):
            received_at = self._seq = message.seq
        elif isinstance(message, Done | Error):
            received_at = math.inf
        self._entries.append(Entry(message, self._seq, received_at))
        self._update()

    async def wait_for_space(self) -> None:
        """Wait until the queue is not full."""
        await self._has_space.wait()

    async def wait_for_message(self) -> None:
        """Wait until there is a message to send."""
        await self._has_messages.wait()

    def take(self) -> Output | None:
        """Return the next message to send, or None if the client must already have it."""
        entry = self._entries[self._sent]
        self._sent += 1
        if self._sent > self._kept:
            self._last_dropped = self._entries.popleft().seq
            self._sent -= 1
        self._update()
        return None if self._last_received >= entry.received_at else entry.message

    def rewind(self, seq: int) -> bool:
        """Go back to just after commit `seq`; return False if that is no longer kept."""
        if seq < self._last_dropped:
            return False
        self._last_received = seq
        self._sent = 0
        self._update()
        return True

    def _update(self) -> None:
        unsent = len(self._entries) - self._sent
        self._has_messages.set() if unsent else self._has_messages.clear()
        self._has_space.set() if unsent < self._full else self._has_space.clear()
