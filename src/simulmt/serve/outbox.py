"""The output queue of a session: messages not yet sent, and the last ones sent, for a client that resumes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from simulmt.serve.protocol import Commit, Done, Error, Heard, Sentence, Transcript, Undone

Output = Commit | Sentence | Undone | Heard | Transcript | Done | Error


class Entry(NamedTuple):
    message: Output
    seq: int  # of the last commit up to here
    is_commit: bool

    def is_known_at(self, seq: int) -> bool:
        """Whether a client that has commit `seq`, perhaps from an earlier session, surely has this message."""
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
        self._sent = 0  # how many of the entries
        self._seq = 0  # of the last commit
        self._forgotten = 0  # the last commit that is no longer kept
        self._known = 0  # the last commit that the client has
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def put(self, message: Output) -> None:
        """Add a message, even if the box is full; call `room` before writing more."""
        if isinstance(message, self._commit):
            self._seq = message.seq
        self._entries.append(Entry(message, self._seq, isinstance(message, self._commit)))
        self._update()

    async def room(self) -> None:
        """Wait until the box is not full."""
        await self._room.wait()

    async def news(self) -> None:
        """Wait until there is something to send."""
        await self._news.wait()

    def take(self) -> Output | None:
        """Return the next message to send, or None if the client surely has it."""
        entry = self._entries[self._sent]
        self._sent += 1
        if self._sent > self._kept:
            self._forgotten = self._entries.popleft().seq
            self._sent -= 1
        self._update()
        return None if entry.is_known_at(self._known) else entry.message

    def rewind(self, seq: int) -> bool:
        """Go back to just after commit `seq`; return False if that is no longer kept."""
        if seq < self._forgotten:
            return False
        self._known = seq
        self._sent = 0
        self._update()
        return True

    def _update(self) -> None:
        unsent = len(self._entries) - self._sent
        self._news.set() if unsent else self._news.clear()
        self._room.set() if unsent < self._full else self._room.clear()
