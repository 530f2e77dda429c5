"""The server process, with graceful shutdown: on SIGTERM or Ctrl-C it drains open streams before it exits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from simulmt.errors import ConfigError
from simulmt.serve.access import ApiKeys, Limits, is_loopback
from simulmt.serve.transport import ConnectionLimiter, HttpProtocol, WebSocketProtocol
from simulmt.serve.websocket import Service

logger = logging.getLogger("simulmt.serve")

GRACEFUL_SHUTDOWN_SECONDS = 2  # for connections still open after draining
KEEP_ALIVE_SECONDS = 15  # idle time between two requests of a connection
BACKLOG = 256  # connections that are accepted at once
BIND_SECONDS = 1.0
OTHER_FILES = 64  # open files that are not connections
LOG_INTERVAL = 10.0  # seconds between two log lines with the same text
REMEMBERED_LINES = 1_000
PROXIES = "FORWARDED_ALLOW_IPS"  # uvicorn's environment variable of trusted proxies


class DrainingServer(uvicorn.Server):
    """Exits once all streams have ended or the drain timeout has expired; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, handles_signals: bool = True) -> None:
        super().__init__(config)
        self._service = service
        self._handles_signals = handles_signals
        self._drain: asyncio.Task[None] | None = None
        self._when_started: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn, do not raise the signal again after a clean exit."""
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()  # only it receives signals
        if not (self._handles_signals and is_main):
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def when_started(self, callback: Callable[[], None]) -> None:
        """Set a callback for when the server accepts connections."""
        self._when_started = callback

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_started()

    def stop(self) -> None:
        """Start to shut down; if already shutting down, exit at once. Thread-safe, also in signal handlers."""
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


class RepeatFilter(logging.Filter):
    """Drops log lines that repeat within `LOG_INTERVAL` seconds, so that no client can fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = record.getMessage(), self._clock()
        if now - self._logged.get(text, -LOG_INTERVAL) < LOG_INTERVAL:
            self._dropped[text] = self._dropped.get(text, 0) + 1
            return False
        if len(self._logged) >= REMEMBERED_LINES:
            self._logged.clear()
        self._logged[text] = now
        if dropped := self._dropped.pop(text, 0):
            record.msg, record.args = f"{text} (and {dropped} more)", ()
        return True


def set_up_logging() -> None:
    """Log to standard error, one line per event."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def run(app: Starlette, host: str, port: int) -> None:
    """Serve an application until a signal ends it."""
    service: Service = app.state.service
    listeners = listen(host, port, service.limits)
    log_address(listeners[0], host, service.models, service.authenticator.keys)
    server_for(app).run(sockets=listeners)


def log_address(listener: socket.socket, host: str, models: Iterable[str], keys: ApiKeys) -> None:
    """Log the address of the server, and warn if it is open to everyone."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    logger.info("serving %s at http://%s:%d", ", ".join(models), shown, port)
    if keys.are_optional and not is_loopback(host):
        logger.warning("anyone who can reach %s can use this server: set keys with --api-keys-file", shown)


def server_for(app: Starlette, handles_signals: bool = True) -> DrainingServer:
    """Create a server for an application, to be run with listening sockets."""
    service: Service = app.state.service
    limits = service.limits
    most = allowed_connections(limits.connections)
    proxies = [address.strip() for address in os.environ.get(PROXIES, "").split(",")]
    limiter = ConnectionLimiter(limits, service.counters, service.metrics, most, proxies)
    config = uvicorn.Config(
        app,
        http=partial(HttpProtocol, limiter=limiter, limits=limits),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, limiter=limiter, limits=limits),  # type: ignore[arg-type]
        ws_max_size=2 * limits.message_bytes,
        ws_ping_interval=limits.ping_seconds,
        ws_ping_timeout=limits.ping_seconds,
        ws_per_message_deflate=False,  # costs memory, and gains nothing for short messages
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        log_level="error",  # a warning for every stray request would fill the log
        server_header=False,
    )
    return DrainingServer(config, service, handles_signals)


def allowed_connections(wanted: int) -> int:
    """Raise the limit on open files as far as needed and possible; return how many connections fit."""
    try:
        import resource
    except ImportError:  # not on Unix
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + BACKLOG + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return max(1, min(wanted, raised - BACKLOG - OTHER_FILES))


def listen(host: str, port: int, limits: Limits, count: int = 1) -> list[socket.socket]:
    """Open listening sockets on one port, among which the kernel balances connections; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listeners = [_bind(family, address[0], int(address[1]))]
        if count > 1:
            port = listeners[0].getsockname()[1]  # it is free
            listeners.pop().close()
            listeners = [
                socket.create_server((address[0], port), family=family, backlog=BACKLOG, reuse_port=True)
                for _ in range(count)
            ]
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}") from None
    for listener in listeners:  # accepted connections inherit these options
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # ends a connection whose peer acknowledges nothing
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.sending_seconds))
    return listeners


def _bind(family: int, address: str | int, port: int) -> socket.socket:
    """Open a listening socket; retry while workers of a killed server still hold the port."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
