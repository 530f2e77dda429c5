"""Sessions: streams that outlive the connections of their clients.

A session is attached to at most one connection at a time. While detached it keeps translating the input received, as
long as its outbox has space, and can be resumed for `grace_seconds`.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from dataclasses import dataclass

from simulmt.runtime.revisions import feed
from simulmt.serve.access import ALONE, Counted, Counters, Limits, Peers, check_limit
from simulmt.serve.audio import Audio, RecogniserPool, SpeechInput
from simulmt.serve.models import CHUNK_CHARACTERS, Metrics, Model, chunks, log_failure
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
    Remedy,
    Retract,
    Sentence,
    Source,
    Transcript,
    Undo,
    Undone,
)
from simulmt.serve.rooms import Publisher
from simulmt.serve.transport import Budget, Outbox, Throttle
from simulmt.speech.audio import RATE

MESSAGE_COST = 64  # characters added to the length of each message
MIN_AUDIO_COST = RATE // 100  # samples that a frame counts as at least: even an empty one takes memory
MAX_JOINED_LENGTH = 4_096  # characters up to which queued texts are joined
DRAINING = "the server is shutting down; start again on another server, or retry shortly"
FAILED = "the server failed to translate this stream; start it again"


class State(enum.Enum):
    LIVE = "receives messages"
    FINISHING = "has received finish"
    DRAINING = "receives no more messages, because the server is shutting down"
    OVER = "its last message is in the outbox"


class Attachment:
    """Links a session to a connection, until another connection takes the session over."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()


@dataclass
class _Received:
    message: Input | Audio
    arrived: float  # by the translator's clock


class Session:
    """One stream, with its input queue and its outbox."""

    def __init__(
        self,
        name: str,
        model: Model,
        delay: int | None,
        address: str,
        limits: Limits,
        metrics: Metrics,
        speech: SpeechInput | None = None,
        is_translated: bool = True,
    ) -> None:
        self.name = name
        self.model = model
        self.address = address
        self.received = 0  # messages
        self.state = State.LIVE
        self.outbox = Outbox(limits.unsent_messages, limits.kept_messages, Commit if is_translated else Transcript)
        self.ends_at = asyncio.get_running_loop().time() + limits.session_seconds
        self.attachment: Attachment | None = None
        self.room: Publisher | None = None
        self.speech = speech  # only with audio
        self.expiry: asyncio.TimerHandle | None = None  # ends the session if no connection resumes it
        self._is_translated = is_translated  # else speech is only recognised
        self._stream = model.translator.stream(delay)
        self._throttle = Throttle(limits.characters_per_second, limits.burst_characters, model.translator.clock)
        self._unread = Budget(limits.unread_characters)
        self._unrecognised = Budget(limits.audio_seconds * RATE)
        self._inbox: asyncio.Queue[_Received | None] = asyncio.Queue()  # bounded by the budget; None: draining
        self._newest: _Received | None = None  # the last one in the inbox
        self._metrics = metrics
        self._commits = self._sentences = self._words = 0
        self._accepted = 0  # characters since the last step
        self._worker = asyncio.create_task(self._work())

    @property
    def delay(self) -> int | None:
        return self._stream.delay

    @property
    def is_busy(self) -> bool:
        """Whether input is still to be translated."""
        return self._stream.is_due or self._unread.is_used or self._unrecognised.is_used

    async def receive(self, message: Input | Audio, attachment: Attachment) -> None:
        """Queue a message once there is space; drop it, uncounted, if the attachment has ended by then."""
        if self.state is State.FINISHING:
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "no message may follow finish; open another session")
        if isinstance(message, Source) and self.speech is not None:
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "the input of this session is audio, in binary frames")
        if not self._is_translated and not isinstance(message, Audio | Finish):
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "this session only recognises speech; send audio and finish")
        arrived = self.model.translator.clock()
        if isinstance(message, Delay):
            self.model.check_delay(message.k)
        budget, cost = self._budget(message)
        await budget.spend(cost)
        if attachment.ended.is_set() or self.state is not State.LIVE:
            budget.refund(cost)
            return
        if isinstance(message, Finish):
            self.state = State.FINISHING
        if self.speech is not None and isinstance(message, Audio):
            if ack := self.speech.receive(message):
                self.outbox.put(ack)
        else:
            self.received += 1
        self._queue(message, arrived)

    def _queue(self, message: Input | Audio, arrived: float) -> None:
        """Add a message to the inbox.

        Queued texts are joined, so that a long text in many small messages does not hit the limit, and pings after it
        are answered.
        """
        newest = self._newest.message if self._newest is not None else None
        if isinstance(message, Source) and isinstance(newest, Source) and len(newest.text) < MAX_JOINED_LENGTH:
            assert self._newest is not None
            self._newest.message = Source(newest.text + message.text)
            self._unread.refund(MESSAGE_COST)
            return
        self._newest = _Received(message, arrived)
        self._inbox.put_nowait(self._newest)

    def _budget(self, message: Input | Audio) -> tuple[Budget, int]:
        """Return the budget for this kind of message, and the cost of this one."""
        if isinstance(message, Audio):
            return self._unrecognised, max(message.length, MIN_AUDIO_COST)
        return self._unread, MESSAGE_COST + (len(message.text) if isinstance(message, Source) else 0)

    def drain(self) -> None:
        """Stop receiving; once the received input is translated, tell the client that the server is shutting down."""
        if self.state is State.LIVE:
            self.state = State.DRAINING
            self._inbox.put_nowait(None)

    def stop(self) -> None:
        """Drop the remaining input."""
        self._worker.cancel()
        if self.speech is not None:
            self.speech.close()

    def refuse(self, refusal: RefusedError) -> None:
        """End the session with an error, unless it is over."""
        if self.state is not State.OVER:
            self._worker.cancel()
            self._end(Error(refusal.code, str(refusal)))

    async def _work(self) -> None:
        try:
            self._end(await self._translate())
        except RefusedError as refusal:
            self._end(Error(refusal.code, str(refusal)))
        except Exception as error:
            log_failure(self.model, error)
            self._end(Error(ErrorCode.INTERNAL, FAILED))

    async def _translate(self) -> Done | Error:
        """Translate input as it arrives, in bounded chunks; return the last message to the client."""
        while True:
            if self._inbox.empty():
                await self._advance()
            received = await self._inbox.get()
            if received is self._newest:
                self._newest = None
            if received is None:
                await self._recognise(None, self.model.translator.clock())
                await self._advance()
                return Error(ErrorCode.DRAINING, DRAINING)
            budget, cost = self._budget(received.message)
            if isinstance(received.message, Audio):
                await self._recognise(received.message, received.arrived)
            else:
                if seconds := self._throttle.take(cost):
                    await asyncio.sleep(seconds)
                await self._accept(received.message, received.arrived)
            budget.refund(cost)
            if isinstance(received.message, Finish):
                return Done()

    async def _accept(self, message: Input, arrived: float) -> None:
        match message:
            case Source(text):
                for chunk in chunks(text):
                    self._stream.accept(chunk, arrived)
                    self._accepted += len(chunk)
                    if self._accepted >= CHUNK_CHARACTERS:
                        await self._advance()
            case Delay(k):
                self._stream.set_delay(k)
            case Undo():
                await self._advance()
                self._undo()
            case End():
                self._stream.accept_end(arrived)
            case Finish():
                await self._recognise(None, arrived)
                self._stream.accept_finish(arrived if self.speech is None else None)
                await self._advance()

    async def _recognise(self, audio: Audio | None, arrived: float) -> None:
        """Recognise audio, or its end (None); report and translate the words that are now stable."""
        if self.speech is None:
            return
        words = await self.speech.recognise(audio)
        if self._is_translated:
            now = self.model.translator.clock()
            feed(self._stream, words, self.speech.seconds + now - arrived, now)
        await self.outbox.wait_for_space()
        for transcript in self.speech.transcripts(words):
            self.outbox.put(transcript)
        if words:
            await self._advance()

    async def _advance(self) -> None:
        """Compute until nothing is due; wait while the outbox is full (back-pressure)."""
        self._accepted = 0
        self._report_sentences()
        while self._stream.is_due:
            await self.outbox.wait_for_space()
            for commit in await self.model.step(self._stream):
                self._metrics.count(self.model.name, commit, commit.source_words - self._words)
                self._words, self._commits = commit.source_words, commit.seq
                self._emit(Commit.of(commit))
            self._report_sentences()

    def _report_sentences(self) -> None:
        while self._sentences < self._stream.sentences_finished:
            self._metrics.sentences.labels(self.model.name).inc()
            self._emit(Sentence(self._commits, self._sentences))
            self._sentences += 1

    def _undo(self) -> None:
        undone = self._stream.undo()
        self._sentences = self._stream.sentences_finished  # an undone sentence is not reported
        self.outbox.put(Undone(None, "") if undone is None else Undone(*undone))
        if undone is not None and self.room is not None:
            self.room.put(Retract(undone.sentence))

    def _emit(self, message: Commit | Sentence) -> None:
        self.outbox.put(message)
        if self.room is not None:
            self.room.put(message)

    def _end(self, message: Done | Error) -> None:
        self.state = State.OVER
        if self.speech is not None:
            self.speech.close()
        self.outbox.put(message)
        if self.room is not None and isinstance(message, Done):
            self.room.close(is_complete=True)


class Sessions:
    """All sessions of a worker, attached or waiting to be resumed."""

    def __init__(self, limits: Limits, metrics: Metrics, counters: Counters, peers: Peers = ALONE) -> None:
        self.is_draining = False
        self._peers = peers
        self._limits = limits
        self._metrics = metrics
        self._counters = counters
        self._sessions: dict[str, Session] = {}  # oldest first

    def open(
        self,
        model: Model,
        delay: int | None,
        address: str,
        pool: RecogniserPool | None = None,
        is_translated: bool = True,
    ) -> Session:
        """Open a session, unless the server is full or shutting down; with audio if a pool is given."""
        self._refuse_when_draining()
        limits, counters = self._limits, self._counters
        at_address = counters.of(Counted.STREAMS, address)
        check_limit(at_address, limits.streams_per_address, "streams from this address")
        check_limit(counters.total(Counted.STREAMS), limits.streams, "streams on this server")
        model.check_delay(delay)
        speech = None if pool is None else pool.open(model.info.source)
        self._evict(limits.streams_per_address, address)
        self._evict(limits.streams)
        name = self._peers.session_name(secrets.token_urlsafe(18))
        session = Session(name, model, delay, address, limits, self._metrics, speech, is_translated)
        self._sessions[session.name] = session
        return session

    def find(self, name: str, seq: int) -> Session:
        """Return the session with this name, rewound to commit `seq`."""
        self._refuse_when_draining()
        session = self._sessions.get(name)
        if session is None or not session.outbox.rewind(seq):
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, "unknown session; start again and send all messages again")
        return session

    def attach(self, session: Session) -> Attachment:
        """Attach a session to a connection; detach an earlier connection."""
        if session.expiry is not None:
            session.expiry.cancel()
        if session.attachment is None:
            self._metrics.live.labels(session.model.name).inc()
            self._counters.add(Counted.STREAMS, session.address)
        else:
            session.attachment.ended.set()
        session.attachment = Attachment()
        return session.attachment

    def detach(self, session: Session, attachment: Attachment, remedy: Remedy) -> None:
        """Detach a session from a closed connection, unless another connection has it; keep it if it can be resumed."""
        if session.attachment is not attachment:
            return
        session.attachment = None
        self._metrics.live.labels(session.model.name).dec()
        self._counters.add(Counted.STREAMS, session.address, -1)
        loop = asyncio.get_running_loop()
        if remedy is Remedy.RESUME:
            session.expiry = loop.call_later(self._limits.grace_seconds, self.forget, session)
            return
        if remedy is Remedy.RESTART and session.room is not None:
            # The client will reopen the room in a new session; keep its viewers until then.
            loop.call_later(self._limits.grace_seconds, session.room.close)
            session.room = None
        self.forget(session)

    async def drain(self) -> None:
        """Let every stream translate its input, then disconnect its client; bounded by `drain_seconds`."""
        self.is_draining = True
        for session in self._sessions.values():
            session.drain()
        deadline = asyncio.get_running_loop().time() + self._limits.drain_seconds
        while self._attached() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Drop all sessions."""
        for session in list(self._sessions.values()):
            self.forget(session)

    def _attached(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.attachment is not None]

    def _refuse_when_draining(self) -> None:
        if self.is_draining:
            raise RefusedError(ErrorCode.DRAINING, DRAINING)

    def _evict(self, limit: int, address: str | None = None) -> None:
        """Drop the oldest detached session (of an address) if the limit is reached; its client can start again."""
        group = [session for session in self._sessions.values() if address in (None, session.address)]
        waiting = next((session for session in group if session.attachment is None), None)
        if len(group) >= limit and waiting is not None:
            self.forget(waiting)

    def forget(self, session: Session) -> None:
        """Drop a session and close its room."""
        self._sessions.pop(session.name, None)
        if session.room is not None:
            session.room.close()
        if session.expiry is not None:
            session.expiry.cancel()  # a pending timer would keep the session, and its cache rows, in memory
        session.stop()
