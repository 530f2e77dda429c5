"""Sessions: what a stream is to its client, whichever connection it speaks through.

A session belongs to one connection at a time. Without one it goes on computing what it was given, as far as its outbox
has room, and waits for a while to be resumed.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import Callable
from typing import NamedTuple

from simulmt.serve.limits import Limits, Throttle
from simulmt.serve.metrics import Metrics
from simulmt.serve.models import CHARACTERS_AT_ONCE, Model, log_failure, slices
from simulmt.serve.outbox import Outbox
from simulmt.serve.protocol import (
    Commit,
    Delay,
    Done,
    End,
    Error,
    ErrorCode,
    Finish,
    Input,
    RefusedError,
    Sentence,
    Source,
)

MESSAGE_CHARACTERS = 8  # what a message costs, in characters, beside its text
DRAINING = "this server is shutting down; go on at another, or in a moment"
FAILED = "the server failed to translate this stream; start it anew"


class State(enum.Enum):
    """From top to bottom, over either of the two in the middle."""

    LIVE = "takes messages in"
    FINISHING = "has all of its messages, done will follow"
    DRAINING = "takes no more messages because the server shuts down"
    OVER = "its last message lies in the outbox"


class Tenure:
    """A connection's hold on a session, until another connection takes it over."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()


class _Received(NamedTuple):
    message: Input
    arrived: float  # by the translator's clock


class Session:
    """One stream, its input on the way to the model and its output on the way to the client."""

    def __init__(self, model: Model, delay: int | None, address: str, limits: Limits, metrics: Metrics) -> None:
        self.name = secrets.token_urlsafe(18)
        self.model = model
        self.address = address
        self.received = 0  # messages taken in
        self.state = State.LIVE
        self.outbox = Outbox(limits.unsent_messages, limits.kept_messages)
        self.ends_at = asyncio.get_running_loop().time() + limits.session_seconds
        self.tenure: Tenure | None = None  # of the connection that has it
        self.expiry: asyncio.TimerHandle | None = None  # when it is forgotten, unless a connection takes it up
        self._stream = model.stream(delay)
        self._throttle = Throttle(limits.characters_per_second, limits.burst_characters, model.translator.clock)
        self._room = asyncio.Semaphore(limits.unread_messages)
        self._inbox: asyncio.Queue[_Received | None] = asyncio.Queue()  # bounded by the semaphore; None: draining
        self._metrics = metrics
        self._commits = self._sentences = self._words = 0
        self._taken_in = 0  # characters since it last computed
        self._worker = asyncio.create_task(self._work())

    @property
    def delay(self) -> int | None:
        return self._stream.delay

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be computed."""
        return self._stream.is_due or not self._inbox.empty()

    async def accept(self, message: Input, tenure: Tenure) -> None:
        """Take a message in, once there is room for it; what comes too late to be taken in is not counted."""
        if self.state is State.FINISHING:
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "nothing may follow finish")
        arrived = self.model.translator.clock()
        if isinstance(message, Delay):
            self.model.check_delay(message.k)
        length = len(message.text) if isinstance(message, Source) else 0
        if seconds := self._throttle.take(MESSAGE_CHARACTERS + length):
            await asyncio.sleep(seconds)
        await self._room.acquire()
        if tenure.ended.is_set() or self.state is not State.LIVE:
            self._room.release()
            return
        if isinstance(message, Finish):
            self.state = State.FINISHING
        self.received += 1
        self._inbox.put_nowait(_Received(message, arrived))

    def drain(self) -> None:
        """Take nothing more in; once what was taken in is translated, say that the server shuts down."""
        if self.state is State.LIVE:
            self.state = State.DRAINING
            self._inbox.put_nowait(None)

    def stop(self) -> None:
        """Drop whatever is still to be computed."""
        self._worker.cancel()

    async def _work(self) -> None:
        try:
            self._end(await self._translate())
        except Exception as error:
            log_failure(self.model, error)
            self._end(Error(ErrorCode.INTERNAL, FAILED))

    async def _translate(self) -> Done | Error:
        """Take in what has arrived, a bounded part at a time, and translate it; the last message to the client."""
        while True:
            if self._inbox.empty():
                await self._advance()
            received = await self._inbox.get()
            if received is None:
                await self._advance()
                return Error(ErrorCode.DRAINING, DRAINING)
            self._room.release()
            await self._take_in(*received)
            if isinstance(received.message, Finish):
                return Done()

    async def _take_in(self, message: Input, arrived: float) -> None:
        match message:
            case Source(text):
                for part in slices(text):
                    self._stream.accept(part, arrived)
                    self._taken_in += len(part)
                    if self._taken_in >= CHARACTERS_AT_ONCE:
                        await self._advance()
            case Delay(k):
                self._stream.set_delay(k)
            case End():
                self._stream.accept_end(arrived)
            case Finish():
                self._stream.accept_finish(arrived)
                await self._advance()

    async def _advance(self) -> None:
        """Compute until nothing is due, as long as the client reads what comes of it."""
        self._taken_in = 0
        self._report_sentences()
        while self._stream.is_due:
            await self.outbox.room()
            for commit in await self.model.step(self._stream):
                self._metrics.count(self.model.name, commit, commit.source_words - self._words)
                self._words, self._commits = commit.source_words, commit.seq
                self.outbox.put(Commit.of(commit))
            self._report_sentences()

    def _report_sentences(self) -> None:
        while self._sentences < self._stream.sentences_finished:
            self._sentences += 1
            self._metrics.sentences.labels(self.model.name).inc()
            self.outbox.put(Sentence(self._commits))

    def _end(self, message: Done | Error) -> None:
        self.state = State.OVER
        self.outbox.put(message)


class Sessions:
    """All sessions of a server, connected or waiting to be resumed."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.is_draining = False
        self._limits = limits
        self._metrics = metrics
        self._sessions: dict[str, Session] = {}  # oldest first

    def open(self, model: Model, delay: int | None, address: str) -> Session:
        """Begin a session, unless the server is full or shuts down."""
        self._refuse_when_draining()
        self._make_room(lambda session: session.address == address, self._limits.streams_per_address, "this address")
        self._make_room(lambda _: True, self._limits.streams, "this server")
        session = Session(model, delay, address, self._limits, self._metrics)
        self._sessions[session.name] = session
        return session

    def find(self, name: str, seq: int) -> Session:
        """The session of a name, ready to send what follows commit `seq`."""
        self._refuse_when_draining()
        session = self._sessions.get(name)
        if session is None or not session.outbox.rewind(seq):
            raise RefusedError(
                ErrorCode.UNKNOWN_SESSION, "no such session here; start anew and send all messages again"
            )
        return session

    def connect(self, session: Session) -> Tenure:
        """Hand a session to a connection; one that had it before loses it."""
        if session.expiry is not None:
            session.expiry.cancel()
        if session.tenure is None:
            self._metrics.live.labels(session.model.name).inc()
        else:
            session.tenure.ended.set()
        session.tenure = Tenure()
        return session.tenure

    def disconnect(self, session: Session, tenure: Tenure, is_resumable: bool) -> None:
        """A connection is gone; unless another has taken over, the session waits for a while or ends."""
        if session.tenure is not tenure:
            return
        session.tenure = None
        self._metrics.live.labels(session.model.name).dec()
        if is_resumable:
            loop = asyncio.get_running_loop()
            session.expiry = loop.call_later(self._limits.grace_seconds, self._forget, session)
        else:
            self._forget(session)

    async def drain(self) -> None:
        """Let every stream finish what it has taken in, then send its client away; bounded in time."""
        self.is_draining = True
        for session in self._sessions.values():
            session.drain()
        deadline = asyncio.get_running_loop().time() + self._limits.drain_seconds
        while self._connected() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Drop all sessions."""
        for session in list(self._sessions.values()):
            self._forget(session)

    def _connected(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.tenure is not None]

    def _refuse_when_draining(self) -> None:
        if self.is_draining:
            raise RefusedError(ErrorCode.DRAINING, DRAINING)

    def _make_room(self, among: Callable[[Session], bool], most: int, whose: str) -> None:
        """Sessions that nobody is connected to give way, the oldest first: their clients can start anew."""
        group = [session for session in self._sessions.values() if among(session)]
        if len(group) < most:
            return
        waiting = next((session for session in group if session.tenure is None), None)
        if waiting is None:
            raise RefusedError(ErrorCode.TOO_MANY_STREAMS, f"{whose} has all of its {most} streams; try again later")
        self._forget(waiting)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.name, None)
        if session.expiry is not None:
            session.expiry.cancel()  # a timer that is set would keep the session, and its rows of caches, in memory
        session.stop()
