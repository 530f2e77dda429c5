"""The WebSocket endpoint for viewers, /v1/rooms/NAME, and the one by which workers publish to each other."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from simulmt.serve.connection import LAST_MESSAGE_SECONDS, Service, client_address, is_worker, receive_text
from simulmt.serve.flow import running
from simulmt.serve.peers import Counted
from simulmt.serve.protocol import (
    ROOM_NAME,
    Closed,
    Commit,
    Error,
    ErrorCode,
    RefusedError,
    Retract,
    Room,
    Sentence,
    parse_room,
    parse_viewer,
    write,
)
from simulmt.serve.rooms import Publisher


class Viewer:
    """Serves one viewer; `run` returns when the connection is closed."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket = websocket
        self._service = service
        self._name = str(websocket.path_params["name"])
        self._address = client_address(websocket)

    async def run(self) -> None:
        await self._websocket.accept()
        with suppress(WebSocketDisconnect):
            try:
                await self._serve()
            except RefusedError as refusal:
                self._service.metrics.errors.labels(refusal.code).inc()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                        await self._websocket.send_text(write(Error(refusal.code, str(refusal))))
                        await self._websocket.close(refusal.code.close_code)

    async def _serve(self) -> None:
        if not re.match(ROOM_NAME, self._name):
            raise RefusedError(ErrorCode.BAD_MESSAGE, "a room name has 1 to 40 characters a-z, 0-9 and -")
        if is_worker(self._websocket, self._service):
            await self._exchange()
            return
        if self._service.room_keys:
            await self._authenticate()
        counters = self._service.counters
        if counters.total(Counted.VIEWERS) >= self._service.limits.viewers:
            raise RefusedError(ErrorCode.TOO_MANY_STREAMS, f"too many viewers (limit {self._service.limits.viewers})")
        counters.add(Counted.VIEWERS, self._address)
        self._service.metrics.viewers.inc()
        try:
            await self._exchange()
        finally:
            counters.add(Counted.VIEWERS, self._address, -1)
            self._service.metrics.viewers.dec()

    async def _authenticate(self) -> None:
        try:
            async with asyncio.timeout(self._service.limits.opening_seconds):
                message = parse_viewer(await receive_text(self._websocket))
        except TimeoutError:
            raise RefusedError(ErrorCode.UNAUTHORIZED, "expected a watch message with an API key") from None
        if not await self._service.authenticator.admit(message.api_key, self._websocket.headers, self._address):
            raise RefusedError(ErrorCode.UNAUTHORIZED, "missing or invalid API key")

    async def _exchange(self) -> None:
        async with running(self._write(), self._read()) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _write(self) -> None:
        async for text in self._service.rooms.watch(self._name):
            await self._websocket.send_text(text)

    async def _read(self) -> None:
        await receive_text(self._websocket)
        raise RefusedError(ErrorCode.OUT_OF_ORDER, "viewers only read")


async def publish(websocket: WebSocket, service: Service) -> None:
    """Let another worker publish to a room whose home is this worker."""
    if not is_worker(websocket, service):
        await websocket.close()
        return
    await websocket.accept()
    with suppress(WebSocketDisconnect):
        speech = parse_room(await receive_text(websocket))
        assert isinstance(speech, Room)
        try:
            publisher = service.rooms.open_here(speech)
        except RefusedError as refusal:
            await websocket.send_text(write(Error(refusal.code, str(refusal))))
            await websocket.close()
            return
        await websocket.send_text(write(speech))
        try:
            await _copy(websocket, publisher)
        finally:
            # If the speaker's worker was lost, leave time to open the room again.
            asyncio.get_running_loop().call_later(service.limits.grace_seconds, publisher.close)
        publisher.close()
        await websocket.close()


async def _copy(websocket: WebSocket, publisher: Publisher) -> None:
    while not isinstance(message := parse_room(await receive_text(websocket)), Closed):
        if isinstance(message, Commit | Sentence | Retract):
            publisher.put(message)
