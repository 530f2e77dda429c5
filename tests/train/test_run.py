from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from simulmt.errors import CheckpointError
from simulmt.train.run import STATE, TENSORS, Checkpoint, CheckpointFolder, RunProgress, RunState
from simulmt.train.systems import TrainingConfig

from .helpers import same, snapshot


def network(width: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))


def state_of(model: nn.Module, ema_decay: float = 0.0) -> RunState:
    return RunState.start(model, TrainingConfig(ema_decay=ema_decay))


def take_steps(state: RunState, first: int, last: int, ema_decay: float = 0.0) -> None:
    """Take steps with gradients that depend only on their number."""
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(number)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.step(learning_rate=0.01 / number, ema_decay=ema_decay)
        state.progress.update = number


def through_disk(state: RunState, folder: Path) -> Checkpoint:
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(7, state.tensors(), {"progress": asdict(state.progress)})
    return checkpoints.load(7)


def test_the_best_updates_are_those_of_the_highest_scores_later_ones_first_among_equals() -> None:
    progress = RunProgress(scores={"5": 1.0, "9": 3.0, "10": 3.0, "15": 2.0})
    assert progress.best(1) == [10]
    assert progress.best(3) == [10, 9, 15]
    assert progress.best(9) == [10, 9, 15, 5]
    assert RunProgress().best(2) == []


def test_the_average_loss_begins_with_the_first_and_follows_slowly() -> None:
    progress = RunProgress()
    assert math.isinf(progress.average_loss)
    progress.record_step(4.0)
    assert progress.average_loss == 4.0
    progress.record_step(2.0)
    assert progress.average_loss == pytest.approx(3.98)


def test_skipped_steps_are_counted_in_all_and_in_a_row() -> None:
    progress = RunProgress()
    progress.record_skipped_step()
    progress.record_skipped_step()
    progress.record_step(1.0)
    progress.record_skipped_step()
    assert (progress.skipped_in_a_row, progress.skipped_updates) == (1, 3)


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_a_restored_state_goes_on_bit_for_bit(tmp_path: Path, ema_decay: float) -> None:
    whole = state_of(network(), ema_decay)
    take_steps(whole, 1, 6, ema_decay)

    begun = state_of(network(), ema_decay)
    take_steps(begun, 1, 3, ema_decay)
    begun.progress = RunProgress(3, 6, {"3": 0.1 + 0.2}, 1 / 3, 1, 2, 4)
    resumed = state_of(network(seed=5), ema_decay)
    resumed.restore(through_disk(begun, tmp_path))
    assert resumed.progress == begun.progress
    assert same(resumed.tensors(), begun.tensors())
    take_steps(resumed, 4, 6, ema_decay)
    assert same(resumed.tensors(), whole.tensors())


def test_a_state_before_the_first_step_can_be_stored(tmp_path: Path) -> None:
    begun = state_of(network())
    resumed = state_of(network(seed=5))
    resumed.restore(through_disk(begun, tmp_path))
    take_steps(begun, 1, 2)
    take_steps(resumed, 1, 2)
    assert same(resumed.tensors(), begun.tensors())


def test_the_moments_are_among_the_tensors() -> None:
    state = state_of(network())
    take_steps(state, 1, 2)
    tensors = state.tensors()
    for name, _ in state.model.named_parameters():
        assert {f"moments.{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")} <= tensors.keys()
    assert tensors["moments.0.weight.step"] == 2


@pytest.mark.parametrize(
    ("model", "ema_decay", "found"),
    [
        (network(width=6), 0.0, ""),
        (nn.Sequential(*network(), nn.Linear(2, 2)), 0.0, ""),
        (nn.Sequential(*list(network())[:1]), 0.0, ""),
        (network(), 0.5, "average.0.weight"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(
    tmp_path: Path, model: nn.Module, ema_decay: float, found: str
) -> None:
    checkpoint = through_disk(state_of(network()), tmp_path)
    with pytest.raises(CheckpointError, match=f"update 7 does not fit this configuration.*{found}"):
        state_of(model, ema_decay).restore(checkpoint)


def test_the_moving_average_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    state = state_of(model, ema_decay=0.3)
    expected = model.weight.item()
    for number, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 0.3, 0.3], start=1):
        take_steps(state, number, number, ema_decay=0.3)
        expected = decay * expected + (1 - decay) * model.weight.item()
        assert state.moving_average["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_averaged_weights_are_swapped_in_and_out() -> None:
    model = network()
    state = state_of(model, ema_decay=0.9)
    assert state.validated_prefix == "average."
    take_steps(state, 1, 3, ema_decay=0.9)
    own = snapshot(model)
    parameters = list(model.parameters())
    with state.averaged_weights():
        assert same(snapshot(model), state.moving_average)
        assert not same(snapshot(model), own)
    assert same(snapshot(model), own)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


def test_averaged_weights_are_swapped_out_after_a_failure() -> None:
    model = network()
    state = state_of(model, ema_decay=0.9)
    take_steps(state, 1, 3, ema_decay=0.9)
    own = snapshot(model)
    with pytest.raises(KeyboardInterrupt), state.averaged_weights():
        raise KeyboardInterrupt
    assert same(snapshot(model), own)


def test_without_a_moving_average_the_model_validates_itself() -> None:
    state = state_of(network())
    own = snapshot(state.model)
    with state.averaged_weights():
        assert same(snapshot(state.model), own)
    assert (state.validated_prefix, state.moving_average) == ("model.", {})


def tensors_of(update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    return {
        "model.weight": torch.randn(5, 7, generator=generator),
        "model.bias": torch.randn(3, generator=generator),
        "moments.weight.step": torch.tensor(float(update)),
    }


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Write three intact checkpoints."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for update in (10, 20, 30):
        folder.save(update, tensors_of(update), {"score": update / 3})
    return folder


def latest(folder: CheckpointFolder) -> tuple[int | None, list[str]]:
    """Return the update of the newest intact checkpoint, and the warnings."""
    warnings: list[str] = []
    checkpoint = folder.load_latest(warnings.append)
    return (None if checkpoint is None else checkpoint.update), warnings


def flip_a_bit(path: Path, where: float = 0.7) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("oops")


def test_a_checkpoint_loads_unchanged(folder: CheckpointFolder) -> None:
    checkpoint = folder.load(20)
    assert checkpoint.update == 20
    assert same(checkpoint.tensors, tensors_of(20))
    assert checkpoint.state["score"] == 20 / 3
    assert checkpoint.tensors["moments.weight.step"].shape == ()


def test_the_newest_is_loaded_without_a_warning(folder: CheckpointFolder) -> None:
    assert latest(folder) == (30, [])


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert latest(CheckpointFolder(tmp_path / "nowhere")) == (None, [])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "tensors truncated": lambda path: truncate(path / TENSORS),
    "tensors empty": lambda path: (path / TENSORS).write_bytes(b""),
    "bit flipped in the tensors' header": lambda path: flip_a_bit(path / TENSORS, 0.1),
    "bit flipped in the tensors": lambda path: flip_a_bit(path / TENSORS, 0.95),
    "tensors missing": lambda path: (path / TENSORS).unlink(),
    "state truncated": lambda path: truncate(path / STATE),
    "state empty": lambda path: (path / STATE).write_bytes(b""),
    "state missing": lambda path: (path / STATE).unlink(),
    "state of another kind": lambda path: (path / STATE).write_text("[1, 2]\n"),
    "state not text": lambda path: (path / STATE).write_bytes(b"\xff\xfe\x00"),
    "state without checksum": lambda path: (path / STATE).write_text('{"update": 30}\n'),
    "a number of the state changed": lambda path: (path / STATE).write_text(
        (path / STATE).read_text(encoding="utf-8").replace('"score": 10.0', '"score": 18.0')
    ),
    "empty directory": empty,
    "a file in place of the directory": replace_by_a_file,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    folder: CheckpointFolder, damage: Callable[[Path], Any]
) -> None:
    damage(folder.path(30))
    update, warnings = latest(folder)
    assert update == 20
    assert len(warnings) == 1
    assert str(folder.path(30)) in warnings[0]
    assert "damaged" in warnings[0]


def test_a_run_writes_a_damaged_update_again(folder: CheckpointFolder) -> None:
    truncate(folder.path(30) / TENSORS)
    folder.save(30, tensors_of(30), {})
    assert latest(folder) == (30, [])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), name=st.sampled_from([TENSORS, STATE]), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_loaded(folder: CheckpointFolder, where: float, name: str, bit: int) -> None:
    path = folder.path(30) / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[int(where * len(content))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        checkpoint = folder.load(30)
    except CheckpointError:
        pass
    else:  # white space between the entries of the state
        assert (checkpoint.state["score"], checkpoint.state["update"]) == (10.0, 30)
        assert same(checkpoint.tensors, tensors_of(30))
    finally:
        path.write_bytes(content)


def test_two_damaged_checkpoints_are_both_reported(folder: CheckpointFolder) -> None:
    truncate(folder.path(30) / TENSORS)
    (folder.path(20) / STATE).unlink()
    update, warnings = latest(folder)
    assert update == 10
    assert [str(folder.path(n)) in warning for n, warning in zip((30, 20), warnings, strict=True)] == [True, True]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(folder: CheckpointFolder) -> None:
    for update in folder.updates():
        truncate(folder.path(update) / TENSORS)
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        latest(folder)


def test_other_things_in_the_folder_are_left_alone(folder: CheckpointFolder) -> None:
    for name in ("update-000000030.bak", "update-best", "notes"):
        (folder.folder / name).mkdir()
    assert folder.updates() == [10, 20, 30]
    folder.prune(set())
    assert (folder.folder / "update-000000030.bak").exists()


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half_written(_tensors: Any, path: Path) -> None:
    path.write_bytes(b"half")
    raise safetensors.SafetensorError("Error while serializing: No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "failure"),
    [
        (safetensors.torch, "save_file", no_space),
        (safetensors.torch, "save_file", half_written),
        (Path, "write_text", no_space),
        (os, "fsync", no_space),
        (Path, "rename", no_space),
    ],
)
def test_a_full_disk_is_an_error_that_leaves_the_last_good_checkpoint(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, failure: Callable[..., None]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failure)
        with pytest.raises(CheckpointError, match=r"update 40.*No space.*last good checkpoint is update 30"):
            folder.save(40, tensors_of(40), {})
    assert sorted(path.name for path in folder.folder.iterdir()) == [folder.path(n).name for n in (10, 20, 30)]
    assert same(folder.load(30).tensors, tensors_of(30))
    folder.save(40, tensors_of(40), {})  # once there is space again
    assert latest(folder) == (40, [])


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in place of the directory")
    with pytest.raises(CheckpointError, match=r"run/checkpoints: cannot write.*there is no earlier checkpoint"):
        CheckpointFolder(tmp_path / "run" / "checkpoints").save(1, tensors_of(1), {})


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeds: list[str] = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(file: int) -> None:
        deeds.append(Path(f"/proc/self/fd/{file}").readlink().name)
        sync(file)

    def watched_rename(path: Path, target: Path) -> Path:
        deeds.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    CheckpointFolder(tmp_path).save(1, tensors_of(1), {})
    named = deeds.index("rename to update-000000001")
    assert {TENSORS, STATE} <= set(deeds[:named])
    assert deeds[named + 1 :] == [tmp_path.name]


def test_partial_files_of_a_killed_run_are_removed(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", kill)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process does not clean up
        with pytest.raises(Killed):
            folder.save(40, tensors_of(40), {})
    assert len(list(folder.folder.iterdir())) == 4
    assert latest(folder) == (30, [])
    folder.save(40, tensors_of(40), {})
    assert sorted(path.name for path in folder.folder.iterdir()) == [folder.path(n).name for n in (10, 20, 30, 40)]


def test_writing_an_update_again_replaces_it(folder: CheckpointFolder) -> None:
    folder.save(30, tensors_of(99), {})
    assert same(folder.load(30).tensors, tensors_of(99))


def test_pruning_keeps_the_last_and_the_needed(folder: CheckpointFolder) -> None:
    for update in (40, 50):
        folder.save(update, tensors_of(update), {})
    folder.prune({20})
    assert folder.updates() == [20, 40, 50]
    folder.prune({50})
    assert folder.updates() == [40, 50]


def test_the_average_is_the_mean_of_what_the_prefix_names(folder: CheckpointFolder) -> None:
    mean = folder.average([10, 20, 30], "model.")
    assert mean.keys() == {"weight", "bias"}
    expected = torch.stack([tensors_of(update)["model.weight"].double() for update in (10, 20, 30)]).mean(0)
    torch.testing.assert_close(mean["weight"].double(), expected, rtol=1e-6, atol=1e-7)
    assert same(
        folder.average([20], "model."),
        {"weight": tensors_of(20)["model.weight"], "bias": tensors_of(20)["model.bias"]},
    )


def test_a_checkpoint_is_safetensors_and_json(folder: CheckpointFolder) -> None:
    files = {path.name for path in folder.path(10).iterdir()}
    assert files == {TENSORS, STATE}
    assert json.loads((folder.path(10) / STATE).read_text(encoding="utf-8"))["update"] == 10


def test_without_a_validation_there_is_no_best(folder: CheckpointFolder) -> None:
    with pytest.raises(CheckpointError, match=r"no update has been validated yet; raise training\.max_updates"):
        folder.intact([], warn=lambda _: None)
