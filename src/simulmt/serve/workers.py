"""Several worker processes behind one port.

Every worker is a whole server with its own listening socket on the same port (SO_REUSEPORT), so the kernel distributes
the connections. The supervisor only starts workers and replaces those that die. Workers share counters in a file, add
up their metrics, and reach each other over Unix sockets, see `peers.py`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from prometheus_client import multiprocess

from simulmt.errors import SimulmtError
from simulmt.serve.app import Settings, create_app
from simulmt.serve.metrics import METRICS_DIRECTORY
from simulmt.serve.peers import Counters, Peers
from simulmt.serve.server import listen, log_address, server_for, set_up_logging

logger = logging.getLogger("simulmt.serve")

EARLY_EXIT_SECONDS = 5.0  # if a worker exits earlier than this after its start, wait before restarting it
READY, STOP = "ready", "stop"


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
        with suppress(BrokenPipeError):
            self._control.send(STOP)


class Supervisor:
    """Starts workers, replaces those that die, and stops them all on SIGTERM or Ctrl-C."""

    def __init__(self, settings: Settings, listeners: list[socket.socket], directory: Path) -> None:
        self._settings = settings
        self._listeners = listeners
        self._directory = directory
        self._signals = 0
        self._workers: list[Worker] = []

    def start(self) -> None:
        """Start all workers and wait until they serve."""
        self._workers = [self._start_worker(number) for number in range(len(self._listeners))]
        reports = [worker.await_ready() for worker in self._workers]
        failures = [report for report in reports if report != READY]
        if failures and not self._signals:
            self._kill_all()
            raise SimulmtError(failures[0])

    def run(self) -> None:
        """Watch the workers until they have been stopped."""
        while self._workers:
            wait([worker.process.sentinel for worker in self._workers])
            for worker in [each for each in self._workers if not each.process.is_alive()]:
                self._workers.remove(worker)
                if not self._signals:
                    self._replace(worker)

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Stop all workers; kill them on the second call."""
        self._signals += 1
        if self._signals > 1:
            self._kill_all()
        for worker in self._workers:
            worker.stop()

    def _start_worker(self, number: int) -> Worker:
        peers = Peers(number, len(self._listeners), self._directory)
        Counters(peers).reset()
        return Worker(self._settings, peers, self._listeners[number])

    def _replace(self, worker: Worker) -> None:
        logger.warning("worker %d died with code %s; starting another", worker.number, worker.process.exitcode)
        multiprocess.mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        if time.monotonic() - worker.started < EARLY_EXIT_SECONDS:
            time.sleep(1.0)
        if not self._signals:
            self._workers.append(self._start_worker(worker.number))

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.process.kill()


def run_workers(settings: Settings, port: int, workers: int) -> None:
    """Serve with several workers until a signal ends them."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(each) for each in listen(settings.host, port, settings.limits, workers)]
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="simulmt-"))
        stack.enter_context(_environment(METRICS_DIRECTORY, name))
        supervisor = Supervisor(settings, listeners, Path(name))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, supervisor.stop)
        supervisor.start()
        log_address(listeners[0], settings.host, [Path(model).name for model in settings.models], settings.keys)
        supervisor.run()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _work(settings: Settings, peers: Peers, listener: socket.socket, control: Connection) -> None:
    """Run a worker; the target of its process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # often sent to all processes; the supervisor stops the workers
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    try:
        server = server_for(create_app(settings, peers), handles_signals=False)
    except SimulmtError as error:
        control.send(str(error))
        return
    path = peers.socket_path(peers.worker)
    with suppress(FileNotFoundError):
        path.unlink()
    inner = socket.socket(socket.AF_UNIX)
    inner.bind(str(path))
    server.when_started(lambda: _connect_supervisor(control, server.stop))
    server.run(sockets=[listener, inner])


def _connect_supervisor(control: Connection, stop: Callable[[], None]) -> None:
    """Report to the supervisor that this worker is ready; stop on its request, exit at once if it dies."""

    def listen() -> None:
        try:
            control.recv()
        except (EOFError, ConnectionError):
            os._exit(1)
        loop.remove_reader(control.fileno())
        stop()

    loop = asyncio.get_running_loop()
    loop.add_reader(control.fileno(), listen)
    with suppress(BrokenPipeError):
        control.send(READY)
