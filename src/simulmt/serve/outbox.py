"""The output queue of a session: messages not yet sent, and the last ones sent, for a client that resumes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from simulmt.serve.protocol import Ack, Commit, Done, Error, Sentence, Transcript, Undone

Output = Commit | Sentence | Undone | Ack | Transcript | Done | Error


class Entry(NamedTuple):
    message: Output
    seq: int  # of the last commit up to here
    is_commit: bool

    def is_received_at(self, seq: int) -> bool:
        """Return whether a client that has commit `seq`, perhaps from an earlier session, must have this message."""
        if isinstance(self.message, Done | Error):
            return False
        return self.seq <= seq if self.is_commit else self.seq < seq


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
        if isinstance(message, self._commit):
            self._seq = message.seq
        self._entries.append(Entry(message, self._seq, isinstance(message, self._commit)))
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
        return None if entry.is_received_at(self._last_received) else entry.message

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
