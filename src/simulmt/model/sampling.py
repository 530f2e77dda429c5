"""Ancestral sampling: Gumbel noise on the logits turns greedy search into sampling from the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from simulmt.config import require
from simulmt.model.output import at_least_float32
from simulmt.text import END, SPECIAL_SYMBOLS

MASKED = 1e4  # subtracted from masked logits; finite, so that a sentence at its length limit can still end


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings; `top_k` restricts sampling to the k most likely tokens; 0 for all."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        require(self.top_k >= 0, f"top_k must not be negative, got {self.top_k}")


class Sampler:
    """Perturb logits so that their argmax is a sample from their softmax (the Gumbel-max trick)."""

    def __init__(self, config: SamplingConfig, generator: torch.Generator) -> None:
        self.config = config
        self.generator = generator

    def __call__(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        logits = at_least_float32(logits) / self.config.temperature
        if self.config.top_k:
            logits = self._top_k(logits)
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        return logits - noise.log_()

    def _top_k(self, logits: Tensor) -> Tensor:
        writable = logits.clone()
        writable[:, [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]] = -torch.inf
        least = writable.topk(min(self.config.top_k, logits.shape[1]), dim=-1).values[:, -1:]
        return logits - MASKED * (writable < least)
