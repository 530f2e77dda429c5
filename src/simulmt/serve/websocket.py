"""The WebSocket endpoints: /v1/stream, /v1/rooms/NAME, and /internal/publish between workers."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode

from simulmt.runtime.aio import running
from simulmt.serve.access import ADDRESS_HEADER, Counted, check_limit
from simulmt.serve.audio import Audio
from simulmt.serve.protocol import (
    ROOM_NAME,
    ClientMessage,
    Closed,
    Commit,
    Done,
    Error,
    ErrorCode,
    Opening,
    Ready,
    RefusedError,
    Remedy,
    Resume,
    Retract,
    Room,
    Sentence,
    Start,
    Waiting,
    parse_client,
    parse_room,
    parse_viewer,
    write,
)
from simulmt.serve.sessions import Attachment, Session

if TYPE_CHECKING:
    from simulmt.serve.app import Service

logger = logging.getLogger("simulmt.serve")

TAKEN_OVER = "another connection has resumed this session"
LAST_MESSAGE_SECONDS = 1.0  # to send the last message to a client that may not be reading


class Connection(ABC):
    """Serves one client; `run` returns when the connection is closed."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket = websocket
        self._service = service
        self._is_worker = _is_worker(websocket, service)
        client = websocket.client
        self._address = websocket.headers.get(ADDRESS_HEADER, "") if client is None else client.host

    @abstractmethod
    async def _serve(self) -> int:
        """Serve the client to the end; return the close code."""

    async def run(self) -> None:
        if not self._service.origins.admit(self._websocket.headers):
            await self._websocket.close()  # before it is accepted: the browser gets a 403
            return
        await self._websocket.accept()
        with suppress(WebSocketDisconnect):
            try:
                code = await self._serve()
            except RefusedError as refusal:
                logger.info("connection closed: %s", refusal.code)
                code = refusal.code.close_code
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                        await self._report(refusal)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                    await self._websocket.close(code)

    async def _report(self, refusal: RefusedError) -> None:
        self._service.metrics.errors.labels(refusal.code).inc()
        await self._websocket.send_text(write(Error(refusal.code, str(refusal))))

    async def _authenticate(self, key: str | None) -> None:
        if not await self._service.authenticator.admit(key, self._websocket.headers, self._address):
            raise RefusedError(
                ErrorCode.UNAUTHORIZED, "missing or invalid API key; send it as api_key or as Authorization: Bearer KEY"
            )


class StreamConnection(Connection):
    """Serves a client of /v1/stream."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        super().__init__(websocket, service)
        self._last_message = 0.0  # time of the last message received

    async def _serve(self) -> int:
        opened = await self._open()
        if isinstance(opened, Resume):
            return await self._forward(opened)
        session, attachment = opened
        remedy = Remedy.RESUME
        try:
            await self._websocket.send_text(write(_ready(session)))
            return await self._exchange(session, attachment)
        except RefusedError as refusal:
            remedy = refusal.code.remedy
            raise
        except WebSocketDisconnect:
            self._service.metrics.lost.labels(session.model.name).inc()
            raise
        finally:
            self._service.sessions.detach(session, attachment, remedy)

    async def _open(self) -> tuple[Session, Attachment] | Resume:
        """Open or resume a session and attach it; after an unknown session, allow a second opening message.

        Return the message itself if another worker has the session.
        """
        try:
            return await self._session_for(await self._receive_opening())
        except RefusedError as refusal:
            if refusal.code is not ErrorCode.UNKNOWN_SESSION:
                raise
            await self._report(refusal)
        return await self._session_for(await self._receive_opening())

    async def _receive_opening(self) -> Opening:
        seconds = self._service.limits.opening_seconds
        try:
            async with asyncio.timeout(seconds):
                message = await self._receive()
        except TimeoutError:
            raise RefusedError(ErrorCode.IDLE, f"no message for {seconds:g} seconds") from None
        if not isinstance(message, Start | Resume):
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "the first message must be start or resume")
        if not self._is_worker:  # else that worker has checked the key
            await self._authenticate(message.api_key)
        return message

    async def _session_for(self, message: Opening) -> tuple[Session, Attachment] | Resume:
        sessions, peers = self._service.sessions, self._service.peers
        if isinstance(message, Resume):
            if peers.owner(message.session) != peers.worker:
                return message
            session = sessions.find(message.session, message.seq)
            return session, sessions.attach(session)
        if message.model not in self._service.models:
            names = ", ".join(self._service.models)
            raise RefusedError(ErrorCode.UNKNOWN_MODEL, f"unknown model {message.model!r}; available: {names}")
        is_translated = message.output == "translation"
        if not is_translated and (message.input != "audio" or message.room is not None):
            raise RefusedError(ErrorCode.BAD_MESSAGE, 'output "transcript" needs input "audio" and takes no room')
        pool = self._service.recognisers if message.input == "audio" else None
        model = self._service.models[message.model]
        session = sessions.open(model, message.delay, self._address, pool, is_translated)
        attachment = sessions.attach(session)  # counted, and not dropped for others, while its room is opened
        if message.room is not None:
            try:
                key = message.room_key or session.name
                session.room = await self._service.rooms.open(message.room, key, model.info, session.refuse)
            except BaseException:
                sessions.detach(session, attachment, Remedy.NONE)
                raise
        return session, attachment

    async def _forward(self, opening: Resume) -> int:
        """Proxy the connection to the worker that has the session; return the close code."""
        peers = self._service.peers
        try:
            async with peers.connect(peers.owner(opening.session), "/v1/stream", self._address) as owner:
                await owner.send(write(opening))
                async with running(self._forward_input(owner)):
                    async for text in owner:
                        await self._websocket.send_text(str(text))
                code = owner.close_code
        except (OSError, InvalidHandshake, ConnectionClosed):
            code = None
        if code is None or code == CloseCode.ABNORMAL_CLOSURE:
            raise RefusedError(ErrorCode.INTERNAL, "the worker that had this session is gone; start again")
        return code

    async def _forward_input(self, owner: ClientConnection) -> None:
        try:
            while True:
                event = await self._websocket.receive()
                frame = event.get("bytes")
                await owner.send(_text_of(event) if frame is None else frame)
        finally:
            await owner.close()

    async def _exchange(self, session: Session, attachment: Attachment) -> int:
        """Read and write concurrently until either ends or the session is ended; return the close code."""
        writing, reading = self._write(session, attachment), self._read(session, attachment)
        async with running(writing, reading, attachment.ended.wait()) as tasks:
            done: set[asyncio.Task[Any]] = set()
            while not done:
                seconds = self._time_left(session)
                done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        writer, reader, _ = tasks
        if writer in done:
            return writer.result()
        if reader in done:
            reader.result()
        raise RefusedError(ErrorCode.TAKEN_OVER, TAKEN_OVER)

    def _time_left(self, session: Session) -> float:
        """Return the seconds until the session or idle timeout; raise RefusedError if one has expired."""
        limits, now = self._service.limits, asyncio.get_running_loop().time()
        if now >= session.ends_at:
            longest = f"{limits.session_seconds:g} seconds"
            raise RefusedError(ErrorCode.TOO_LONG, f"sessions are limited to {longest}; start another")
        if session.is_busy:
            self._last_message = now
        if now >= self._last_message + limits.idle_seconds:
            raise RefusedError(ErrorCode.IDLE, f"no message for {limits.idle_seconds:g} seconds")
        return min(session.ends_at, self._last_message + limits.idle_seconds) - now

    async def _read(self, session: Session, attachment: Attachment) -> None:
        while True:
            message = await self._receive(session)
            if isinstance(message, Start | Resume):
                raise RefusedError(
                    ErrorCode.OUT_OF_ORDER, "this connection already has a session; open another connection"
                )
            await session.receive(message, attachment)

    async def _write(self, session: Session, attachment: Attachment) -> int:
        """Send the output of the session up to its last message; return the close code."""
        while True:
            await session.outbox.wait_for_message()
            if attachment.ended.is_set():  # the other connection gets the rest
                raise RefusedError(ErrorCode.TAKEN_OVER, TAKEN_OVER)
            message = session.outbox.take()
            if isinstance(message, Error):
                raise message.as_exception()
            if message is not None:
                await self._websocket.send_text(write(message))
            if isinstance(message, Done):
                return CloseCode.NORMAL_CLOSURE

    async def _receive(self, session: Session | None = None) -> ClientMessage | Audio:
        event = await self._websocket.receive()
        self._last_message = asyncio.get_running_loop().time()
        max_bytes = self._service.limits.message_bytes
        if session is not None and session.speech is not None and event.get("bytes") is not None:
            return Audio.parse(event["bytes"], max_bytes)
        text = _text_of(event)
        if len(text) > max_bytes // 4 and len(text.encode()) > max_bytes:  # a character has at most 4 bytes
            raise RefusedError(ErrorCode.TOO_BIG, f"messages are limited to {max_bytes} bytes; send the text in parts")
        return parse_client(text)


class ViewerConnection(Connection):
    """Serves a viewer of a room, or another worker that copies it for its own viewers."""

    async def _serve(self) -> int:
        if not re.match(ROOM_NAME, self._websocket.path_params["name"]):
            raise RefusedError(ErrorCode.BAD_MESSAGE, "a room name must be 1 to 40 characters from a-z, 0-9 and -")
        if self._is_worker:
            return await self._exchange()
        if self._service.settings.room_keys:
            await self._receive_key()
        counters = self._service.counters
        check_limit(counters.total(Counted.VIEWERS), self._service.limits.viewers, "viewers")
        counters.add(Counted.VIEWERS, self._address)
        self._service.metrics.viewers.inc()
        try:
            return await self._exchange()
        finally:
            counters.add(Counted.VIEWERS, self._address, -1)
            self._service.metrics.viewers.dec()

    async def _receive_key(self) -> None:
        try:
            async with asyncio.timeout(self._service.limits.opening_seconds):
                message = parse_viewer(await _receive_text(self._websocket))
        except TimeoutError:
            raise RefusedError(ErrorCode.UNAUTHORIZED, "expected a watch message with an API key") from None
        await self._authenticate(message.api_key)

    async def _exchange(self) -> int:
        """Send the messages of the room until the viewer disconnects or does not keep up."""
        async with running(self._write(), _receive_text(self._websocket)) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RefusedError(ErrorCode.OUT_OF_ORDER, "viewers must not send messages")

    async def _write(self) -> None:
        async for text in self._service.rooms.watch(self._websocket.path_params["name"]):
            await self._websocket.send_text(text)


async def publish(websocket: WebSocket, service: Service) -> None:
    """Let another worker publish to a room whose home is this worker."""
    if not _is_worker(websocket, service):
        await websocket.close()
        return
    await websocket.accept()
    with suppress(WebSocketDisconnect):
        speech = parse_room(await _receive_text(websocket))
        assert isinstance(speech, Room)
        try:
            publisher = service.rooms.open_here(speech)
        except RefusedError as refusal:
            await websocket.send_text(write(Error(refusal.code, str(refusal))))
            await websocket.close()
            return
        assert publisher.log.speech is not None
        await websocket.send_text(write(publisher.log.speech))
        try:
            while not isinstance(message := parse_room(await _receive_text(websocket)), Closed | Waiting):
                if isinstance(message, Commit | Sentence | Retract):
                    publisher.put(message)
        finally:
            # If the speaker's worker was lost, leave time to open the room again.
            asyncio.get_running_loop().call_later(service.limits.grace_seconds, publisher.close)
        publisher.close(is_complete=isinstance(message, Closed))
        await websocket.close()


def _is_worker(websocket: WebSocket, service: Service) -> bool:
    """Return whether the peer is another worker of this server: only they use the Unix sockets."""
    return websocket.client is None and service.peers.directory is not None


async def _receive_text(websocket: WebSocket) -> str:
    """Receive a text message; raise WebSocketDisconnect at the end of the connection."""
    return _text_of(await websocket.receive())


def _text_of(event: Message) -> str:
    if event["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(event["code"])
    text = event.get("text")
    if text is None:
        raise RefusedError(
            ErrorCode.BAD_MESSAGE, 'expected a text frame, got a binary one; audio needs input "audio" in start'
        )
    return str(text)


def _ready(session: Session) -> Ready:
    room = session.room.log.name if session.room is not None else None
    captions = f"/captions/{room}" if room is not None else None
    samples = session.speech.received if session.speech is not None else None
    return Ready(session.name, session.model.name, session.delay, session.received, room, captions, samples)
