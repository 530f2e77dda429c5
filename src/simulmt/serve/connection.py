"""WebSocket /v1/stream: one connection, from its first message to its close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.websockets import WebSocket, WebSocketDisconnect

from simulmt.serve.access import ApiKeys, Pages
from simulmt.serve.limits import Limits
from simulmt.serve.metrics import Metrics
from simulmt.serve.models import Model
from simulmt.serve.protocol import (
    ClientMessage,
    Done,
    Error,
    ErrorCode,
    Opening,
    Ready,
    RefusedError,
    Remedy,
    Resume,
    ServerMessage,
    Start,
    parse_client,
    write,
)
from simulmt.serve.sessions import Session, Sessions, Tenure

logger = logging.getLogger("simulmt.serve")

DONE = 1000  # the close code of a stream that came to its end
TAKEN_OVER = "another connection has resumed this session"
PARTING_SECONDS = 1.0  # for a last message to a client that may no longer read


@dataclass(frozen=True)
class Service:
    """All that the endpoints of one application share."""

    models: Mapping[str, Model]
    limits: Limits
    metrics: Metrics
    sessions: Sessions
    keys: ApiKeys
    pages: Pages


class Connection:
    """One client on the line; `run` returns when it is closed."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket = websocket
        self._service = service

    async def run(self) -> None:
        await self._websocket.accept()
        with suppress(WebSocketDisconnect):
            try:
                code = await self._serve()
            except RefusedError as refusal:
                code = refusal.code.failure.close_code
                await self._part(refusal)
            with suppress(TimeoutError):
                async with asyncio.timeout(PARTING_SECONDS):
                    await self._websocket.close(code)

    async def _serve(self) -> int:
        """Speak with the client until its stream is over; the code to close with."""
        session = await self._open()
        tenure = self._service.sessions.connect(session)
        is_resumable = True
        try:
            await self._send(Ready(session.name, session.model.name, session.delay, session.received))
            return await self._converse(session, tenure)
        except RefusedError as refusal:
            is_resumable = refusal.code.failure.remedy is Remedy.RESUME
            raise
        except WebSocketDisconnect:
            self._service.metrics.lost.labels(session.model.name).inc()
            raise
        finally:
            self._service.sessions.disconnect(session, tenure, is_resumable)

    async def _open(self) -> Session:
        """The session that the first message asks for; a client that asks for an unknown one may try again, once."""
        try:
            return self._session_for(await self._receive_opening())
        except RefusedError as refusal:
            if refusal.code is not ErrorCode.UNKNOWN_SESSION:
                raise
            await self._report(refusal)
        return self._session_for(await self._receive_opening())

    async def _receive_opening(self) -> Opening:
        message = await self._receive(self._service.limits.opening_seconds)
        if not isinstance(message, Start | Resume):
            raise RefusedError(ErrorCode.OUT_OF_ORDER, "the first message must be start or resume")
        if not self._service.keys.admit(message.api_key, self._websocket.headers):
            raise RefusedError(ErrorCode.UNAUTHORIZED, "this server asks for an API key, and this is none of its keys")
        return message

    def _session_for(self, message: Opening) -> Session:
        if isinstance(message, Resume):
            return self._service.sessions.find(message.session, message.seq)
        if message.model not in self._service.models:
            names = ", ".join(self._service.models)
            raise RefusedError(ErrorCode.UNKNOWN_MODEL, f"no model {message.model!r} here; there are {names}")
        client = self._websocket.client
        address = client.host if client else ""
        return self._service.sessions.open(self._service.models[message.model], message.delay, address)

    async def _converse(self, session: Session, tenure: Tenure) -> int:
        """Read and write at the same time, until one of them comes to an end or something else ends the session."""
        writer = asyncio.create_task(self._write(session, tenure))
        reader = asyncio.create_task(self._read(session, tenure))
        successor = asyncio.create_task(tenure.ended.wait())
        tasks = (writer, reader, successor)
        try:
            seconds = session.ends_at - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if writer in done:
            return writer.result()
        if reader in done:
            reader.result()
        if successor in done:
            raise RefusedError(ErrorCode.TAKEN_OVER, TAKEN_OVER)
        raise RefusedError(ErrorCode.TOO_LONG, f"a session may last {self._service.limits.session_seconds:g} seconds")

    async def _read(self, session: Session, tenure: Tenure) -> None:
        while True:
            message = await self._receive(self._service.limits.idle_seconds, session)
            if isinstance(message, Start | Resume):
                raise RefusedError(ErrorCode.OUT_OF_ORDER, "this connection already has its session")
            await session.accept(message, tenure)

    async def _write(self, session: Session, tenure: Tenure) -> int:
        """Send what the session writes, to its last message; the code to close with."""
        while True:
            await session.outbox.news()
            if tenure.ended.is_set():  # what comes now is for the other connection
                raise RefusedError(ErrorCode.TAKEN_OVER, TAKEN_OVER)
            message = session.outbox.take()
            if isinstance(message, Error):
                raise RefusedError(ErrorCode(message.code), message.message)
            if message is not None:
                await self._send(message)
            if isinstance(message, Done):
                return DONE

    async def _receive(self, seconds: float, session: Session | None = None) -> ClientMessage:
        """The next message; a client may keep silent for so many seconds, and as long as its session is busy."""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    event = await self._websocket.receive()
                break
            except TimeoutError:
                if session is None or not session.is_busy:
                    raise RefusedError(ErrorCode.IDLE, f"no message for {seconds:g} seconds") from None
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event["code"])
        text = event.get("text")
        if text is None:
            raise RefusedError(ErrorCode.BAD_MESSAGE, "expected text, got a binary frame")
        if len(text.encode()) > self._service.limits.message_bytes:
            most = self._service.limits.message_bytes
            raise RefusedError(ErrorCode.TOO_BIG, f"a message may have {most} bytes; send the text in smaller parts")
        return parse_client(text)

    async def _send(self, message: ServerMessage) -> None:
        try:
            async with asyncio.timeout(self._service.limits.sending_seconds):
                await self._websocket.send_text(write(message))
        except TimeoutError:
            raise RefusedError(ErrorCode.SLOW_READER, "what was sent is not being read") from None

    async def _report(self, refusal: RefusedError) -> None:
        self._service.metrics.errors.labels(refusal.code).inc()
        await self._send(Error(refusal.code, str(refusal)))

    async def _part(self, refusal: RefusedError) -> None:
        logger.info("stream closed: %s", refusal.code)
        with suppress(TimeoutError, RefusedError):  # whichever limit is reached first
            async with asyncio.timeout(PARTING_SECONDS):
                await self._report(refusal)
