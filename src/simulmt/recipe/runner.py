"""Run the stages of a recipe in parallel processes, in order of their dependencies.

Processes are forked from a server that has imported PyTorch, which saves seconds per stage. A killed stage leaves no
record, and stages do not outlive the runner.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from simulmt.files import lock
from simulmt.recipe.plan import Stage, Workspace
from simulmt.recipe.state import LOG, Inputs, StageStatus, begin, finish, is_done

GRACE_SECONDS = 60.0  # between SIGTERM and SIGKILL
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Program:
    """How to run command lines, and which files they leave."""

    run: Callable[[list[str], int], int]  # run a command line in n processes and return its exit code; picklable
    modules: tuple[str, ...] = ()  # imported once for all stages
    resumable: tuple[str, ...] = ()  # commands that resume unfinished work; others start over
    scratch: str = ""  # subdirectory to delete once a stage is finished
    ignored: tuple[str, ...] = ()  # files and directories that are not part of the result


@dataclass(frozen=True)
class RunningStage:
    """A stage and its process."""

    status: StageStatus
    process: ForkServerProcess
    log: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.status.stage.name

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def last_line(self) -> str:
        """Return the last line of the stage's log."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


class ProgressView(Protocol):
    """Displays the progress of a run."""

    def started(self, stage: RunningStage) -> None: ...

    def running(self, stages: Sequence[RunningStage]) -> None: ...

    def done(self, stage: RunningStage) -> None: ...

    def failed(self, stage: RunningStage, code: int) -> None: ...

    def skipped(self, stage: Stage, needed: str) -> None: ...

    def close(self) -> None: ...


def run_stages(
    statuses: Sequence[StageStatus], workspace: Workspace, jobs: int, program: Program, view: ProgressView
) -> bool:
    """Run stages, given in topological order; return whether all succeeded.

    After a failure, stages that do not depend on the failed one still run.
    """
    waiting, failed = list(statuses), set[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(program.modules))
    with _running() as running:
        while waiting or running:
            open_names = {status.stage.name for status in waiting} | {stage.name for stage in running}
            ready = [status for status in waiting if not open_names.intersection(status.stage.needs)]
            for status in ready[: jobs - len(running)]:
                waiting.remove(status)
                running.append(_start(status, workspace, program, context.Process))
                view.started(running[-1])
            view.running(running)
            wait([stage.process.sentinel for stage in running], POLL_SECONDS)
            for stage in [stage for stage in running if not stage.process.is_alive()]:
                running.remove(stage)
                view.running(running)
                if stage.process.exitcode == 0:
                    view.done(stage)
                    continue
                view.failed(stage, stage.process.exitcode or 1)
                failed.add(stage.name)
                for status in _dependents(waiting, failed):
                    waiting.remove(status)
                    view.skipped(status.stage, stage.name)
    return not failed


def _dependents(waiting: Sequence[StageStatus], failed: set[str]) -> list[StageStatus]:
    """Return the waiting stages that depend on a failed one, directly or not, and add them to `failed`."""
    found = []
    for status in waiting:
        if failed & set(status.stage.needs):
            failed.add(status.stage.name)
            found.append(status)
    return found


@contextmanager
def _running() -> Iterator[list[RunningStage]]:
    """Yield a list of running stages; stop all that are left in it on exit."""
    running: list[RunningStage] = []
    try:
        yield running
    finally:
        for stage in running:
            _signal(stage.process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for stage in running:
            stage.process.join(max(0.0, deadline - time.monotonic()))
            _signal(stage.process, signal.SIGKILL)
            stage.process.join()


def _signal(process: ForkServerProcess, number: int) -> None:
    if process.is_alive() and process.pid:
        with suppress(ProcessLookupError):
            # Signal the process group; right after the fork, the process does not lead one yet.
            (os.killpg if os.getpgid(process.pid) == process.pid else os.kill)(process.pid, number)


def _start(
    status: StageStatus, workspace: Workspace, program: Program, process: type[ForkServerProcess]
) -> RunningStage:
    stage, directory = status.stage, workspace.directory(status.stage.name)
    arguments = (directory, status.inputs, workspace.command_line(stage), program, stage.processes)
    started = process(target=_run_stage, args=arguments, name=stage.name)
    started.start()
    return RunningStage(status, started, directory / LOG)


def _run_stage(directory: Path, inputs: Inputs, words: list[str], program: Program, processes: int) -> None:
    """Run the command of a stage in its own process, and write the record if it succeeds."""
    os.setsid()  # Ctrl-C reaches only the runner, which forwards it
    threading.Thread(target=_exit_with_runner, daemon=True).start()
    locks = directory.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / directory.name).open("w") as file:
        os.set_inheritable(file.fileno(), True)  # for children that may outlive the command
        lock(file)  # another runner, or the remains of a killed one, may hold it
        if is_done(directory, inputs):
            _remove_scratch(directory, program)
            return
        begin(directory, inputs, words[0] in program.resumable)
        _redirect(directory / LOG)
        print(f"$ simulmt {shlex.join(words)}", flush=True)
        started = time.monotonic()
        if code := program.run(words, processes):
            sys.exit(code)
        used = os.times()
        cpu = used.user + used.system + used.children_user + used.children_system
        now = datetime.now(UTC).isoformat(timespec="seconds")
        finish(directory, inputs, time.monotonic() - started, cpu, now, {program.scratch, *program.ignored})
        _remove_scratch(directory, program)


def _remove_scratch(directory: Path, program: Program) -> None:
    """Delete the scratch directory; only after the record is written, since a resumed stage needs it."""
    if program.scratch:
        shutil.rmtree(directory / program.scratch, ignore_errors=True)


def _redirect(log: Path) -> None:
    """Redirect output of this process and its children to the log, and input from /dev/null."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _exit_with_runner() -> None:
    """Terminate the process group when the runner exits; SIGTERM first, so that torchrun can stop its workers."""
    runner = multiprocessing.parent_process()
    assert runner is not None
    runner.join()
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
