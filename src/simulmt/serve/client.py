"""A client that reconnects: nothing is lost, repeated or changed when a connection breaks or a server restarts.

    async with LiveTranslation("ws://127.0.0.1:8000/v1/stream", model="en-zh", delay=3) as live:
        live.source("Good morning, everyone. ")
        live.finish()
        async for message in live:
            if isinstance(message, Commit):
                print(message.text, end="", flush=True)

The client keeps every message. If the server does not know the session, all messages are sent again; since the output
depends only on them, commits that were already received are dropped.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from simulmt.runtime.aio import running
from simulmt.serve.protocol import (
    Commit,
    Delay,
    Done,
    End,
    Error,
    ErrorCode,
    Finish,
    Input,
    Ready,
    RefusedError,
    Remedy,
    Resume,
    Sentence,
    ServerMessage,
    Source,
    Start,
    Undo,
    Undone,
    parse_server,
    write,
)

MAX_SOURCE_LENGTH = 4_000  # characters up to which texts are joined before they are sent again
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 0.1, 5.0  # seconds before the next attempt
PING_TIMEOUT = 60.0  # seconds; pongs are delayed while the server applies back-pressure
UNREAD = 256  # received messages that are buffered; at the limit reading stops (back-pressure)


class LiveTranslation:
    """One session with a server: send with its methods, iterate over commits and ends of sentences.

    While no server can be reached, or the server keeps failing, it tries again for `reconnect_timeout` seconds. The
    iteration raises errors that it cannot recover from: a RefusedError of the server, the OSError of the last attempt,
    or an invalid address or message.
    """

    def __init__(
        self,
        url: str,
        model: str,
        delay: int | None = None,
        api_key: str | None = None,
        reconnect_timeout: float = 60.0,
        room: str | None = None,
    ) -> None:
        self._url = url
        room_key = secrets.token_urlsafe(12) if room is not None else None
        self._start = Start(model, delay, api_key=api_key, room=room, room_key=room_key)
        self._reconnect_timeout = reconnect_timeout
        self._messages: list[Input] = []
        self._has_messages = asyncio.Event()  # set by every message
        self._output: asyncio.Queue[Commit | Sentence | Undone | Done | Exception] = asyncio.Queue(UNREAD)
        self._session: str | None = None
        self._commits = 0  # received
        self._sentences = 0  # reported
        self._undone: set[int] = set()  # undone sentences already reported
        # Replies that there was nothing to undo are identified by the last commit before them and a count since then.
        self._position = (0, 0)  # on this connection
        self._reported = (0, 0)  # of the last one reported
        self._has_sent = False  # over the last connection
        self._has_failed = False  # whether the server failed on the last connection before any new commit
        self._last_contact = 0.0  # time of the last contact with a server

    async def __aenter__(self) -> LiveTranslation:
        self._worker = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.cancel()
        await asyncio.wait([self._worker])

    def source(self, text: str) -> None:
        """Send more source text, in any chunks."""
        self._send(Source(text))

    def delay(self, k: int) -> None:
        """Change the delay, from the next source word on."""
        self._send(Delay(k))

    def undo(self) -> None:
        """Undo the last sentence; an Undone message follows."""
        self._send(Undo())

    def end(self) -> None:
        """End the sentence, even without a full stop."""
        self._send(End())

    def finish(self) -> None:
        """End the text; the iteration ends once all of it is translated."""
        self._send(Finish())

    async def __aiter__(self) -> AsyncIterator[Commit | Sentence | Undone]:
        while not isinstance(message := await self._output.get(), Done):
            if isinstance(message, Exception):
                raise message
            yield message

    def _send(self, message: Input) -> None:
        self._messages.append(message)
        self._has_messages.set()

    async def _run(self) -> None:
        """Run the session to its end; pass errors to the iteration."""
        try:
            await self._run_until_done()
        except Exception as failure:
            await self._output.put(failure)
        else:
            await self._output.put(Done())

    async def _run_until_done(self) -> None:
        """Connect, and reconnect, until the session is done or cannot be recovered."""
        self._last_contact = _now()
        while True:
            try:
                async with connect(self._url, compression=None, ping_timeout=PING_TIMEOUT) as connection:
                    return await self._run_session(connection)
            except (RefusedError, OSError, ConnectionClosed, InvalidHandshake) as failure:
                offline = _now() - self._last_contact
                if offline > self._reconnect_timeout:
                    raise
                if isinstance(failure, RefusedError):
                    await self._recover(failure)
            # Jitter: clients that lose a server at the same time must not all reconnect at once.
            await asyncio.sleep(min(max(MIN_RETRY_DELAY, offline), MAX_RETRY_DELAY) * random.uniform(0.5, 1.0))

    async def _recover(self, refusal: RefusedError) -> None:
        """Prepare to reconnect after a refusal; raise it if that would not help."""
        if refusal.code.remedy is Remedy.NONE:
            raise refusal
        if refusal.code.remedy is Remedy.RESTART:
            self._session = None
        if refusal.code is ErrorCode.IDLE and not self._has_sent:  # nothing to send: reconnect with the next message
            await self._has_messages.wait()
            self._last_contact = _now()

    async def _run_session(self, connection: ClientConnection) -> None:
        """Open or resume the session, then send and receive until the server says done."""
        ready = await self._open(connection)
        self._session = ready.session
        self._has_sent = False
        commits, has_failed = self._commits, False
        try:
            await self._exchange(ready.received, connection)
        except RefusedError as refusal:
            has_failed = refusal.code is ErrorCode.INTERNAL and self._commits == commits
            raise
        finally:
            if not (has_failed and self._has_failed):  # a server that keeps failing counts as unreachable
                self._last_contact = _now()
            self._has_failed = has_failed

    async def _exchange(self, position: int, connection: ClientConnection) -> None:
        async with running(self._send_from(position, connection), self._receive_all(connection)) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            sender, receiver = tasks
            if sender.done():
                sender.result()
            await receiver

    async def _open(self, connection: ClientConnection) -> Ready:
        if self._session is None:
            self._messages = _join_texts(self._messages)
            self._position = (0, 0)
            await connection.send(write(self._start))
        else:
            self._position = (self._commits, 0)
            await connection.send(write(Resume(self._session, self._commits, self._start.api_key)))
        ready = await _receive(connection)
        if not isinstance(ready, Ready):
            raise RefusedError(ErrorCode.OUT_OF_ORDER, f"expected ready, got {ready}")
        return ready

    async def _send_from(self, position: int, connection: ClientConnection) -> None:
        with suppress(ConnectionClosed):  # the receiver raises it, with the reason
            while True:
                self._has_messages.clear()
                while position < len(self._messages):
                    self._has_sent = True
                    # Encode here: on invalid text the library would close the connection without an error.
                    await connection.send(write(self._messages[position]).encode(), text=True)
                    position += 1
                await self._has_messages.wait()

    async def _receive_all(self, connection: ClientConnection) -> None:
        while not isinstance(message := await _receive(connection), Done):
            await self._deliver(message)

    async def _deliver(self, message: ServerMessage) -> None:
        """Pass a message to the iteration, unless an earlier connection has delivered it."""
        if isinstance(message, Commit | Sentence | Undone) and self._is_new(message):
            await self._output.put(message)

    def _is_new(self, message: Commit | Sentence | Undone) -> bool:
        """Note what has been received; return whether no earlier connection has received it."""
        match message:
            case Commit(seq=seq):
                is_new = seq > self._commits
                self._commits, self._position = max(seq, self._commits), (seq, 0)
            case Sentence(sentence=number):
                is_new = number >= self._sentences
                self._sentences = max(number + 1, self._sentences)
            case Undone(sentence=None):
                seq, count = self._position
                self._position = (seq, count + 1)
                is_new = self._position > self._reported
                self._reported = max(self._position, self._reported)
            case Undone(sentence=int(undone)):
                is_new = undone not in self._undone
                self._undone.add(undone)
        return is_new


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _receive(connection: ClientConnection) -> ServerMessage:
    """Receive the next message; raise RefusedError for an error message."""
    message = parse_server(str(await connection.recv()))
    if isinstance(message, Error):
        raise message.as_exception()
    return message


def _join_texts(messages: Iterable[Input]) -> list[Input]:
    """Join consecutive texts of up to MAX_SOURCE_LENGTH characters."""
    joined: list[Input] = []
    for message in messages:
        last = joined[-1] if joined else None
        if (
            isinstance(message, Source)
            and isinstance(last, Source)
            and len(last.text + message.text) <= MAX_SOURCE_LENGTH
        ):
            joined[-1] = Source(last.text + message.text)
        else:
            joined.append(message)
    return joined
