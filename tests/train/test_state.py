from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from simulmt.errors import CheckpointError
from simulmt.train.checkpoint import Checkpoint, CheckpointFolder
from simulmt.train.settings import TrainingConfig
from simulmt.train.state import RunProgress, RunState

from .helpers import same, snapshot


def network(width: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))


def state_of(model: nn.Module, ema_decay: float = 0.0) -> RunState:
    return RunState.start(model, TrainingConfig(ema_decay=ema_decay))


def take_steps(state: RunState, first: int, last: int, ema_decay: float = 0.0) -> None:
    """Steps whose gradients depend on their number only."""
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(number)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.step(learning_rate=0.01 / number, ema_decay=ema_decay)
        state.progress.update = number


def through_disk(state: RunState, folder: Path) -> Checkpoint:
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(7, state.tensors(), state.metadata())
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


def test_averaged_weights_are_lent_and_taken_back() -> None:
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


def test_averaged_weights_are_taken_back_after_a_failure() -> None:
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
