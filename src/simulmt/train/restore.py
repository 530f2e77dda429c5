"""Initialise a model with the weights of a finished run or of a bundle, or average several.

A bundle stores weights in the order in which graph.py adds them. So its graphs are rebuilt from a model of zeros, and
the n-th weights added are the n-th stored. Names cannot identify weights, since they change with every node that
graph.py adds.

int8 weights are restored to within half a quantisation step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from simulmt.errors import BundleError, CheckpointError, ConfigError, VocabularyError
from simulmt.model.ctc import CTCConfig
from simulmt.model.layers import Attention, Embedding
from simulmt.model.seq2seq import Seq2SeqConfig
from simulmt.runtime.bundle import GRAPHS, MANIFEST, Bundle, BundleConfig, find, shipped_names
from simulmt.train.graph import Array, Graph, Precision, build_graph
from simulmt.train.systems import (
    InferenceModel,
    SystemConfig,
    TrainableModel,
    build_model,
    differing_side,
    has_model,
    load_model,
    save_model,
    translator_of,
    vocabulary_checksums,
)

WORD_STARTS = "encoder.word_starts"  # tensor of models that see whole words
POLICY = "policy."  # prefix of the tensors of a read/write policy
ENCODER_SIZES = ("source_vocabulary", "target_vocabulary", "width", "inner", "heads")  # must agree to share an encoder


def initialise_from(model: TrainableModel, path: Path, config: SystemConfig) -> None:
    """Copy the weights that two models share from a trained one; raise CheckpointError if they do not fit.

    `path` is a model, a finished run, a bundle or the name of a shipped one; `config` is that of the new model.
    """
    other, other_config = load_model_or_bundle(path)
    _check_vocabularies(path, config, other_config)
    network, other_network = config.network(), other_config.network()
    if isinstance(network, Seq2SeqConfig) and network.causal and isinstance(other_network, CTCConfig):
        _check_encoder(path, network, other_network)
        _copy_encoder(translator_of(other), translator_of(model))
        return
    _check_fit(path, config, other_config)
    if type(model) is not type(other):
        model, other = translator_of(model), translator_of(other)
    elif config.system.endswith("+asn") and config.asn.norm != other_config.asn.norm:
        raise CheckpointError(
            f"{path}: its sorting network has asn.norm = '{other_config.asn.norm}', not '{config.asn.norm}', so "
            "its weights do not fit; set asn.norm, or start from a ctc model"
        )
    try:
        own, weights = model.state_dict(), other.state_dict()
        # Word starts are not weights: one model may see whole words and the other not. A policy may be new.
        shared = {name: own[name] for name in own if name.endswith(WORD_STARTS) or _is_added(name, weights)}
        kept = {name: each for name, each in weights.items() if not name.endswith(WORD_STARTS)}
        model.load_state_dict({name: each for name, each in kept.items() if not _is_added(name, own)} | shared)
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise CheckpointError(f"{path}: cannot initialise from a model of different sizes: {detail}") from None


def _is_added(name: str, other: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor belongs to a policy that the other model does not have."""
    return name.startswith(POLICY) and not any(each.startswith(POLICY) for each in other)


def average_models(paths: Sequence[Path], weights: Sequence[float], output: Path) -> None:
    """Write the weighted average of models that descend from one another, with the settings of the first.

    Raise CheckpointError if they differ in system, sizes, delays or vocabularies.
    """
    (model, config), *others = [load_model_or_bundle(path) for path in paths]
    states = [each.state_dict() for each in (model, *(other for other, _ in others))]
    for path, (other, other_config) in zip(paths[1:], others, strict=True):
        if config.system != other_config.system or config.delays != other_config.delays:
            raise CheckpointError(
                f"{path}: cannot be averaged with {paths[0]}: {other_config.system} with delays "
                f"{list(other_config.delays)}, not {config.system} with {list(config.delays)}"
            )
        _check_vocabularies(path, config, other_config)
        _check_fit(path, config, other_config)
        if states[0].keys() != other.state_dict().keys():
            raise CheckpointError(f"{path}: cannot be averaged with {paths[0]}: only one of them has a policy")
    shares = [weight / sum(weights) for weight in weights]
    with torch.no_grad():
        for name, tensor in states[0].items():
            if tensor.is_floating_point():
                tensor.copy_(sum(share * state[name].float() for share, state in zip(shares, states, strict=True)))
    average = {str(path): share for path, share in zip(paths, shares, strict=True)}
    save_model(model, config, output, {"average": average}, scratch="")


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a bundle, or the name of a shipped one, and not a model or run."""
    return not has_model(path) and (str(path) in shipped_names() or (path / MANIFEST).exists())


def load_model_or_bundle(path: Path) -> tuple[TrainableModel, SystemConfig]:
    """Read a trained model, or else a bundle."""
    if is_bundle(path):
        return load_bundle(path)
    if not path.exists():
        names = ", ".join(shipped_names())
        raise CheckpointError(f"{path}: no such model; give a finished run, a bundle or the name of one ({names})")
    return load_model(path)


def _check_vocabularies(path: Path, config: SystemConfig, other: SystemConfig) -> None:
    """Raise VocabularyError unless the model was trained with the vocabularies of the data."""
    if side := differing_side(config.vocabulary_sha256, other.vocabulary_sha256):
        vocabularies = "DIR" if has_model(path) else path
        raise VocabularyError(
            f"{path}: was trained with a {side} vocabulary that differs from that of the data; prepare the data "
            f"with the vocabularies of the model (simulmt prepare --vocabularies {vocabularies})"
        )


def _check_fit(path: Path, config: SystemConfig, other: SystemConfig) -> None:
    """Raise CheckpointError unless a model can have all weights of another."""
    network, other_network = config.network(), other.network()
    if type(network) is not type(other_network):
        raise CheckpointError(f"{path}: cannot initialise {config.system} from {other.system}; change `system`")
    _check_sizes(path, *(_whole_numbers(each) for each in (network, other_network)))


def _check_encoder(path: Path, network: Seq2SeqConfig, other: CTCConfig) -> None:
    """Raise CheckpointError unless a wait-k model can start from the encoder of a CTC model or a transducer."""
    _check_sizes(path, *({name: getattr(each, name) for name in ENCODER_SIZES} for each in (network, other)))
    if network.encoder_layers > other.layers:  # those above would silently stay untrained
        raise CheckpointError(
            f"{path}: cannot initialise the encoder: encoder_layers = {network.encoder_layers} is more than the "
            f"{other.layers} layers of this model"
        )


def _whole_numbers(network: CTCConfig | Seq2SeqConfig) -> dict[str, int]:
    sizes = {name: value for name, value in asdict(network).items() if type(value) is int}
    return {name: size for name, size in sizes.items() if name != "policy_inner"}  # a policy may be added or dropped


def _check_sizes(path: Path, sizes: Mapping[str, int], other_sizes: Mapping[str, int]) -> None:
    if differing := [name for name, size in sizes.items() if size != other_sizes[name]]:
        listed = ", ".join(f"{name} = {other_sizes[name]} (not {sizes[name]})" for name in differing)
        raise CheckpointError(f"{path}: cannot initialise from a model of different sizes; its [model] has {listed}")


def _copy_encoder(other: InferenceModel, model: InferenceModel) -> None:
    """Copy the first layers of an encoder and the embedding of its tokens; the decoder stays as initialised."""
    own = model.state_dict()
    shared = {
        name: tensor for name, tensor in other.state_dict().items() if name in own and name.startswith("encoder.")
    }
    model.load_state_dict(own | shared)


def load_bundle(name_or_path: str | Path) -> tuple[InferenceModel, SystemConfig]:
    """Read a bundle as the model that it was exported from, in eval mode."""
    bundle = Bundle(find(name_or_path))
    bundle.verify()
    config = bundle.config
    graphs = {name: StoredGraph.read(bundle.directory / f"{name}.onnx") for name in GRAPHS[config.kind]}
    found: dict[Tensor, Tensor] = {}
    try:
        system = _system_config(bundle, graphs)
        model = _zero_model(system)
        for name, stored in graphs.items():
            weights = iter(stored.weights)
            build_graph(name, model, config.longest, config.precision, partial(_Reader, weights, found))
            if next(weights, None) is not None:
                raise ValueError("more weights stored than the graph has")
    except (LookupError, ValueError, ZeroDivisionError, ConfigError):
        raise BundleError(
            f"{bundle.directory}: its graphs are not those that this version of simulmt exports; start from the run "
            "that it was exported from"
        ) from None
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.copy_(found[parameter])
    model.encoder.mark_words(bundle.source.word_starts)
    return model, system


@dataclass(frozen=True)
class StoredGraph:
    """Shapes of the inputs of a graph (0 for a variable axis), and its weights, both in the order they were added."""

    inputs: dict[str, list[int]]
    weights: list[Array]

    @staticmethod
    def read(path: Path) -> StoredGraph:
        try:
            graph = onnx.load(str(path)).graph
        except Exception as error:  # the errors of onnx and protobuf have no common base class
            reason = str(error).splitlines()[0]
            raise BundleError(f"{path}: cannot be read as ONNX ({reason}); copy or export the bundle again") from None
        inputs = {each.name: [axis.dim_value for axis in each.type.tensor_type.shape.dim] for each in graph.input}
        constants = map(numpy_helper.to_array, graph.initializer)
        return StoredGraph(inputs, [constant for constant in constants if _holds_weights(constant)])

    @property
    def matrix_sizes(self) -> list[int]:
        """Number of elements of each matrix."""
        return [weight.size for weight in self.weights if weight.ndim == 2]

    def layers(self, name: str) -> int:
        """Return how many layers cache keys under this name."""
        return sum(each.startswith(f"past_{name}_") and each.endswith("_keys") for each in self.inputs)

    def width_and_heads(self, cache: str) -> dict[str, int]:
        _, _, heads, _, head_width = self.inputs[cache]  # [B 1 heads C D/heads]
        return {"width": heads * head_width, "heads": heads}


def _holds_weights(constant: Array) -> bool:
    """Return whether a constant holds weights, scales or biases (or a few other tables), not a shape or a scalar."""
    return constant.ndim > 0 and constant.dtype in (np.float32, np.int8)


class _Reader(Graph):
    """Rebuilds a graph, reading the parameters of the model from the stored weights."""

    def __init__(
        self, stored: Iterator[Array], found: dict[Tensor, Tensor], heads: int, width: int, precision: Precision
    ) -> None:
        super().__init__(heads, width, precision)
        self._stored, self._found = stored, found
        self._read: list[Array] = []  # by the current call
        self._linear: list[Tensor] = []  # weight and bias of the last linear layer

    def constant(self, value: Array | np.generic) -> str:
        if _holds_weights(np.asarray(value)):
            stored = next(self._stored, None)
            if stored is None or (stored.shape, stored.dtype) != (value.shape, value.dtype):
                raise ValueError("weights of other shapes stored than the graph has")
            self._read.append(stored)
        return super().constant(value)

    def linear(self, x: str, rows: str, weight: Tensor, bias: Tensor | None = None, nonnegative: bool = False) -> str:
        self._read = []
        y = super().linear(x, rows, weight, bias, nonnegative)
        if self.int8:
            codes, scales, *biases = self._read
            matrix = codes.T * scales[:, None]
        else:
            *biases, matrix = self._read
        self._linear = [torch.tensor(each) for each in (matrix, *biases)]
        for parameter, value in zip((weight, bias), self._linear, strict=False):
            if isinstance(parameter, nn.Parameter):  # else computed from parameters, see `queries`
                self._found.setdefault(parameter, value)
        return y

    def lookup(self, embedding: Embedding, tokens: str) -> str:
        self._read = []
        y = super().lookup(embedding, tokens)
        table, *scales = self._read
        if self.int8:
            table = table * scales[0]
        # Not setdefault: where the output layer stores the same embedding, it has fewer levels.
        self._found[embedding.weight] = torch.tensor(table) / math.sqrt(self.width)
        return y

    def norm(self, module: nn.LayerNorm, x: str) -> str:
        self._read = []
        y = super().norm(module, x)
        self._found[module.weight], self._found[module.bias] = map(torch.tensor, self._read)
        return y

    def queries(self, module: Attention, normed: str, rows: str) -> str:
        y = super().queries(module, normed, rows)
        self._found_queries(module)
        return y

    def queries_keys_values(self, module: Attention, normed: str, rows: str) -> list[str]:
        y = super().queries_keys_values(module, normed, rows)
        self._found_queries(module)
        weight, bias = (parameter[self.width :] for parameter in self._linear)
        self._found |= {module.key_value.weight: weight, module.key_value.bias: bias}
        return y

    def _found_queries(self, module: Attention) -> None:
        weight, bias = (parameter[: self.width] * math.sqrt(self.head_width) for parameter in self._linear)
        self._found |= {module.query.weight: weight, module.query.bias: bias}


def _zero_model(config: SystemConfig) -> InferenceModel:
    """Build a model of zeros, without touching the random state of the run."""
    with torch.device("meta"):
        model = translator_of(build_model(config))
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _system_config(bundle: Bundle, graphs: Mapping[str, StoredGraph]) -> SystemConfig:
    config, vocabularies = bundle.config, (bundle.source.size, bundle.target.size)
    sizes = _frame_sizes(config, graphs, vocabularies[1]) if config.has_frames else _decoder_sizes(config, **graphs)
    return SystemConfig(
        "teacher" if config.kind == "full-sentence" else config.kind,
        *vocabularies,
        model=sizes,
        delays=config.delays or (1,),
        vocabulary_sha256=vocabulary_checksums(bundle.source, bundle.target),
    )


def _frame_sizes(config: BundleConfig, graphs: Mapping[str, StoredGraph], vocabulary: int) -> dict[str, Any]:
    """Return the settings of CTCConfig or TransducerConfig; the inner widths follow from sizes of matrices."""
    ctc, context = graphs["ctc"], graphs.get("context")
    sizes: dict[str, Any] = ctc.width_and_heads("past_layer_0_keys")
    contract, _length_projection, _table = ctc.matrix_sizes[-3:]
    below, states, _ = "\n".join(ctc.inputs).partition("past_states")
    sizes |= {
        "inner": contract // sizes["width"],
        "layers": ctc.layers("layer"),
        "mu": config.mu,
        "whole_words": config.whole_words,
        "look_ahead_layer": below.count("_keys") if states else 0,
    }
    if context is not None:
        contract, table = context.matrix_sizes[-2:]
        rank = table // vocabulary
        inner, symbols = contract // rank, context.inputs["history"][1]
        sizes |= {"context_symbols": symbols, "context_inner": inner, "context_rank": rank}
    return sizes


def _decoder_sizes(config: BundleConfig, encoder: StoredGraph, decoder: StoredGraph) -> dict[str, Any]:
    """Return the settings of Seq2SeqConfig."""
    sizes = encoder.width_and_heads("past_encoder_0_keys")
    matrices = decoder.matrix_sizes
    if config.has_policy:
        *matrices, _expand, sizes["policy_inner"] = matrices
    contract, _table = matrices[-2:]
    layers = {"encoder_layers": encoder.layers("encoder"), "decoder_layers": encoder.layers("context")}
    return {**sizes, **layers, "inner": contract // sizes["width"]}
