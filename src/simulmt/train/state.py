"""State of a training run, and its conversion to and from checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from simulmt.errors import CheckpointError
from simulmt.train.checkpoint import Checkpoint
from simulmt.train.settings import TrainingConfig


@dataclass
class RunProgress:
    """Counters of a run."""

    update: int = 0
    batches: int = 0  # batches taken so far, over all processes
    scores: dict[str, float] = field(default_factory=dict)  # validation score by update
    average_loss: float = math.inf  # running average of the loss per token; infinite before the first
    skipped_in_a_row: int = 0
    skipped_updates: int = 0
    skipped_sentences: int = 0

    def best(self, count: int) -> list[int]:
        """Return the updates with the highest scores, best first, later ones first among equals."""
        ranked = sorted(self.scores, key=lambda update: (self.scores[update], int(update)), reverse=True)
        return [int(update) for update in ranked[:count]]

    def record_step(self, loss: float) -> None:
        self.skipped_in_a_row = 0
        self.average_loss = loss if math.isinf(self.average_loss) else 0.99 * self.average_loss + 0.01 * loss

    def record_skipped_step(self) -> None:
        self.skipped_in_a_row += 1
        self.skipped_updates += 1


@dataclass
class RunState:
    """Weights, optimiser, moving average of the weights (possibly empty) and progress."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    moving_average: dict[str, Tensor]
    progress: RunProgress

    @staticmethod
    def start(model: nn.Module, settings: TrainingConfig) -> RunState:
        """Return the initial state."""
        optimizer = torch.optim.AdamW(
            model.parameters(),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=next(model.parameters()).is_cuda,
        )
        copies = {name: p.detach().clone() for name, p in model.named_parameters()} if settings.ema_decay > 0 else {}
        return RunState(model, optimizer, copies, RunProgress())

    @property
    def validated_prefix(self) -> str:
        """Return the prefix of the validated weights in a checkpoint."""
        return "average." if self.moving_average else "model."

    def step(self, learning_rate: float, ema_decay: float) -> None:
        """Apply the gradients and update the moving average."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        if self.moving_average:
            parameters = [parameter.detach() for parameter in self.model.parameters()]
            # In a short run, a constant decay would average in much of the initial weights: 0.999**1400 is a quarter.
            decay = min(ema_decay, (1 + self.progress.update) / (10 + self.progress.update))
            torch._foreach_lerp_(list(self.moving_average.values()), parameters, 1.0 - decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Use the moving average as the model's weights inside the context."""
        if not self.moving_average:
            yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict(self.moving_average)
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.moving_average.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"moments.{name}.{key}"] = value
        return tensors

    def metadata(self) -> dict[str, Any]:
        """Return the other contents of a checkpoint."""
        return {"progress": asdict(self.progress)}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint."""
        try:
            self.model.load_state_dict(_strip_prefix("model.", checkpoint.tensors))
            for name, tensor in self.moving_average.items():
                tensor.copy_(checkpoint.tensors[f"average.{name}"])
            self._restore_moments(checkpoint.tensors)
            self.progress = RunProgress(**checkpoint.state["progress"])
        except (RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of update {checkpoint.update} does not fit this configuration "
                f"({str(error).splitlines()[0]}); use the one the run was started with, or another run directory"
            ) from None

    def _restore_moments(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            moments = _strip_prefix(f"moments.{name}.", tensors)
            # Only a fused optimiser keeps its step counter on the device.
            counts_on_device = bool(self.optimizer.defaults["fused"])
            self.optimizer.state[parameter] = {
                key: value if key == "step" and not counts_on_device else value.to(parameter.device)
                for key, value in moments.items()
            }


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
