"""Build the runtime's ONNX graphs from a trained model.

Each graph works on rows (streams) and a few positions per row:

    ctc       read tokens up to the layer that looks ahead, run finished positions through the rest, choose symbols
    context   score the next symbol of a transducer by the last ones written
    encoder   encode tokens and project them for cross-attention
    decoder   decode written tokens and choose the next ones

A cache of keys or values is an input `past_*` and an output `present_*` of one shape. The runtime binds both to the
same memory, so ScatterND writes new positions in place and the past is never copied. Results of a row are bit-exact
whatever else is in the batch: docs/decisions/0002-runtime-graph.md.

Axis letters: B rows, N positions, R tokens read, C capacity of a cache, P = B * N, D width, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Attention, Embedding, Encoder, EncoderLayer, FeedForward, sinusoids
from simulmt.model.seq2seq import Policy, Seq2SeqModel
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.seq2seq import max_target_length
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS

Precision = Literal["fp32", "int8"]
Array = NDArray[Any]

OPSET = 21
IR_VERSION = 10
EXTERNAL_DATA_THRESHOLD = 1024  # bytes; larger tensors go into the weights file, which onnxruntime maps into memory

# Processors without VNNI add two int8 products in 16 bits: 255 * 63 * 2 fits, 255 * 127 * 2 overflows.
WEIGHT_LEVELS = 63
EMBEDDING_LEVELS = 127
ZERO_POINT = 128


class Rows(NamedTuple):
    """Names of the inputs that select the positions to compute."""

    tokens: str  # [B N]
    positions: str  # [B N]
    slots: str  # [B N heads 4]: where in a cache each head of each position is written
    mask: str  # [B N 1 1 C]: 0 where the position may attend, minus infinity elsewhere


class Graph:
    """Graph builder; methods add nodes and return the names of their outputs."""

    def __init__(self, heads: int, width: int, precision: Precision) -> None:
        self.heads = heads
        self.width = width
        self.head_width = width // heads
        self.int8 = precision == "int8"
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._shapes: dict[tuple[str, tuple[int, ...]], str] = {}
        self._bytes: dict[tuple[int, str], str] = {}
        self._count = 0

    def rows(self, prefix: str = "", axis: str = "N") -> Rows:
        """Add the inputs of a set of positions."""
        return Rows(
            self.input(f"{prefix}tokens", TensorProto.INT64, ["B", axis]),
            self.input(f"{prefix}positions", TensorProto.INT64, ["B", axis]),
            self.input(f"{prefix}slots", TensorProto.INT64, ["B", axis, self.heads, 4]),
            self.mask(f"{prefix}mask"),
        )

    def mask(self, name: str, axis: str = "N") -> str:
        return self.input(name, TensorProto.FLOAT, ["B", axis, 1, 1, "C"])

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, value: Array | np.generic) -> str:
        name = self._new_name()
        self._tensors.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = name or self._new_name()
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def split(self, x: str, parts: int, axis: int, sizes: Sequence[str] = ()) -> list[str]:
        """Split along an axis into equal parts, or parts of the given sizes."""
        names = [self._new_name() for _ in range(parts)]
        count: dict[str, Any] = {} if sizes else {"num_outputs": parts}
        self._nodes.append(helper.make_node("Split", [x, *sizes], names, axis=axis, **count))
        return names

    def reshape(self, x: str, rows: str, *tail: int) -> str:
        """Reshape `x` to the B and N of `rows`, followed by fixed sizes."""
        return self.add("Reshape", x, self._shape(rows, *tail))

    def flatten(self, x: str) -> str:
        """Flatten [... D] to [P D]."""
        return self.add("Reshape", x, self.constant(np.array([-1, self.width])))

    def linear(self, x: str, rows: str, weight: Tensor, bias: Tensor | None = None, nonnegative: bool = False) -> str:
        """Multiply x [P K] by the transposed weight [M K] and add the bias.

        `rows` names the row count of x, shared by all tensors of that name; `nonnegative` asserts x >= 0.
        """
        if not self.int8:
            biases = [] if bias is None else [self.constant(_array(bias))]
            return self.add("Gemm", x, self.constant(_array(weight)), *biases, transB=1)
        y = self._int8_matmul(x, rows, _array(weight), nonnegative)
        return y if bias is None else self.add("Add", y, self.constant(_array(bias)))

    def _int8_matmul(self, x: str, rows: str, weight: Array, nonnegative: bool) -> str:
        """Multiply in int8 with exact sums; rows of x and of the weight have their own scales."""
        zero, levels = (0, 255) if nonnegative else (ZERO_POINT, 127)
        sizes = x if nonnegative else self.add("Abs", x)
        largest = self.add("ReduceMax", sizes, self.constant(np.array([-1])), keepdims=0)
        steps = self.add("Mul", largest, self.constant(np.float32(1 / levels)))
        # In a row of zeros, 0 / 0 becomes an arbitrary byte, but its products are multiplied by a scale of 0.
        x = self.add("QuantizeLinear", x, steps, self._expand_byte(zero, rows, largest), axis=0)
        codes, scales = quantise(weight, WEIGHT_LEVELS)
        sums = self.add("MatMulInteger", x, self.constant(codes.T), self.constant(np.uint8(zero)))
        return self.add("Mul", self.add("DequantizeLinear", sums, steps, axis=0), self.constant(scales))

    def _expand_byte(self, byte: int, rows: str, like: str) -> str:
        """Return a byte per row, in the shape of `like`, computed once per row count."""
        key = (byte, rows)
        if key not in self._bytes:
            self._bytes[key] = self.add("Expand", self.constant(np.uint8(byte)), self.add("Shape", like))
        return self._bytes[key]

    def embed(self, embedding: Embedding, tokens: str, positions: str, longest: int) -> str:
        """Return token embeddings times sqrt(D) plus positions, [B N D]."""
        places = self.constant(_array(sinusoids(torch.arange(longest), self.width)))
        return self.add("Add", self.lookup(embedding, tokens), self.add("Gather", places, positions))

    def lookup(self, embedding: Embedding, tokens: str) -> str:
        """Return token embeddings times sqrt(D), [B N D]."""
        table = _array(embedding.weight) * np.float32(math.sqrt(self.width))
        if not self.int8:
            return self.add("Gather", self.constant(table), tokens)
        codes, scales = quantise(table, EMBEDDING_LEVELS)
        row = self.add("Cast", self.add("Gather", self.constant(codes), tokens), to=TensorProto.FLOAT)
        return self.add("Mul", row, self.add("Gather", self.constant(scales[:, None]), tokens))

    def norm(self, module: nn.LayerNorm, x: str) -> str:
        parameters = (self.constant(_array(module.weight)), self.constant(_array(module.bias)))
        return self.add("LayerNormalization", x, *parameters, axis=-1, epsilon=module.eps)

    def feed_forward(self, norm: nn.LayerNorm, module: FeedForward, x: str, rows: str) -> str:
        """Apply the feed-forward network with its residual, [P D]."""
        expand, contract = module.expand, module.contract
        inner = self.add("Relu", self.linear(self.norm(norm, x), rows, expand.weight, expand.bias))
        return self.add("Add", x, self.linear(inner, rows, contract.weight, contract.bias, nonnegative=True))

    def heads_of(self, x: str, rows: str, parts: int) -> list[str]:
        """Split [P parts*D] into tensors [B N heads D/heads]."""
        return self.split(self.reshape(x, rows, parts * self.heads, self.head_width), parts, axis=2)

    def queries(self, module: Attention, normed: str, rows: str) -> str:
        """Project [P D] to queries, [B N heads D/heads]."""
        weight, bias = (_scaled(parameter, self.head_width) for parameter in (module.query.weight, module.query.bias))
        return self.reshape(self.linear(normed, rows, weight, bias), rows, self.heads, self.head_width)

    def keys_values(self, module: Attention, normed: str, rows: str) -> list[str]:
        """Project [P D] to keys and values, [B N heads D/heads] each."""
        return self.heads_of(self.linear(normed, rows, module.key_value.weight, module.key_value.bias), rows, parts=2)

    def queries_keys_values(self, module: Attention, normed: str, rows: str) -> list[str]:
        """Project [P D] to queries, keys and values in one product, [B N heads D/heads] each."""
        weight = torch.cat([_scaled(module.query.weight, self.head_width), module.key_value.weight])
        bias = torch.cat([_scaled(module.query.bias, self.head_width), module.key_value.bias])
        return self.heads_of(self.linear(normed, rows, weight, bias), rows, parts=3)

    def cache(self, name: str) -> str:
        """Add a read-only cache, [B 1 heads C D/heads]."""
        return self.input(f"past_{name}", TensorProto.FLOAT, self._cache_shape())

    def remember(self, name: str, new: str, slots: str) -> str:
        """Write `new` [B N heads D/heads] to a cache at `slots`; return the cache."""
        present = self.add("ScatterND", self.cache(name), slots, new, name=f"present_{name}")
        self.output(present, TensorProto.FLOAT, self._cache_shape())
        return present

    def attend(self, module: Attention, queries: str, keys: str, values: str, mask: str, rows: str) -> str:
        """Attend with queries [B N heads D/heads] over two caches; return [P D] after the output projection.

        Each query is its own matrix product, since one product over N queries rounds differently.
        """
        column = self.constant(np.array([0, 0, self.heads, self.head_width, 1]))  # 0 keeps an axis as it is
        line = self.constant(np.array([0, 0, self.heads, 1, -1]))
        scores = self.add("MatMul", keys, self.add("Reshape", queries, column))  # [B N heads C 1]
        scores = self.add("Reshape", scores, line)
        weights = self.add("Softmax", self.add("Add", scores, mask), axis=-1)
        mixed = self.flatten(self.add("MatMul", weights, values))
        return self.linear(mixed, rows, module.output.weight, module.output.bias)

    def self_attention(self, name: str, norm: nn.LayerNorm, module: Attention, x: str, rows: Rows) -> str:
        """Append the positions to a cache, attend over it and add the residual, [P D]."""
        queries, keys, values = self.queries_keys_values(module, self.norm(norm, x), rows.tokens)
        keys = self.remember(f"{name}_keys", keys, rows.slots)
        values = self.remember(f"{name}_values", values, rows.slots)
        return self.add("Add", x, self.attend(module, queries, keys, values, rows.mask, rows.tokens))

    def encoder_layer(self, name: str, layer: EncoderLayer, x: str, rows: Rows) -> str:
        """Add an encoder layer, whose keys and values are cached under `name`, [P D]."""
        x = self.self_attention(name, layer.attention_norm, layer.attention, x, rows)
        return self.feed_forward(layer.feed_forward_norm, layer.feed_forward, x, rows.tokens)

    def choose(
        self, states: str, table: Tensor, rows: str, frames: int, penalised: int, forbidden: Sequence[int]
    ) -> None:
        """Output `scores`, the logits, and `symbols`, the argmax after subtracting `penalty` from `penalised`."""
        V = table.shape[0]
        scores = self.linear(states, f"{rows} frames", table)
        scores = self.add("Reshape", scores, self._shape(rows, frames, V), name="scores")
        self.output(scores, TensorProto.FLOAT, ["B", "N", frames, V])
        never, once = np.zeros((2, V), dtype=np.float32)
        never[list(forbidden)] = -np.inf
        once[penalised] = -1
        penalty = self.input("penalty", TensorProto.FLOAT, ["B", "N", 1, 1])
        change = self.add("Mul", self.constant(once), penalty)
        if forbidden:
            change = self.add("Add", self.constant(never), change)
        self.add("ArgMax", self.add("Add", scores, change), name="symbols", axis=-1, keepdims=0)
        self.output("symbols", TensorProto.INT64, ["B", "N", frames])

    def predict_stability(self, policy: Policy, states: str, rows: str) -> None:
        """Output `stability` of the next token of each position."""
        x = self.add("Relu", self.linear(states, rows, policy.expand.weight, policy.expand.bias))
        logits = self.linear(x, rows, policy.contract.weight, policy.contract.bias, nonnegative=True)
        self.add("Sigmoid", self.reshape(logits, rows, 1), name="stability")
        self.output("stability", TensorProto.FLOAT, ["B", "N", 1])

    def save(self, path: Path) -> None:
        """Write the graph, and its weights as external data, which the runtime maps into memory."""
        graph = helper.make_graph(self._nodes, path.stem, self._inputs, self._outputs, self._tensors)
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="simulmt")
        weights = path.with_suffix(".weights")
        onnx.save_model(
            model, path, save_as_external_data=True, location=weights.name, size_threshold=EXTERNAL_DATA_THRESHOLD
        )
        shutil.copymode(path, weights)  # onnx writes it readable by the owner only

    def _shape(self, rows: str, *tail: int) -> str:
        key = (rows, tail)
        if key not in self._shapes:
            fixed = self.constant(np.array(tail))
            self._shapes[key] = self.add("Concat", self.add("Shape", rows, end=2), fixed, axis=0)
        return self._shapes[key]

    def _cache_shape(self) -> list[int | str]:
        return ["B", 1, self.heads, "C", self.head_width]

    def _new_name(self) -> str:
        self._count += 1
        return f"v{self._count}"


Builder = Callable[[int, int, Precision], Graph]  # from heads, width and precision to an empty graph


def build_graph(
    name: str, model: CTCModel | Seq2SeqModel, longest: int, precision: Precision, builder: Builder = Graph
) -> Graph:
    """Build one of the graphs of a bundle; `longest` is the maximum number of source tokens of a sentence."""
    if isinstance(model, Seq2SeqModel):
        if name == "encoder":
            return encoder_graph(model, longest, precision, builder)
        return decoder_graph(model, max_target_length(longest) + 1, precision, builder)
    if name == "context":
        assert isinstance(model, TransducerModel), "only a transducer has a label context"
        return context_graph(model, precision, builder)
    return ctc_graph(model, longest, precision, builder)


def ctc_graph(model: CTCModel, longest: int, precision: Precision, builder: Builder = Graph) -> Graph:
    """Build a step of many streams: each reads R tokens, finishes N positions and outputs the symbols of their frames.

    `read_mask` is the attention mask of the layer that looks ahead, `mask` that of all later layers, `causal_mask` that
    of the layers below, if there are any.
    """
    encoder = model.encoder
    graph = builder(encoder.layers[0].attention.heads, encoder.embedding.embedding_dim, precision)
    read, rows = graph.rows("read_", "R"), graph.rows()
    look_ahead = encoder.look_ahead_layer
    layer = encoder.layers[look_ahead]
    if look_ahead == 0:
        x, new, queries = _embedded(graph, encoder, read, rows, longest)
    else:
        x, new, queries = _read_states(graph, encoder, read, rows, longest)
    keys, values = graph.keys_values(layer.attention, new, read.tokens)
    keys = graph.remember(f"layer_{look_ahead}_keys", keys, read.slots)
    values = graph.remember(f"layer_{look_ahead}_values", values, read.slots)
    queries = graph.queries(layer.attention, queries, rows.tokens)
    x = graph.add("Add", x, graph.attend(layer.attention, queries, keys, values, read.mask, rows.tokens))
    x = graph.feed_forward(layer.feed_forward_norm, layer.feed_forward, x, rows.tokens)
    for index, layer in enumerate(encoder.layers[look_ahead + 1 :], look_ahead + 1):
        x = graph.encoder_layer(f"layer_{index}", layer, x, rows)
    projection = model.length_projection
    states = graph.norm(encoder.final_norm, x)
    frames = graph.flatten(graph.linear(states, rows.tokens, projection.weight, projection.bias))
    graph.choose(frames, model.target_embedding.weight, rows.tokens, model.mu, penalised=BLANK, forbidden=())
    return graph


def _embedded(graph: Graph, encoder: Encoder, read: Rows, rows: Rows, longest: int) -> tuple[str, str, str]:
    """Embed tokens; return the positions [P D], and, normalised, the tokens read and the positions, [P D] each."""
    tokens = graph.add("Concat", read.tokens, rows.tokens, axis=1)
    positions = graph.add("Concat", read.positions, rows.positions, axis=1)
    embedded = graph.embed(encoder.embedding, tokens, positions, longest)
    counts = [graph.add("Shape", name, start=1, end=2) for name in (read.tokens, rows.tokens)]
    sizes = graph.add("Concat", *counts, axis=0)
    x = graph.flatten(graph.split(embedded, 2, axis=1, sizes=[sizes])[1])
    normed = graph.norm(encoder.layers[0].attention_norm, embedded)
    new, queries = graph.split(normed, 2, axis=1, sizes=[sizes])
    return x, graph.flatten(new), graph.flatten(queries)


def _read_states(graph: Graph, encoder: Encoder, read: Rows, rows: Rows, longest: int) -> tuple[str, str, str]:
    """Like `_embedded`, but with the states of the layers below the one that looks ahead, which are cached."""
    reading = read._replace(mask=graph.mask("causal_mask", "R"))
    states = graph.flatten(graph.embed(encoder.embedding, read.tokens, read.positions, longest))
    for index, layer in enumerate(encoder.layers[: encoder.look_ahead_layer]):
        states = graph.encoder_layer(f"layer_{index}", layer, states, reading)
    all_states = graph.remember("states", graph.heads_of(states, read.tokens, parts=1)[0], read.slots)
    x = graph.flatten(graph.add("GatherND", all_states, rows.slots))
    norm = encoder.layers[encoder.look_ahead_layer].attention_norm
    return x, graph.norm(norm, states), graph.norm(norm, x)


def context_graph(model: TransducerModel, precision: Precision, builder: Builder = Graph) -> Graph:
    """Build the label context: scores [B V] added to those of any frame, given the last symbols, newest first."""
    context, embedding = model.context, model.target_embedding
    graph = builder(1, embedding.embedding_dim, precision)
    history = graph.input("history", TensorProto.INT64, ["B", context.symbols])
    x = graph.lookup(embedding, history)
    x = graph.add("Reshape", x, graph.constant(np.array([-1, context.symbols * graph.width])))
    x = graph.add("Relu", graph.linear(x, history, context.expand.weight, context.expand.bias))
    x = graph.linear(x, history, context.contract.weight, context.contract.bias, nonnegative=True)
    graph.add("Identity", graph.linear(x, history, context.table), name="scores")
    graph.output("scores", TensorProto.FLOAT, ["B", context.table.shape[0]])
    return graph


def encoder_graph(model: Seq2SeqModel, longest: int, precision: Precision, builder: Builder = Graph) -> Graph:
    """Build the encoder: append N tokens of each row to the context of the decoder."""
    encoder = model.encoder
    graph = builder(encoder.layers[0].attention.heads, encoder.embedding.embedding_dim, precision)
    rows = graph.rows()
    x = graph.flatten(graph.embed(encoder.embedding, rows.tokens, rows.positions, longest))
    for index, layer in enumerate(encoder.layers):
        x = graph.encoder_layer(f"encoder_{index}", layer, x, rows)
    states = graph.norm(encoder.final_norm, x)
    for index, decoder_layer in enumerate(model.layers):
        keys, values = graph.keys_values(decoder_layer.cross_attention, states, rows.tokens)
        graph.remember(f"context_{index}_keys", keys, rows.slots)
        graph.remember(f"context_{index}_values", values, rows.slots)
    return graph


def decoder_graph(model: Seq2SeqModel, longest: int, precision: Precision, builder: Builder = Graph) -> Graph:
    """Build the decoder: predict one token per row from `tokens` and the visible context."""
    heads = model.layers[0].attention.heads
    graph = builder(heads, model.target_embedding.embedding_dim, precision)
    rows = graph.rows()
    context_mask = graph.mask("context_mask")
    x = graph.flatten(graph.embed(model.target_embedding, rows.tokens, rows.positions, longest))
    for index, layer in enumerate(model.layers):
        x = graph.self_attention(f"written_{index}", layer.attention_norm, layer.attention, x, rows)
        module = layer.cross_attention
        queries = graph.queries(module, graph.norm(layer.cross_norm, x), rows.tokens)
        keys, values = graph.cache(f"context_{index}_keys"), graph.cache(f"context_{index}_values")
        x = graph.add("Add", x, graph.attend(module, queries, keys, values, context_mask, rows.tokens))
        x = graph.feed_forward(layer.feed_forward_norm, layer.feed_forward, x, rows.tokens)
    never = [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]
    states = graph.norm(model.final_norm, x)
    graph.choose(states, model.target_embedding.weight, rows.tokens, 1, penalised=END, forbidden=never)
    if model.policy is not None:
        graph.predict_stability(model.policy, states, rows.tokens)
    return graph


def quantise(table: Array, levels: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a table to integers within +-levels, with one scale per row."""
    scales = np.abs(table).max(-1) / levels
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    return np.rint(table / scales[:, None]).astype(np.int8), scales


def _scaled(query: Tensor, head_width: int) -> Tensor:
    """Return query parameters scaled by 1 / sqrt(head width)."""
    return query / math.sqrt(head_width)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().float().cpu().numpy()
