"""Ancestral sampling: noise on the logits turns a greedy search into a draw from the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from simulmt.config import require
from simulmt.model.output import at_least_float32
from simulmt.text import END, SPECIAL_SYMBOLS

BARRED = 1e4  # taken off a logit; finite, so that a sentence at its length limit can still end


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings; `top_k` restricts each draw to the k most likely pieces, 0 to none."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        require(self.top_k >= 0, f"top_k must not be negative, got {self.top_k}")


class Sampler:
    """Perturbs logits so that the largest is a draw from their softmax (the Gumbel-max trick)."""

    def __init__(self, config: SamplingConfig, generator: torch.Generator) -> None:
        self.config = config
        self.generator = generator

    def __call__(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        logits = at_least_float32(logits) / self.config.temperature
        if self.config.top_k:
            logits = self._among_the_best(logits)
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        return logits - noise.log_()

    def _among_the_best(self, logits: Tensor) -> Tensor:
        writable = logits.clone()
        writable[:, [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]] = -torch.inf
        least = writable.topk(min(self.config.top_k, logits.shape[1]), dim=-1).values[:, -1:]
        return logits - BARRED * (writable < least)
