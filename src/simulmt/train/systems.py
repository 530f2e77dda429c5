"""Build, save and load the systems that the training loop trains.

A trained model is a directory with `model.safetensors` and `model.json`: tensors and plain data, never pickle, so
loading a model cannot run code. The directory is written atomically, like a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from simulmt.config import as_table, build, require
from simulmt.errors import CheckpointError, VocabularyError
from simulmt.files import replacing_directory
from simulmt.model.asn import ASNConfig, SortedCTCModel
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.output import Loss
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.text import Tokenizer
from simulmt.train.checkpoint import SCRATCH

System = Literal["ctc", "ctc+asn", "transducer", "transducer+asn", "wait-k", "teacher"]
InferenceModel = CTCModel | Seq2SeqModel  # the part of a system used at inference
WORD_STARTS = "encoder.word_starts"  # tensor of models that see whole words


class TrainableModel(Protocol):
    """Protocol of trainable models: the summed loss of a batch."""

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
        table = {
            **self.model,
            "source_vocabulary": self.source_vocabulary,
            "target_vocabulary": self.target_vocabulary,
        }
        if self.system in ("ctc", "ctc+asn"):
            return build(CTCConfig, table, "model")
        if self.system in ("transducer", "transducer+asn"):
            return build(TransducerConfig, table, "model")
        return build(Seq2SeqConfig, {**table, "causal": self.system == "wait-k"}, "model")


def build_model(config: SystemConfig) -> nn.Module:
    """Build a freshly initialised network."""
    network = config.network()
    if isinstance(network, Seq2SeqConfig):
        return Seq2SeqModel.build(network)
    translator = (TransducerModel if isinstance(network, TransducerConfig) else CTCModel).build(network)
    return SortedCTCModel.build(translator, config.asn) if config.system.endswith("+asn") else translator


def mark_words(model: nn.Module, source: Tokenizer) -> None:
    """Set which source pieces begin a word, for models that see whole words."""
    translator_of(model).encoder.mark_words(source.word_starts)


def translator_of(model: nn.Module) -> InferenceModel:
    """Return the part that translates: for CTC+ASN, the model without its sorting network."""
    return cast(InferenceModel, model.translator if isinstance(model, SortedCTCModel) else model)


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
    if other := _other_side(vocabulary_checksums(source, target), config.vocabulary_sha256):
        raise VocabularyError(
            f"{data}: {other}.model is not the vocabulary that {model} was trained with, despite its size; {hint}"
        )


def _other_side(found: tuple[str, str] | None, expected: tuple[str, str] | None) -> str | None:
    """Return the side whose vocabularies differ, or None if there is none or checksums are unknown."""
    sides = zip(("source", "target"), found or (), expected or (), strict=False)
    return next((side for side, one, other in sides if one != other), None)


def initialise_from(model: nn.Module, path: Path, config: SystemConfig | None = None) -> None:
    """Copy the weights that two models share from a trained one; raise CheckpointError if they do not fit.

    `path` is a model, a finished run, a bundle or the name of a shipped one. Given the configuration of the new model,
    check that both have the same vocabularies and sizes.
    """
    other, other_config = _load_initial(path)
    if config:
        _check_fit(path, config, other_config)
    if type(model) is not type(other):
        model, other = translator_of(model), translator_of(other)
    elif config and config.system.endswith("+asn") and config.asn.norm != other_config.asn.norm:
        raise CheckpointError(
            f"{path}: its sorting network has asn.norm = '{other_config.asn.norm}', not '{config.asn.norm}', so "
            "its weights do not fit; set asn.norm, or start from a ctc model"
        )
    try:
        # Word starts are not weights: one model may see whole words and the other not.
        weights = {name: tensor for name, tensor in other.state_dict().items() if not name.endswith(WORD_STARTS)}
        own = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(WORD_STARTS)}
        model.load_state_dict(weights | own)
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise CheckpointError(f"{path}: cannot initialise from a model of different sizes: {detail}") from None


def _load_initial(path: Path) -> tuple[nn.Module, SystemConfig]:
    """Read a trained model, or else a bundle."""
    if _has_model(path):
        return load_model(path)
    from simulmt.runtime.bundle import MANIFEST, shipped_names
    from simulmt.train.restore import load_bundle  # which imports this module

    if str(path) in shipped_names() or (path / MANIFEST).exists():
        return load_bundle(path)
    if not path.exists():
        names = ", ".join(shipped_names())
        raise CheckpointError(f"{path}: no such model; give a finished run, a bundle or the name of one ({names})")
    return load_model(path)


def _has_model(directory: Path) -> bool:
    return any((each / "model.json").exists() for each in (directory, directory / "final"))


def _check_fit(path: Path, config: SystemConfig, other: SystemConfig) -> None:
    """Raise VocabularyError or CheckpointError unless a model can be initialised from another."""
    if side := _other_side(config.vocabulary_sha256, other.vocabulary_sha256):
        vocabularies = "DIR" if _has_model(path) else path
        raise VocabularyError(
            f"{path}: was trained with a {side} vocabulary that differs from that of the data; prepare the data "
            f"with the vocabularies of the model (simulmt prepare --vocabularies {vocabularies})"
        )
    network, other_network = config.network(), other.network()
    if type(network) is not type(other_network):
        raise CheckpointError(f"{path}: cannot initialise {config.system} from {other.system}; change `system`")
    sizes, other_sizes = _sizes(network), _sizes(other_network)
    if differing := [name for name, size in sizes.items() if size != other_sizes[name]]:
        listed = ", ".join(f"{name} = {other_sizes[name]} (not {sizes[name]})" for name in differing)
        raise CheckpointError(f"{path}: cannot initialise from a model of different sizes; its [model] has {listed}")


def _sizes(network: CTCConfig | Seq2SeqConfig) -> dict[str, int]:
    """Return the settings of a network that must agree: all whole numbers."""
    return {name: value for name, value in asdict(network).items() if type(value) is int}


def save_model(model: nn.Module, config: SystemConfig, directory: Path, metadata: Mapping[str, Any]) -> None:
    """Write a trained model, replacing `directory`; `metadata` (such as scores) is stored with its config."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    description = {"format": 1, "config": as_table(config), **metadata}
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    try:
        with replacing_directory(directory, SCRATCH) as temporary:
            safetensors.torch.save_file(tensors, temporary / "model.safetensors")
            (temporary / "model.json").write_text(text, encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{directory}: cannot write the model: {error}") from None


def load_model(directory: Path) -> tuple[nn.Module, SystemConfig]:
    """Read a trained model, in eval mode; `directory` is a model or a finished run."""
    if not (directory / "model.json").exists() and _has_model(directory):
        directory = directory / "final"
    try:
        description = json.loads((directory / "model.json").read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(directory / "model.safetensors")
        config = build(SystemConfig, description["config"], str(directory / "model.json"))
        with torch.device("meta"):
            model = build_model(config)
        model.load_state_dict(tensors, assign=True)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no trained model found; a finished run has one in final/") from None
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
