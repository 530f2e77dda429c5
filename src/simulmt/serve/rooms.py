"""Rooms: the output of one speaker, read by any number of viewers.

A room keeps the messages of the last sentences in a log. Every viewer reads the log at its own pace, so a slow viewer
costs no memory: it is disconnected once the log has been trimmed past its position.

With several workers, every room has a home worker, chosen by its name. Speakers at other workers publish to the home
worker; the workers of viewers subscribe to it once per room and serve their viewers from a copy.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode

from simulmt.runtime.aio import running
from simulmt.serve.access import Counted, Counters, Limits, Peers, check_limit
from simulmt.serve.models import ModelInfo
from simulmt.serve.protocol import (
    Closed,
    Commit,
    Error,
    ErrorCode,
    RefusedError,
    Retract,
    Room,
    RoomMessage,
    Sentence,
    Waiting,
    parse_room,
    write,
)

logger = logging.getLogger("simulmt.serve")

KEPT_MESSAGES = 500  # of a room, however long its sentences are
RETRY_SECONDS = 0.2
OPENING_SECONDS = 5.0  # for the home worker of a room to answer
RECOVERY_SECONDS = 30.0  # for a speaker to reconnect after the home worker was restarted
CONNECTION_ERRORS = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError, RefusedError)

RoomEvent = Commit | Sentence | Retract


class Entry(NamedTuple):
    text: str  # the encoded message
    sentence: int


class RoomLog:
    """The messages of a room, readable by many viewers at their own pace.

    A speech that is published again after a lost connection is identified by its `speech` id, and messages already in
    the log are dropped. The last messages of a speech can be read for some time after it. A speaker may give several
    speeches with the same key; their ids differ in the number at the end.
    """

    def __init__(self, name: str, kept_sentences: int, kept_seconds: float = math.inf) -> None:
        self.name = name
        self.readers = 0
        self.is_open = False
        self.speech: Room | None = None  # the current one, or the last
        self._is_complete = False  # whether it has been translated to its end
        self._kept_sentences = kept_sentences
        self._kept_seconds = kept_seconds
        self._entries: deque[Entry] = deque()
        self._trimmed = 0  # entries dropped at the front; positions count from there
        self._start = 0  # position at which a new viewer begins
        self._last_commit = 0
        self._last_sentence = -1
        self._retracted: set[int] = set()
        self._ended = -math.inf  # when, by the monotonic clock
        self._updated = asyncio.Event()

    @property
    def is_kept(self) -> bool:
        """Whether new viewers still get the last speech."""
        return self.is_open or time.monotonic() < self._ended + self._kept_seconds

    def numbered(self, speech: Room) -> Room:
        """Complete the id of a speech: after a complete one by the same speaker, it is another, else the same."""
        if "." in speech.speech:  # it is forwarded again
            return speech
        speaker, _, number = self.speech.speech.partition(".") if self.speech is not None else ("", "", "")
        count = int(number) + self._is_complete if speaker == speech.speech else 1
        return msgspec.structs.replace(speech, speech=f"{speech.speech}.{count}")

    def begin(self, speech: Room) -> None:
        """Begin a speech, or continue the last one."""
        is_same = self.speech == speech
        if is_same and self.is_open:
            return
        self.speech, self.is_open, self._is_complete = speech, True, False
        self._append(Entry(write(speech), max(0, self._last_sentence) if is_same else 0))
        if not is_same:
            self._last_commit, self._last_sentence = 0, -1
            self._retracted.clear()
            self._start = self._end

    def put(self, message: RoomEvent) -> None:
        """Add a message, unless the log already has it."""
        match message:
            case Commit(seq=seq):
                is_new = seq > self._last_commit
                self._last_commit = max(seq, self._last_commit)
            case Sentence(sentence=sentence):
                is_new = sentence > self._last_sentence
                self._last_sentence = max(sentence, self._last_sentence)
            case Retract(sentence=sentence):
                is_new = sentence not in self._retracted
                self._retracted.add(sentence)
        if is_new:
            self._append(Entry(write(message), message.sentence))
            oldest = message.sentence - self._kept_sentences
            while self._start < self._end and self._entries[self._start - self._trimmed].sentence < oldest:
                self._start += 1

    def end(self, is_complete: bool = False) -> None:
        """End the speech; its speaker may still continue it, unless it is complete."""
        if self.is_open:
            self.is_open, self._is_complete = False, is_complete
            self._ended = time.monotonic()
            for message in (Closed(self.name), Waiting(self.name)):
                self._append(Entry(write(message), max(0, self._last_sentence)))

    def finish(self, is_complete: bool) -> None:
        """Append the closing message, `closed` if the speech is complete and else `waiting`, but keep the speech open.

        The log can then be forwarded again after a lost connection.
        """
        self._append(Entry(write(Closed(self.name) if is_complete else Waiting(self.name)), self._last_sentence))

    def recent(self) -> list[str]:
        """Return the first messages for a new viewer."""
        if self.speech is None or not self.is_kept:
            return [write(Waiting(self.name))]
        return [write(self.speech), *(entry.text for entry in islice(self._entries, self._start - self._trimmed, None))]

    async def read(self) -> AsyncIterator[str]:
        """Yield the messages for a viewer: recent ones, then live ones."""
        position = self._end
        for text in self.recent():
            yield text
        while True:
            updated = self._updated
            while position < self._end:
                if position < self._trimmed:
                    raise RefusedError(
                        ErrorCode.SLOW_READER, "the viewer does not keep up; connect again for the last sentences"
                    )
                position += 1
                yield self._entries[position - 1 - self._trimmed].text
            await updated.wait()

    @property
    def _end(self) -> int:
        return self._trimmed + len(self._entries)

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) > KEPT_MESSAGES:
            self._entries.popleft()
            self._trimmed += 1
            self._start = max(self._start, self._trimmed)
        self._updated.set()
        self._updated = asyncio.Event()


class Publisher:
    """Publishes the output of a speaker to the viewers of a room."""

    def __init__(self, log: RoomLog, close: Callable[[Publisher, bool], None]) -> None:
        self.log = log
        self._close = close

    def put(self, message: RoomEvent) -> None:
        self.log.put(message)

    def close(self, is_complete: bool = False) -> None:
        """Close the room; the speaker may open it again and continue the speech, unless it is complete."""
        self._close(self, is_complete)


class Rooms:
    """The rooms of a worker: those it is home to, and copies of those that its viewers read."""

    def __init__(self, limits: Limits, peers: Peers, counters: Counters) -> None:
        self._limits = limits
        self._peers = peers
        self._counters = counters
        self._logs: dict[str, RoomLog] = {}
        self._owners: dict[str, Publisher] = {}  # of the rooms that are open, by name
        self._subscriptions: dict[str, asyncio.Task[None]] = {}

    async def open(
        self, name: str, key: str, model: ModelInfo, on_refused: Callable[[RefusedError], None]
    ) -> Publisher:
        """Open a room for a speaker, or take it over with the same key.

        `on_refused` is called if the home worker answers late, or is restarted, and then refuses the room.
        """
        speech_id = hashlib.blake2b(f"{name} {key}".encode(), digest_size=8).hexdigest()
        speech = Room(name, model.name, model.source, model.target, speech_id)
        home = self._peers.home(name)
        if home == self._peers.worker:
            return self.open_here(speech)
        log = RoomLog(name, self._limits.kept_sentences)
        forwarder = Forwarder(speech, log, self._peers, home, on_refused)
        await forwarder.wait_until_open()
        return Publisher(log, lambda _, is_complete: forwarder.finish(is_complete))

    def open_here(self, speech: Room) -> Publisher:
        """Open a room whose home is this worker."""
        name, is_new = speech.room, speech.room not in self._owners
        if is_new:
            check_limit(self._counters.total(Counted.ROOMS), self._limits.rooms, "rooms")
        log = self._log(name)
        speech = log.numbered(speech)
        if log.is_open and log.speech is not None and log.speech.speech != speech.speech:
            raise RefusedError(ErrorCode.ROOM_TAKEN, f"another speaker has opened the room {name}; choose another name")
        log.begin(speech)
        self._counters.add(Counted.ROOMS, name, int(is_new))
        self._owners[name] = Publisher(log, self._close_here)
        return self._owners[name]

    def _close_here(self, publisher: Publisher, is_complete: bool) -> None:
        """Close a room, unless its speaker has opened it again in the meantime."""
        name = publisher.log.name
        if self._owners.get(name) is publisher:
            del self._owners[name]
            self._counters.add(Counted.ROOMS, name, -1)
            publisher.log.end(is_complete)
            asyncio.get_running_loop().call_later(self._limits.kept_seconds + 1, self._discard, name)
            self._discard(name)

    async def watch(self, name: str) -> AsyncIterator[str]:
        """Yield the messages of a room for a viewer."""
        log = self._log(name)
        home = self._peers.home(name)
        if home != self._peers.worker and name not in self._subscriptions:
            self._subscriptions[name] = asyncio.create_task(self._subscribe(log, home))
        log.readers += 1
        try:
            async for text in log.read():
                yield text
        finally:
            log.readers -= 1
            self._discard(name)

    def _log(self, name: str) -> RoomLog:
        if name not in self._logs:
            self._logs[name] = RoomLog(name, self._limits.kept_sentences, self._limits.kept_seconds)
        return self._logs[name]

    def _discard(self, name: str) -> None:
        """Delete a room without speaker and viewers, some time after its speech."""
        log = self._logs.get(name)
        if log is None or log.readers > 0 or name in self._owners:
            return
        is_home = self._peers.home(name) == self._peers.worker
        if is_home and log.is_kept and len(self._logs) <= 2 * self._limits.rooms:
            return
        del self._logs[name]
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            subscription.cancel()

    async def _subscribe(self, log: RoomLog, home: int) -> None:
        """Copy a room from its home worker while it has viewers."""
        while True:
            with suppress(*CONNECTION_ERRORS):
                async with self._peers.connect(home, f"/v1/rooms/{log.name}") as connection:
                    await _copy_all(connection, log)
            await asyncio.sleep(RETRY_SECONDS)


class Forwarder:
    """Forwards a log to the home worker of its room; reconnects if that worker is restarted."""

    def __init__(
        self, speech: Room, log: RoomLog, peers: Peers, home: int, on_refused: Callable[[RefusedError], None]
    ) -> None:
        self._speech = speech
        self._log = log
        self._peers = peers
        self._home = home
        self._on_refused = on_refused
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deadline = math.inf
        log.begin(speech)
        self._task = asyncio.create_task(self._forward())

    async def wait_until_open(self) -> None:
        """Wait for the home worker to open the room; continue without it after a timeout."""
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                await asyncio.shield(self._opened)
        except TimeoutError:
            logger.warning("the home worker of a room does not respond")
            self._stop_waiting()
        except RefusedError:
            self._task.cancel()
            raise

    def finish(self, is_complete: bool) -> None:
        """End the speech; stop once the home worker has all of it."""
        self._log.finish(is_complete)
        self._deadline = time.monotonic() + RECOVERY_SECONDS

    async def _forward(self) -> None:
        while time.monotonic() < self._deadline:
            with suppress(*CONNECTION_ERRORS):
                async with self._peers.connect(self._home, "/internal/publish") as connection:
                    await connection.send(write(self._speech))
                    answer = parse_room(str(await connection.recv()))
                    if isinstance(answer, Error):
                        self._refuse(answer.as_exception())
                        return
                    if isinstance(answer, Room):
                        self._speech = answer  # with its number
                    self._stop_waiting()
                    await self._send_all(connection)
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _send_all(self, connection: ClientConnection) -> None:
        """Send the log to its end, and wait until the home worker has closed the room."""
        async with running(self._send(connection)) as (sender,):
            await connection.wait_closed()  # also notices a lost worker while nobody speaks
            if not sender.done() or connection.close_code != CloseCode.NORMAL_CLOSURE:
                raise ConnectionError
            sender.result()

    async def _send(self, connection: ClientConnection) -> None:
        async for text in self._log.read():
            await connection.send(text)
            if isinstance(parse_room(text), Closed | Waiting):
                return

    def _stop_waiting(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _refuse(self, refusal: RefusedError) -> None:
        """Report a refusal to `wait_until_open`, or to the session if that no longer waits."""
        if self._opened.done():
            self._on_refused(refusal)
        else:
            self._opened.set_exception(refusal)


async def _copy_all(connection: ClientConnection, log: RoomLog) -> None:
    first = parse_room(str(await connection.recv()))
    if isinstance(first, Waiting) and log.is_open:  # the home worker was restarted: wait for the speaker to reconnect
        with suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY_SECONDS):
                first = parse_room(str(await connection.recv()))
    _copy(first, log)
    async for text in connection:
        _copy(parse_room(str(text)), log)


def _copy(message: RoomMessage, log: RoomLog) -> None:
    match message:
        case Room():
            log.begin(message)
        case Waiting() | Closed():
            log.end()
        case Commit() | Sentence() | Retract():
            log.put(message)
