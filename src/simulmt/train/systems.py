"""Configure, build, save and load the systems that can be trained.

A run is configured by one frozen dataclass, `RunConfig`, read from one TOML file. A trained model is a directory with
`model.safetensors` and `model.json`: tensors and plain data, never pickle, so loading a model cannot run code. The
directory is written atomically, like a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import nn

from simulmt.config import as_table, build, override, read_toml, require
from simulmt.errors import CheckpointError, VocabularyError
from simulmt.files import atomic_directory
from simulmt.model.asn import ASNConfig, SortedCTCModel
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.risk import RiskConfig
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.text import Tokenizer

System = Literal["ctc", "ctc+asn", "transducer", "transducer+asn", "wait-k", "teacher"]
TrainableModel = CTCModel | SortedCTCModel | Seq2SeqModel
InferenceModel = CTCModel | Seq2SeqModel  # the part of a system used at inference
FINAL = "final"  # subdirectory of a run that holds the trained model
SCRATCH = ".checkpoint"  # fixed, so that leftovers of a killed run are found and removed


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
        counts = ("batch_tokens", "update_tokens", "max_updates", "validate_every", "patience", "keep_best")
        for name in (*counts, "max_skipped"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_updates", "weight_decay", "seed", "max_minutes"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas must be at least 0 and below 1, got {self.betas}")
        require(0 <= self.cooldown <= 1, f"cooldown must be in 0..1, got {self.cooldown}")
        for name in ("smoothing", "ema_decay"):
            require(0 <= getattr(self, name) < 1, f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        require(self.clip_norm > 0, f"clip_norm must be above 0, got {self.clip_norm}")
        require(
            self.batch_tokens <= self.update_tokens,
            f"batch_tokens ({self.batch_tokens}) must not exceed update_tokens ({self.update_tokens})",
        )


@dataclass(frozen=True)
class LowDelayConfig:
    """Pairs for low delays only, such as translations in the order of the source."""

    data: Path | None = None  # data directory with the same vocabularies
    share: float = 0.5  # of the batches at these delays
    max_delay: int = 3

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"low_delay.share must be above 0 and at most 1, got {self.share}")
        require(self.max_delay >= 1, f"low_delay.max_delay must be at least 1, got {self.max_delay}")


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
    # "bigrams" (for CTC) and "risk" (for the transducer and wait-k), both of model/risk.py, fine-tune a
    # trained model on the path taken at inference. "policy" trains the read/write policy of a wait-k model only.
    objective: Literal["likelihood", "bigrams", "risk", "policy"] = "likelihood"
    # Source tokens that wait-k reads per target token in training: one, as in the paper, or S/T if that is more; see
    # model/seq2seq.py.
    reading: Literal["steady", "proportional"] = "steady"
    low_delay: LowDelayConfig = field(default_factory=LowDelayConfig)

    def __post_init__(self) -> None:
        fitting = {"bigrams": ("ctc",), "risk": ("transducer", "wait-k"), "policy": ("wait-k",)}
        systems = fitting.get(self.objective)
        if systems is not None:
            named = " or ".join(f'"{system}"' for system in systems)
            require(self.system in systems, f'objective "{self.objective}" is for system {named}, got {self.system}')
            require(self.init is not None, f'objective "{self.objective}" needs init: a trained {self.system} model')
        if self.objective == "policy":
            require(self.model.get("policy_inner", 0) > 0, 'objective "policy" needs model.policy_inner, such as 256')
        if self.low_delay.data is not None:
            require(
                self.system != "teacher" and min(self.delays) <= self.low_delay.max_delay,
                f"low_delay.max_delay is {self.low_delay.max_delay}, but no delay is that low: {list(self.delays)}",
            )
        if self.reading != "steady":
            require(self.system == "wait-k", f'reading is for system "wait-k", got {self.system}')
        if self.risk.temperature != 1:
            require(self.system == "wait-k", f'risk.temperature is for system "wait-k", got {self.system}')

    @staticmethod
    def read(path: Path, assignments: Iterable[str] = ()) -> RunConfig:
        """Read a TOML file and apply `section.key=value` overrides."""
        return build(RunConfig, override(read_toml(path), assignments), str(path))


@dataclass(frozen=True)
class SystemConfig:
    """A system and its sizes; `model` holds the fields of CTCConfig or Seq2SeqConfig, except vocabularies."""

    system: System
    source_vocabulary: int
    target_vocabulary: int
    model: dict[str, Any] = field(default_factory=dict)
    asn: ASNConfig = field(default_factory=ASNConfig)
    delays: tuple[int, ...] = (1,)
    vocabulary_sha256: tuple[str, str] | None = None  # of source and target; None for models of older versions

    def __post_init__(self) -> None:
        require(len(self.delays) > 0, "delays must name at least one k")
        require(min(self.delays) >= 1, f"delay k must be at least 1, got {min(self.delays)}")

    def network(self) -> CTCConfig | Seq2SeqConfig:
        """Return the network configuration with vocabulary sizes; raise ConfigError on an unknown key in `model`."""
        sizes = {"source_vocabulary": self.source_vocabulary, "target_vocabulary": self.target_vocabulary}
        table = self.model | sizes
        if self.system in ("ctc", "ctc+asn"):
            return build(CTCConfig, table, "model")
        if self.system in ("transducer", "transducer+asn"):
            return build(TransducerConfig, table, "model")
        return build(Seq2SeqConfig, {**table, "causal": self.system == "wait-k"}, "model")


def build_model(config: SystemConfig) -> TrainableModel:
    """Build a freshly initialised network."""
    network = config.network()
    if isinstance(network, Seq2SeqConfig):
        return Seq2SeqModel.build(network)
    translator = (TransducerModel if isinstance(network, TransducerConfig) else CTCModel).build(network)
    return SortedCTCModel.build(translator, config.asn) if config.system.endswith("+asn") else translator


def translator_of(model: TrainableModel) -> InferenceModel:
    """Return the part that translates: for CTC+ASN, the model without its sorting network."""
    return model.translator if isinstance(model, SortedCTCModel) else model


def vocabulary_checksums(source: Tokenizer, target: Tokenizer) -> tuple[str, str]:
    """Return the SHA-256 of both vocabularies, as stored in SystemConfig."""
    return hashlib.sha256(source.model).hexdigest(), hashlib.sha256(target.model).hexdigest()


def check_vocabularies(model: Path, config: SystemConfig, data: Path, source: Tokenizer, target: Tokenizer) -> None:
    """Raise VocabularyError unless a model was trained with the vocabularies of a data directory."""
    found, expected = (source.size, target.size), (config.source_vocabulary, config.target_vocabulary)
    hint = "pass the data directory it was trained on"
    if found != expected:
        raise VocabularyError(
            f"{data}: vocabularies of {found} pieces, but {model} was trained with {expected}; {hint}"
        )
    if other := differing_side(vocabulary_checksums(source, target), config.vocabulary_sha256):
        raise VocabularyError(
            f"{data}: {other}.model is not the vocabulary that {model} was trained with, despite its size; {hint}"
        )


def differing_side(found: tuple[str, str] | None, expected: tuple[str, str] | None) -> str | None:
    """Return the side whose vocabularies differ, or None if there is none or checksums are unknown."""
    sides = zip(("source", "target"), found or (), expected or (), strict=False)
    return next((side for side, one, other in sides if one != other), None)


def save_model(
    model: nn.Module, config: SystemConfig, directory: Path, metadata: Mapping[str, Any], scratch: str = SCRATCH
) -> None:
    """Write a trained model, replacing `directory`; `metadata` (such as scores) is stored with its config.

    With an empty `scratch`, other models may be written to the same place at the same time.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    description = {"format": 1, "config": as_table(config), **metadata}
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    try:
        with atomic_directory(directory, scratch) as temporary:
            safetensors.torch.save_file(tensors, temporary / "model.safetensors")
            (temporary / "model.json").write_text(text, encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot write the model: {error}") from None


def has_model(path: Path) -> bool:
    """Return whether a directory is a trained model or a finished run."""
    return any((each / "model.json").exists() for each in (path, path / FINAL))


def find_model(path: Path) -> Path:
    """Return the directory of a trained model, given it or a finished run."""
    if not has_model(path):
        raise CheckpointError(f"{path}: no trained model found; a finished run has one in {FINAL}/")
    return path if (path / "model.json").exists() else path / FINAL


def load_model(path: Path) -> tuple[TrainableModel, SystemConfig]:
    """Read a trained model, in eval mode; `path` is a model or a finished run."""
    directory = find_model(path)
    try:
        description = json.loads((directory / "model.json").read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        config = build(SystemConfig, description["config"], str(directory / "model.json"))
        with torch.device("meta"):
            model = build_model(config)
        model.load_state_dict(tensors, assign=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory}: damaged model: {str(error).splitlines()[0]}") from None
    return model.eval(), config


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off during the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
