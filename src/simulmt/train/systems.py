"""The four systems that go through one training loop, and how a trained one is stored.

A trained model is a directory with `model.safetensors` and `model.json`: tensors and plain data, never pickle, so
loading a model cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from simulmt.config import as_table, build, require
from simulmt.errors import CheckpointError
from simulmt.model.asn import ASNConfig, SortedCTCModel
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.output import Loss
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel

System = Literal["ctc", "ctc+asn", "wait-k", "teacher"]
Translator = CTCModel | Seq2SeqModel  # what is left of a system when training is over


class TrainableModel(Protocol):
    """What the loop asks of a model: the summed loss of a batch."""

    def loss(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target: Tensor,
        target_lengths: Tensor,
        *,
        delay: Any,
        smoothing: float,
    ) -> Loss: ...


@dataclass(frozen=True)
class SystemConfig:
    """A system and its sizes; `model` holds what CTCConfig or Seq2SeqConfig take, vocabularies apart."""

    system: System
    source_vocabulary: int
    target_vocabulary: int
    model: dict[str, Any] = field(default_factory=dict)
    asn: ASNConfig = field(default_factory=ASNConfig)
    delays: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        require(len(self.delays) > 0, "delays must name at least one k")
        require(min(self.delays) >= 1, f"delay k must be at least 1, got {min(self.delays)}")

    def network(self) -> CTCConfig | Seq2SeqConfig:
        """The sizes with the vocabularies filled in; an unknown key in `model` is an error here."""
        table = {
            **self.model,
            "source_vocabulary": self.source_vocabulary,
            "target_vocabulary": self.target_vocabulary,
        }
        if self.system in ("ctc", "ctc+asn"):
            return build(CTCConfig, table, "model")
        return build(Seq2SeqConfig, {**table, "causal": self.system == "wait-k"}, "model")


def build_model(config: SystemConfig) -> nn.Module:
    """A freshly initialised network."""
    network = config.network()
    if isinstance(network, Seq2SeqConfig):
        return Seq2SeqModel.build(network)
    translator = CTCModel.build(network)
    return SortedCTCModel.build(translator, config.asn) if config.system == "ctc+asn" else translator


def translator_of(model: nn.Module) -> Translator:
    """The part that translates: for CTC+ASN that is the model without its sorting network."""
    return cast(Translator, model.translator if isinstance(model, SortedCTCModel) else model)


def initialise_from(model: nn.Module, directory: Path) -> None:
    """Start from another trained model: every weight the two share, and all the shared part must fit."""
    other, _ = load_model(directory)
    if type(model) is not type(other):
        model, other = translator_of(model), translator_of(other)
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise CheckpointError(f"{directory}: cannot initialise from a model of other sizes: {detail}") from None


def save_model(model: nn.Module, config: SystemConfig, directory: Path, facts: Mapping[str, Any]) -> None:
    """Write a trained model; `facts` (scores, data, commit) are stored beside its configuration."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    description = {"format": 1, "config": as_table(config), **facts}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, directory / "model.safetensors")
        (directory / "model.json").write_text(
            json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot write the model: {error}") from None


def load_model(directory: Path) -> tuple[nn.Module, SystemConfig]:
    """Read a trained model, in eval mode; `directory` is a model or a finished run."""
    if not (directory / "model.json").exists() and (directory / "final" / "model.json").exists():
        directory = directory / "final"
    try:
        description = json.loads((directory / "model.json").read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        config = build(SystemConfig, description["config"], str(directory / "model.json"))
        with torch.device("meta"):
            model = build_model(config)
        model.load_state_dict(tensors, assign=True)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no trained model here; a finished run has one in final/") from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory}: damaged model: {str(error).splitlines()[0]}") from None
    return model.eval(), config
