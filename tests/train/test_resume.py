"""A run that is killed at any time and resumed ends bit for bit as if nothing had happened.

Weights, optimiser moments, progress, the final model and even the list of files are compared. The processes that are
killed are real ones.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from simulmt.errors import CheckpointError
from simulmt.train.loop import Outcome
from simulmt.train.monitor import UpdateReport
from simulmt.train.run import CheckpointFolder, RunProgress, record_run
from simulmt.train.systems import RunConfig, load_model

from .helpers import ALONE, Recorder, fork, outcome_of, run, tiny


class Slow(Recorder):
    """A monitor that slows down updates, so that signals arrive during a run."""

    def update(self, report: UpdateReport, totals: RunProgress) -> None:
        super().update(report, totals)
        time.sleep(0.01)


def train_slowly(config: RunConfig, directory: Path) -> None:
    """Train in a child process, and write the outcome."""
    torch.set_num_threads(1)
    outcome = run(config, directory, Slow())
    (directory / "outcome.json").write_text(json.dumps([outcome.status, outcome.update, outcome.signal]))


def train_with_slow_disk(config: RunConfig, directory: Path) -> None:
    """Train with slow writes of checkpoints."""
    sync, save = os.fsync, safetensors.torch.save_file

    def slow_sync(file: int) -> None:
        sync(file)
        time.sleep(0.02)

    def slow_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save(tensors, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        time.sleep(0.04)
        path.write_bytes(content)

    os.fsync, safetensors.torch.save_file = slow_sync, slow_save  # type: ignore[assignment]
    train_slowly(config, directory)


def train_until_every_operation(config: RunConfig, directory: Path, update: int) -> None:
    """Train in directories 1, 2, ... and die at the first, second, ... file operation after an update."""
    torch.set_num_threads(1)
    run(config, directory / "0")  # initialise PyTorch before forking, once for all children
    status, operation = -1, 0
    while status:
        operation += 1
        child = os.fork()
        if not child:
            train_until_operation(config, directory / str(operation), update, operation)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (directory / str(operation) / "exitcode").write_text(str(status))


def train_until_operation(config: RunConfig, directory: Path, update: int, operation: int) -> None:
    recorder = Recorder()
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        touches = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir")
        if touches and str(directory) in str(arguments[0]) and len(recorder.reports) >= update:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(config, directory, recorder)


def wait_for_checkpoint(child: BaseProcess, directory: Path, update: int) -> None:
    """Wait until there is a checkpoint of at least this update, or the child has ended."""
    checkpoints = CheckpointFolder(directory / "checkpoints")
    while child.is_alive() and (update and max(checkpoints.updates(), default=0) < update):
        time.sleep(0.002)


def left_behind(directory: Path) -> dict[str, bytes]:
    return {
        name: content for name, content in outcome_of(directory).items() if name not in ("outcome.json", "exitcode")
    }


@pytest.fixture(scope="module")
def config(data: Path) -> RunConfig:
    """Use everything that has state: dropout, Gumbel noise, several delays, a moving average, unaligned sentences."""
    return tiny(data, "ctc+asn", delays=(1, 3), ema_decay=0.5, max_updates=18, validate_every=3)


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("undisturbed")
    run(config, directory)
    return left_behind(directory)


def test_a_run_is_a_function_of_its_configuration(
    config: RunConfig, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    torch.manual_seed(99)  # what happened before in the process does not matter
    run(config, tmp_path)
    assert left_behind(tmp_path) == undisturbed


@pytest.mark.parametrize("training", [train_slowly, train_with_slow_disk])
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(
    training: Callable[..., None], seed: int, config: RunConfig, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dice = random.Random(seed)
    kills = 0
    for first in sorted(dice.choices((0, 3, 6, 9, 12), k=3)):
        child = fork(training, config, tmp_path)
        wait_for_checkpoint(child, tmp_path, first)
        time.sleep(dice.uniform(0, 0.15))
        child.kill()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
    assert kills
    assert run(config, tmp_path).status == "finished"
    assert left_behind(tmp_path) == undisturbed


def test_killed_at_every_file_operation(data: Path, tmp_path: Path) -> None:
    """From the third checkpoint on: written, synced, renamed; the first is pruned, the final model written."""
    config = tiny(data, max_updates=3, validate_every=1, keep_best=1, update_tokens=256)
    run(config, tmp_path / "undisturbed")
    expected = left_behind(tmp_path / "undisturbed")
    child = fork(train_until_every_operation, config, tmp_path, 3)
    child.join()
    *killed, ended = [tmp_path / str(number) for number in range(1, len(list(tmp_path.glob("*/exitcode"))) + 1)]
    assert (ended / "exitcode").read_text() == "0"
    assert len(killed) > 15
    stages = {frozenset(path.name for path in (directory / "checkpoints").iterdir()) for directory in killed}
    assert len(stages) >= 4  # before, while and after the third checkpoint was written, and pruned
    for directory in killed:
        assert (directory / "exitcode").read_text() == str(-signal.SIGKILL)
        if (directory / "final").exists():
            load_model(directory)  # it is complete
        recorder = Recorder()
        run(config, directory, recorder)
        assert recorder.warnings == []
        found = left_behind(directory)
        assert {name: found.get(name) for name in expected} == expected, f"killed at operation {directory.name}"
        # Checkpoints that were not pruned because of a kill may remain.
        assert all("update-000000001" in name for name in found.keys() - expected.keys())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_checkpoints_and_stops(
    number: signal.Signals, config: RunConfig, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    child = fork(train_slowly, config, tmp_path)
    wait_for_checkpoint(child, tmp_path, 3)
    os.kill(child.pid or 0, number)
    child.join()
    assert child.exitcode == 0
    status, update, received = json.loads((tmp_path / "outcome.json").read_text())
    assert (status, received) == ("stopped", number)
    assert update < 18
    assert not (tmp_path / "final").exists()
    recorder = Recorder()
    assert run(config, tmp_path, recorder).status == "finished"
    assert recorder.started_at == update  # not one update is lost
    assert left_behind(tmp_path) == undisturbed


def test_a_run_interrupted_after_every_update_gives_the_same_files(
    config: RunConfig, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:

    class Interrupting(Recorder):
        def update(self, *arguments: Any) -> None:
            super().update(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)

    outcomes: list[Outcome] = []
    while not outcomes or outcomes[-1].status == "stopped":
        outcomes.append(run(config, tmp_path, Interrupting()))
    # The signal comes after the loop has looked for one, so each call makes two updates.
    assert [outcome.update for outcome in outcomes] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 18]
    found = left_behind(tmp_path)
    # Update 16, where the run was stopped, is among the last that are kept.
    names = [name for name in undisturbed if "update-000000015" not in name]
    assert {name: found.get(name) for name in names} == {name: undisturbed[name] for name in names}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_finished_run_without_its_checkpoints_is_not_restarted(config: RunConfig, tmp_path: Path) -> None:
    short = replace(config, training=replace(config.training, max_updates=2, validate_every=1))
    run(short, tmp_path)
    before = load_model(tmp_path)[0].state_dict()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="a finished run without its checkpoints; choose another run directory"):
        run(config, tmp_path)
    after = load_model(tmp_path)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"config": {}}'])
def test_a_damaged_record_is_named_with_its_remedy(content: bytes, config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json: damaged; remove it"):
        record_run(config, tmp_path, ALONE, warn=lambda _: None)


def test_the_record_of_another_system_is_kept(config: RunConfig, tmp_path: Path) -> None:
    record_run(config, tmp_path, ALONE, warn=lambda _: None)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"run\.json: a .* run; choose another run directory for teacher"):
        record_run(replace(config, system="teacher"), tmp_path, ALONE, warn=lambda _: None)
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_different_number_of_threads_is_reported(config: RunConfig, tmp_path: Path) -> None:
    warnings: list[str] = []
    threads = torch.get_num_threads()
    record_run(config, tmp_path, ALONE, warnings.append)
    record_run(config, tmp_path, ALONE, warnings.append)
    assert warnings == []
    try:
        torch.set_num_threads(threads + 1)
        record_run(config, tmp_path, ALONE, warnings.append)
    finally:
        torch.set_num_threads(threads)
    (warning,) = warnings
    assert f"OMP_NUM_THREADS={threads}" in warning
