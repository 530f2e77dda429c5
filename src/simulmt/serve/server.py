"""Run a server: one process, or several workers behind one port.

On SIGTERM or Ctrl-C a server drains open streams before it exits.

Every worker is a whole server with its own listening socket on the same port (SO_REUSEPORT), so the kernel distributes
the connections. The supervisor only starts workers and replaces those that die. Workers share counters in a file, add
up their metrics, and reach each other over Unix sockets (`simulmt.serve.access.Peers`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import multiprocess
from starlette.applications import Starlette

from simulmt.errors import ConfigError, SimulmtError
from simulmt.serve.access import Counters, Limits, Peers, is_loopback
from simulmt.serve.app import Service, Settings, create_app
from simulmt.serve.models import METRICS_DIRECTORY
from simulmt.serve.transport import ConnectionLimiter, HttpProtocol, WebSocketProtocol

logger = logging.getLogger("simulmt.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACEFUL_SHUTDOWN_SECONDS = 2  # for connections still open after draining
KEEP_ALIVE_SECONDS = 15  # idle time between two requests of a connection
BACKLOG = 256  # pending connections per listening socket; asyncio accepts up to this many at a time
BIND_SECONDS = 1.0
OTHER_FILES = 64  # open files that are not connections
LOG_INTERVAL = 10.0  # seconds between two log lines with the same text
REMEMBERED_LINES = 1_000
EARLY_EXIT_SECONDS = 5.0  # if a worker exits earlier than this after its start, wait before restarting it
READY, STOP = "ready", "stop"  # messages between a worker and its supervisor
PROXIES = "FORWARDED_ALLOW_IPS"  # uvicorn's environment variable of trusted proxies


class DrainingServer(uvicorn.Server):
    """Exits once all streams have ended or the drain timeout has expired; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, handles_signals: bool = True) -> None:
        super().__init__(config)
        self._service = service
        self._handles_signals = handles_signals
        self._drain: asyncio.Task[None] | None = None
        self.on_startup: Callable[[], None] = lambda: None  # called when the server accepts connections

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn, do not raise the signal again after a clean exit."""
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()  # only it receives signals
        if not (self._handles_signals and is_main):
            yield
            return
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_startup()

    def stop(self) -> None:
        """Begin shutting down; exit at once if called again. Safe to call from threads and signal handlers."""
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


def run(settings: Settings, port: int, workers: int = 1) -> None:
    """Serve until stopped by a signal."""
    listeners = listen(settings.host, port, settings.limits, workers)
    if workers == 1:
        server = server_for(create_app(settings))
        log_address(listeners[0], settings)
        server.run(sockets=listeners)
        return
    with tempfile.TemporaryDirectory(prefix="simulmt-") as directory:
        os.environ[METRICS_DIRECTORY] = directory
        supervisor = Supervisor(settings, listeners, Path(directory))
        for number in SIGNALS:
            signal.signal(number, supervisor.stop)
        supervisor.start()
        log_address(listeners[0], settings)
        supervisor.run()


def log_address(listener: socket.socket, settings: Settings) -> None:
    """Log the address of the server, and warn if it is open to everyone."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    logger.info("serving %s at http://%s:%d", ", ".join(Path(model).name for model in settings.models), shown, port)
    if settings.keys.are_optional and not is_loopback(settings.host):
        logger.warning("anyone who can reach this address can use the server: set keys with --api-keys-file")


def server_for(app: Starlette, handles_signals: bool = True) -> DrainingServer:
    """Create a server for an application, to be run with listening sockets."""
    service: Service = app.state.service
    limits = service.limits
    max_connections = allowed_connections(limits.connections)
    proxies = [address.strip() for address in os.environ.get(PROXIES, "").split(",")]
    limiter = ConnectionLimiter(limits, service.counters, service.metrics, max_connections, proxies)
    config = uvicorn.Config(
        app,
        http=partial(HttpProtocol, limiter=limiter),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, limiter=limiter),  # type: ignore[arg-type]
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
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is already in use; choose another with --port") from None
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose others with --host and --port"
        ) from None
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


class Worker:
    """A worker process, seen from the supervisor."""

    def __init__(self, settings: Settings, peers: Peers, listener: socket.socket) -> None:
        context = multiprocessing.get_context("spawn")  # onnxruntime's threads do not survive a fork
        self.number = peers.worker
        self._control, control = context.Pipe()
        self.started = time.monotonic()
        self.process: SpawnProcess = context.Process(target=_work, args=(settings, peers, listener, control))
        self.process.start()
        control.close()

    def await_ready(self) -> str:
        """Return READY, or the reason why the worker cannot start."""
        try:
            return str(self._control.recv())
        except (EOFError, ConnectionError):
            return "a worker died while it was starting"

    def stop(self) -> None:
        """Let the worker drain its streams and exit."""
        with suppress(ConnectionError):
            self._control.send(STOP)


class Supervisor:
    """Starts workers, replaces those that die, and stops them all on SIGTERM or Ctrl-C."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], directory: Path) -> None:
        self._settings = settings
        self._listeners = listeners
        self._directory = directory
        self._signals = 0
        self._is_serving = False
        self._workers: list[Worker] = []

    def start(self) -> None:
        """Start all workers and wait until they serve."""
        for number in range(len(self._listeners)):
            self._start_worker(number)
        reports = [worker.await_ready() for worker in self._workers]
        failures = [report for report in reports if report != READY]
        if failures and not self._signals:
            self._kill_all()
            raise SimulmtError(failures[0])
        self._is_serving = True

    def run(self) -> None:
        """Replace workers that die, until all have been stopped."""
        while self._workers:
            wait([worker.process.sentinel for worker in self._workers])
            for worker in [each for each in self._workers if not each.process.is_alive()]:
                self._workers.remove(worker)
                if not self._signals:
                    self._replace(worker)

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Stop all workers; kill them on the second call, or if the server does not serve yet."""
        self._signals += 1
        if self._signals > 1 or not self._is_serving:
            self._kill_all()
            return
        for worker in self._workers:
            worker.stop()

    def _start_worker(self, number: int) -> None:
        """Start a worker, unless the server has been stopped."""
        if self._signals:
            return
        peers = Peers(number, len(self._listeners), self._directory)
        Counters(peers).reset()
        worker = Worker(self._settings, peers, self._listeners[number])
        self._workers.append(worker)
        if self._signals:  # `stop` may not have seen it
            worker.process.kill()

    def _replace(self, worker: Worker) -> None:
        logger.warning("worker %d died with code %s; starting another", worker.number, worker.process.exitcode)
        multiprocess.mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        if time.monotonic() - worker.started < EARLY_EXIT_SECONDS:
            time.sleep(1.0)
        self._start_worker(worker.number)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.process.kill()


def _work(settings: Settings, peers: Peers, listener: socket.socket, control: Connection) -> None:
    """Run a worker; the target of its process."""
    for number in SIGNALS:  # often sent to all processes; the supervisor stops the workers
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    try:
        server = server_for(create_app(settings, peers), handles_signals=False)
    except SimulmtError as error:
        control.send(str(error))
        return
    path = peers.socket_path(peers.worker)
    path.unlink(missing_ok=True)
    internal = socket.socket(socket.AF_UNIX)
    internal.bind(str(path))
    server.on_startup = lambda: _connect_supervisor(control, server.stop)
    server.run(sockets=[listener, internal])


def _connect_supervisor(control: Connection, stop: Callable[[], None]) -> None:
    """Report to the supervisor that this worker is ready; stop on its request, exit at once if it dies."""

    def receive_stop() -> None:
        try:
            control.recv()
        except (EOFError, ConnectionError):
            os._exit(1)
        loop.remove_reader(control.fileno())
        stop()

    loop = asyncio.get_running_loop()
    loop.add_reader(control.fileno(), receive_stop)
    with suppress(BrokenPipeError):
        control.send(READY)
