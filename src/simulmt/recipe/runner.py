"""Doing what a recipe says: stages as processes, several at a time, each after those that it needs.

The processes are forked from one that has imported PyTorch already, which saves each of them seconds. A stage that is
killed leaves no record, and one whose runner is killed does not outlive it.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from simulmt.recipe.plan import Places, Stage
from simulmt.recipe.state import LOG, Basis, Standing, begin, finish, is_done

GRACE = 60.0  # seconds that a stage has to stop when it is told to
GLANCE = 0.5  # seconds between two looks at what is running


@dataclass(frozen=True)
class Program:
    """All that the runner knows of the commands."""

    run: Callable[[list[str]], int]  # a command line to its exit code; it can be sent to another process
    modules: tuple[str, ...] = ()  # to be imported once for all stages
    go_on: tuple[str, ...] = ()  # commands that go on where a killed call was; others start afresh
    scratch: str = ""  # what a stage needs only while it lasts, in its directory; nothing if empty
    aside: tuple[str, ...] = ()  # what it leaves there beside its result


@dataclass(frozen=True)
class Running:
    """A stage that is under way."""

    standing: Standing
    process: ForkServerProcess
    log: Path
    begun: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.standing.stage.name

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def last_line(self) -> str:
        """The newest line of its log."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


class View(Protocol):
    """Shows how it goes."""

    def started(self, stage: Running) -> None: ...

    def running(self, stages: Sequence[Running]) -> None: ...

    def done(self, stage: Running) -> None: ...

    def failed(self, stage: Running, code: int) -> None: ...

    def left_out(self, stage: Stage, needed: str) -> None: ...

    def close(self) -> None: ...


def run_stages(standings: Sequence[Standing], places: Places, jobs: int, program: Program, view: View) -> bool:
    """Do these stages, given in an order that puts each after what it needs; whether all went well.

    After a failure, what does not need the failed stage goes on.
    """
    waiting, lost = list(standings), set[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(program.modules))
    with _running() as running:
        while waiting or running:
            open_names = {standing.stage.name for standing in waiting} | {stage.name for stage in running}
            for standing in _ready(waiting, open_names)[: jobs - len(running)]:
                waiting.remove(standing)
                running.append(_start(standing, places, program, context.Process))
                view.started(running[-1])
            view.running(running)
            wait([stage.process.sentinel for stage in running], GLANCE)
            for stage in [stage for stage in running if not stage.process.is_alive()]:
                running.remove(stage)
                view.running(running)
                if stage.process.exitcode == 0:
                    view.done(stage)
                    continue
                view.failed(stage, stage.process.exitcode or 1)
                lost.add(stage.name)
                for standing in _needing(waiting, lost):
                    waiting.remove(standing)
                    view.left_out(standing.stage, stage.name)
    return not lost


def _ready(waiting: Sequence[Standing], open_names: Collection[str]) -> list[Standing]:
    return [standing for standing in waiting if not set(standing.stage.needs) & set(open_names)]


def _needing(waiting: Sequence[Standing], lost: set[str]) -> list[Standing]:
    """The stages that need a lost one, directly or not; they are lost as well."""
    found = []
    for standing in waiting:
        if lost & set(standing.stage.needs):
            lost.add(standing.stage.name)
            found.append(standing)
    return found


@contextmanager
def _running() -> Iterator[list[Running]]:
    """The list of what is running; whatever ends the block ends all that is still in it."""
    running: list[Running] = []
    try:
        yield running
    finally:
        for stage in running:
            _signal(stage.process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for stage in running:
            stage.process.join(max(0.0, deadline - time.monotonic()))
            _signal(stage.process, signal.SIGKILL)
            stage.process.join()


def _signal(process: ForkServerProcess, number: int) -> None:
    if process.is_alive() and process.pid:
        with suppress(ProcessLookupError):
            # It leads a group of its own, with all that it has started; in its first moments it does not yet.
            (os.killpg if os.getpgid(process.pid) == process.pid else os.kill)(process.pid, number)


def _start(standing: Standing, places: Places, program: Program, process: type[ForkServerProcess]) -> Running:
    directory = places.directory(standing.stage.name)
    words = places.command_line(standing.stage)
    started = process(target=_perform, args=(directory, standing.basis, words, program), name=standing.stage.name)
    started.start()
    return Running(standing, started, directory / LOG)


def _perform(directory: Path, basis: Basis, words: list[str], program: Program) -> None:
    """What the process of a stage does: run the command, and leave the record if it went well."""
    os.setsid()  # Ctrl-C on the terminal is for the runner, which passes it on
    threading.Thread(target=_die_with_runner, daemon=True).start()
    locks = directory.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / directory.name).open("w") as lock:
        os.set_inheritable(lock.fileno(), True)  # so that a command can hand it to what may outlive it
        fcntl.flock(lock, fcntl.LOCK_EX)  # a killed runner's process may still be dying, another runner be at it
        if is_done(directory, basis):
            _tidy(directory, program)
            return
        begin(directory, basis, words[0] in program.go_on)
        _redirect(directory / LOG)
        print(f"$ simulmt {shlex.join(words)}", flush=True)
        begun = time.monotonic()
        if code := program.run(words):
            sys.exit(code)
        used = os.times()
        cpu = used.user + used.system + used.children_user + used.children_system
        now = datetime.now(UTC).isoformat(timespec="seconds")
        finish(directory, basis, time.monotonic() - begun, cpu, now, {program.scratch, *program.aside})
        _tidy(directory, program)


def _tidy(directory: Path, program: Program) -> None:
    """Throw away what a stage needed while it lasted, once its record is there: killed before, it still needs that."""
    if program.scratch:
        shutil.rmtree(directory / program.scratch, ignore_errors=True)


def _redirect(log: Path) -> None:
    """All that the process or anything it starts prints goes to the log; there is nothing to read."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _die_with_runner() -> None:
    """End the group once the runner is gone: first by asking, since a launcher has processes in groups of their own."""
    runner = multiprocessing.parent_process()
    assert runner is not None
    runner.join()
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)
