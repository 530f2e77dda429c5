"""The server process: listens, and on SIGTERM or Ctrl-C lets open streams end well before it exits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from simulmt.errors import ConfigError
from simulmt.serve.connection import Service
from simulmt.serve.limits import Limits
from simulmt.serve.websocket import LingeringProtocol

logger = logging.getLogger("simulmt.serve")

LAST_SECONDS = 2  # for connections that are still open after all streams were told to go
BACKLOG = 512


class DrainingServer(uvicorn.Server):
    """Exits once every stream has come to a good end, or the time for that is up; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn, do not raise the signal again after a clean exit."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():  # which alone can be told of signals
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Begin to shut down, or end at once if that has begun; from any thread or signal handler."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._drain is not None:
            self.should_exit = self.force_exit = True
            return
        logger.info("shutting down")
        self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._service.sessions.drain()
        self.should_exit = True


def run(app: Starlette, host: str, port: int) -> None:
    """Serve an application until a signal ends it."""
    service: Service = app.state.service
    listener = listen(host, port, service.limits)
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    logger.info("serving %s at http://%s:%d", ", ".join(service.models), shown, port)
    server_for(app).run(sockets=[listener])


def server_for(app: Starlette) -> DrainingServer:
    """A server for an application, to be run with a listening socket."""
    service: Service = app.state.service
    limits = service.limits
    config = uvicorn.Config(
        app,
        ws=LingeringProtocol,
        ws_max_size=2 * limits.message_bytes,
        ws_ping_interval=limits.ping_seconds,
        ws_ping_timeout=limits.ping_seconds,
        ws_per_message_deflate=False,  # messages are short: it would cost memory and gain nothing
        timeout_graceful_shutdown=LAST_SECONDS,
        access_log=False,
        log_config=None,
        log_level="error",  # a warning for every stray request would fill the log
        server_header=False,
    )
    return DrainingServer(config, service)


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Accepted connections inherit it: one whose peer takes nothing any more ends, whatever waits to be sent.
        milliseconds = int(1000 * (limits.ping_seconds + limits.sending_seconds))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener
