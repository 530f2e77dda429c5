"""Grow a trained model: more characters in its target vocabulary, more encoder layers.

A vocabulary learned from a sample lacks rare characters, and a model cannot write what its vocabulary lacks. New
characters are appended, so existing ids keep their meaning. A new layer adds nothing to its input at first, so the
grown model translates like the original one until it is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from simulmt.data.corpus import read_lines
from simulmt.errors import CheckpointError, ConfigError
from simulmt.files import write_atomic
from simulmt.model.seq2seq import Seq2SeqConfig
from simulmt.runtime.bundle import Bundle, find
from simulmt.text import SPECIAL_SYMBOLS, Tokenizer
from simulmt.train.restore import is_bundle, load_model_or_bundle
from simulmt.train.systems import (
    InferenceModel,
    SystemConfig,
    build_model,
    check_vocabularies,
    save_model,
    vocabulary_checksums,
)


@dataclass(frozen=True)
class Grown:
    """What was added."""

    characters: str
    layers: int


def grow_model(
    path: Path,
    output: Path,
    data: Path | None = None,
    text: Sequence[Path] = (),
    minimum_count: int = 2,
    encoder_layers: int = 0,
) -> Grown:
    """Write a larger copy of a model to `output`, with its vocabularies.

    `path` is a bundle, or a trained model, whose vocabularies are in `data`. Characters that occur at least
    `minimum_count` times in `text`, in the target language, are added to the target vocabulary. 0 layers: as many as
    before.
    """
    model, config = load_model_or_bundle(path)
    if config.system.endswith("+asn"):
        raise CheckpointError(f"{path}: is {config.system}; export it first, without its sorting network")
    source, target = _vocabularies(path, config, data)
    characters = _missing_characters(text, target, minimum_count)
    larger = target.with_characters(characters)
    name = "encoder_layers" if isinstance(config.network(), Seq2SeqConfig) else "layers"
    layers = getattr(config.network(), name)
    if encoder_layers and encoder_layers < layers:
        raise ConfigError(f"--encoder-layers {encoder_layers}: {path} has {layers} already; give more")
    grown = replace(
        config,
        target_vocabulary=larger.size,
        vocabulary_sha256=vocabulary_checksums(source, larger),
        model={**config.model, name: encoder_layers or layers},
    )
    copy = build_model(grown)
    assert isinstance(copy, InferenceModel)
    _copy_weights(model, copy, target)
    save_model(copy, grown, output, {"grown_from": str(path)})
    write_atomic(output / "source.model", source.model)
    write_atomic(output / "target.model", larger.model)
    return Grown(characters, max(0, encoder_layers - layers))


def _vocabularies(path: Path, config: SystemConfig, data: Path | None) -> tuple[Tokenizer, Tokenizer]:
    if is_bundle(path):
        bundle = Bundle(find(path))
        return bundle.source, bundle.target
    if data is None:
        raise ConfigError(f"{path} is not a bundle: give --data, the directory with its vocabularies")
    source, target = (Tokenizer.load(data / f"{side}.model") for side in ("source", "target"))
    check_vocabularies(path, config, data, source, target)
    return source, target


def _missing_characters(text: Iterable[Path], tokenizer: Tokenizer, minimum_count: int) -> str:
    """Return the characters of the text that the vocabulary cannot encode, most frequent first."""
    counts = Counter(character for path in text for line in read_lines(path) for character in line)
    return "".join(
        character
        for character, count in counts.most_common()
        if count >= minimum_count and character.isprintable() and not tokenizer.knows(character)
    )


@torch.no_grad()
def _copy_weights(model: nn.Module, copy: InferenceModel, target: Tokenizer) -> None:
    """Copy all weights; new characters start as the mean of the known ones, new layers as the identity."""
    own, weights = copy.state_dict(), model.state_dict()
    known = [token for token, piece in enumerate(target.pieces) if len(piece) == 1 and token >= len(SPECIAL_SYMBOLS)]
    for name, tensor in weights.items():
        own[name][: len(tensor)] = tensor
        if len(own[name]) > len(tensor):  # a table with a row for each piece
            own[name][len(tensor) :] = tensor[known].mean(0)
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layers."))
    for layer in copy.encoder.layers[depth:]:
        for linear in (layer.attention.output, layer.feed_forward.contract):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
