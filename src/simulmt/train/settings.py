"""Configuration of a training run: one frozen dataclass, read from one TOML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simulmt.config import build, override, read_toml, require
from simulmt.model.asn import ASNConfig
from simulmt.model.risk import RiskConfig
from simulmt.train.systems import System


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the optimiser and the training loop; the defaults are the paper's."""

    batch_tokens: int = 8192  # source tokens in one forward pass on one device
    update_tokens: int = 32_768  # source tokens in one update, over all devices, by accumulation
    learning_rate: float = 5e-4
    warmup_updates: int = 4000
    cooldown: float = 0.0  # last share of max_updates, over which the learning rate decays to zero
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 1e-4
    clip_norm: float = 10.0
    smoothing: float = 0.1
    max_updates: int = 300_000
    validate_every: int = 500
    patience: int = 25_000  # updates without a better validation score before stopping
    keep_best: int = 5  # checkpoints kept by score, and averaged at the end
    ema_decay: float = 0.0  # above 0: keep an exponential moving average of the weights; lower in the first updates
    max_skipped: int = 20  # consecutive updates skipped for an infinite or exploding loss before training fails
    seed: int = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "yes", "no"] = "auto"
    max_minutes: float = 0.0  # above 0: time limit; the next call resumes with a new one

    def __post_init__(self) -> None:
        for name in (
            "batch_tokens",
            "update_tokens",
            "max_updates",
            "validate_every",
            "patience",
            "keep_best",
            "max_skipped",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_updates", "weight_decay", "seed", "max_minutes"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas must be in 0..1, got {self.betas}")
        require(0 <= self.cooldown <= 1, f"cooldown must be in 0..1, got {self.cooldown}")
        require(0 <= self.smoothing < 1, f"smoothing must be in 0..1, got {self.smoothing}")
        require(0 <= self.ema_decay < 1, f"ema_decay must be in 0..1, got {self.ema_decay}")
        require(self.clip_norm > 0, f"clip_norm must be above 0, got {self.clip_norm}")
        require(
            self.batch_tokens <= self.update_tokens,
            f"batch_tokens ({self.batch_tokens}) must not exceed update_tokens ({self.update_tokens})",
        )


@dataclass(frozen=True)
class RunConfig:
    """One training run: a system, its data and how to train it."""

    system: System
    data: Path  # data directory, written by `simulmt prepare`
    init: Path | None = None  # finished run, or bundle by path or name, to initialise from
    delays: tuple[int, ...] = (1,)  # k; if there are several, each batch draws one
    model: dict[str, Any] = field(default_factory=dict)
    asn: ASNConfig = field(default_factory=ASNConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    risk: RiskConfig = field(default_factory=RiskConfig)
    # "bigrams" (for CTC, model/bigrams.py) and "risk" (for the transducer, model/risk.py) fine-tune a trained model on
    # the path taken at inference.
    objective: Literal["likelihood", "bigrams", "risk"] = "likelihood"

    def __post_init__(self) -> None:
        system = {"bigrams": "ctc", "risk": "transducer"}.get(self.objective)
        if system is not None:
            require(self.system == system, f'objective "{self.objective}" is for system "{system}", got {self.system}')
            require(self.init is not None, f'objective "{self.objective}" needs init: a trained {system} model')

    @staticmethod
    def read(path: Path, assignments: Iterable[str] = ()) -> RunConfig:
        """Read a TOML file and apply `section.key=value` overrides."""
        return build(RunConfig, override(read_toml(path), assignments), str(path))
