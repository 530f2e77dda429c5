"""Transformer layers (pre-norm, ReLU, sinusoidal positions), and the output layer, fused with the loss.

Encoders run over whole sentences; decoder layers also run step by step, with cached keys and values, for beam search.
Streaming graphs, which the runtime executes, are built by simulmt.train.graph. Masks are boolean, True where a query
may attend.

The output layer never stores frames x V. Every loss is a cross entropy with soft targets. Its gradient with respect to
the logits of a frame is

    p - (1 - eps) * posterior - eps / V

where p is the softmax, eps the label smoothing, and `posterior`, nonzero in a few label columns only, the probability
that the frame is aligned to each label. The two large products of the backward pass, p times the output embeddings and
p times the frames, do not need the posterior: they are computed chunk by chunk along with the normalisers, without the
label columns, which are added with the uniform part once the posterior is known. This takes three matrix products over
frames x V, as many as with stored logits, and computes p - posterior, often a small difference, in fp32.

Axis letters: B batch, S source, T target, D width, N new positions, L all positions so far, U frames, C label columns,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simulmt.config import require
from simulmt.errors import VocabularyError
from simulmt.text import PAD

FRAMES_PER_CHUNK = 8192

NormPlacement = Literal["pre", "post"]
P = ParamSpec("P")
R = TypeVar("R")
# From the log-probabilities of the label columns, [B U C], to the sum of negative log-likelihoods and the posterior.
Align = Callable[[Tensor], tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """Padded sentence pairs; each side ends in END, lengths are CPU tensors."""

    source: Int[Tensor, "B S"]
    source_lengths: Int[Tensor, " B"]
    target: Int[Tensor, "B T"]
    target_lengths: Int[Tensor, " B"]


class KeysValues(NamedTuple):
    """Projected keys and values, [B heads L D/heads] each."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]


class KeyValueBuffer(NamedTuple):
    """Preallocated keys and values, [B heads C D/heads] each, of which `length` positions are filled.

    Appending writes in place, so only the newest state may be used.
    """

    keys: Tensor
    values: Tensor
    length: int

    @staticmethod
    def like(context: KeysValues, positions: int) -> KeyValueBuffer:
        """Return an empty buffer for keys and values of the same shape."""
        B, heads, _, D = context.keys.shape
        keys, values = context.keys.new_empty(2, B, heads, positions, D)
        return KeyValueBuffer(keys, values, 0)

    def append(self, new: KeysValues) -> KeyValueBuffer:
        stop = self.length + new.length
        self.keys[:, :, self.length : stop] = new.keys
        self.values[:, :, self.length : stop] = new.values
        return KeyValueBuffer(self.keys, self.values, stop)

    @property
    def filled(self) -> KeysValues:
        return KeysValues(self.keys[:, :, : self.length], self.values[:, :, : self.length])

    def select(self, rows: Int[Tensor, " R"]) -> KeyValueBuffer:
        """Return a subset of the sentences, with the same capacity."""
        return KeyValueBuffer(self.keys[rows], self.values[rows], self.length)


class Attention(nn.Module):
    """Multi-head attention; keys and values are projected separately, so that they can be cached."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        require(heads >= 1 and width % heads == 0, f"width ({width}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        for weight in (self.query.weight, *self.key_value.weight.chunk(2)):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.output.weight)
        for linear in (self.query, self.key_value, self.output):
            nn.init.zeros_(linear.bias)

    def project(self, context: Float[Tensor, "B L D"]) -> KeysValues:
        """Project `context` to keys and values."""
        keys, values = self.key_value(context).chunk(2, -1)
        return KeysValues(self._split(keys), self._split(values))

    def forward(
        self, x: Float[Tensor, "B N D"], context: KeysValues, mask: Tensor | None = None, causal: bool = False
    ) -> Float[Tensor, "B N D"]:
        queries = self._split(self.query(x))
        mixed = F.scaled_dot_product_attention(queries, *context, attn_mask=mask, is_causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # [B N D]

    def _split(self, x: Float[Tensor, "B L D"]) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B heads L D/heads]


class FeedForward(nn.Module):
    """Position-wise feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner)
        self.contract = nn.Linear(inner, width)
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return self.contract(F.relu(self.expand(x)))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B L D"], mask: Tensor | None, causal: bool = False) -> Tensor:
        normed = self.attention_norm(x)  # once for the queries and for the keys
        x = x + self.dropout(self.attention(normed, self.attention.project(normed), mask, causal))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    """An encoder layer with cross-attention.

    Pre-norm normalises the input of each sublayer; post-norm normalises the sum of residual and sublayer.
    """

    def __init__(self, width: int, inner: int, heads: int, dropout: float, norm: NormPlacement = "pre") -> None:
        super().__init__()
        self.post_norm = norm == "post"
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        context: KeysValues,
        context_mask: Tensor | None,
        mask: Tensor | None = None,
        causal: bool = False,
        past: KeyValueBuffer | None = None,
    ) -> tuple[Float[Tensor, "B N D"], KeyValueBuffer | None]:
        """Return the output, and `past` with the keys and values of the new positions."""
        normed = self._input(x, self.attention_norm)
        own = self.attention.project(normed)
        if past is not None:
            past = past.append(own)
            own = past.filled
        x = self._add(x, self.attention(normed, own, mask, causal), self.attention_norm)
        attended = self.cross_attention(self._input(x, self.cross_norm), context, context_mask)
        x = self._add(x, attended, self.cross_norm)
        return self._add(x, self.feed_forward(self._input(x, self.feed_forward_norm)), self.feed_forward_norm), past

    def _input(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return x if self.post_norm else norm(x)

    def _add(self, x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> Tensor:
        x = x + self.dropout(branch)
        return norm(x) if self.post_norm else x


class Embedding(nn.Embedding):
    """Token embeddings times sqrt(D) plus sinusoidal positions."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__(vocabulary, width, padding_idx=PAD)
        nn.init.normal_(self.weight, std=width**-0.5)
        with torch.no_grad():
            self.weight[PAD].zero_()

    def embed(self, tokens: Int[Tensor, "B N"], first_position: int | Int[Tensor, "B 1"] = 0) -> Float[Tensor, "B N D"]:
        positions = first_position + torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self(tokens) * math.sqrt(self.embedding_dim)
        return x + sinusoids(positions, self.embedding_dim).to(x.dtype)


class Encoder(nn.Module):
    """Transformer encoder, causal with delay k, or bidirectional.

    With delay k, state t is computed after token t+k-1 has been read and sees all tokens up to it; with `whole_words`
    also the rest of that token's word, since streams read whole words (`mark_words` sets where words begin). Only one
    layer looks ahead (`look_ahead_layer`, by default the first), so the look-ahead does not accumulate over layers.
    Layers below it are causal and run on every token read, so it sees contextual states of the next tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        inner: int,
        heads: int,
        layers: int,
        dropout: float,
        causal: bool = True,
        whole_words: bool = False,
        look_ahead_layer: int = 0,
    ) -> None:
        super().__init__()
        require(
            causal or not whole_words, "whole_words is for causal encoders; bidirectional ones see the whole sentence"
        )
        self.causal = causal
        self.look_ahead_layer = look_ahead_layer
        # Not trained, but a parameter, so that it is saved and exported with the weights. Until `mark_words` is called,
        # every token is a word.
        self.word_starts = nn.Parameter(torch.ones(vocabulary), requires_grad=False) if whole_words else None
        self.embedding = Embedding(vocabulary, width)
        self.layers: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(width, inner, heads, dropout) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def mark_words(self, starts: Sequence[bool]) -> None:
        """Set which tokens begin a word, for `whole_words`."""
        if self.word_starts is not None:
            self.word_starts.copy_(torch.tensor(starts))

    def words(self, source: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """Return the word index of each token; without `whole_words` every token is a word."""
        starts = torch.ones_like(source) if self.word_starts is None else self.word_starts[source].long()
        return starts.cumsum(-1)

    def seen(self, source: Int[Tensor, "B S"], delay: int) -> Int[Tensor, "B S"]:
        """Return how many tokens each state sees, possibly including padding."""
        return tokens_seen(self.words(source), delay)

    def forward(
        self, source: Int[Tensor, "B S"], source_mask: Bool[Tensor, "B S"] | None = None, delay: int = 1
    ) -> Float[Tensor, "B S D"]:
        """Encode whole sentences; `source_mask` is True on tokens, None without padding."""
        check_delay(delay)
        x = self.dropout(self.embedding.embed(source))
        padding = None if source_mask is None else source_mask[:, None, None, :]
        for index, layer in enumerate(self.layers):
            if index == self.look_ahead_layer and (ahead := self._look_ahead(source, delay)) is not None:
                x = layer(x, ahead if padding is None else ahead & padding)
            else:
                # Padding follows all tokens, so a causal layer never attends to it.
                x = layer(x, None if self.causal else padding, causal=self.causal)
        return self.final_norm(x)

    def _look_ahead(self, source: Int[Tensor, "B S"], delay: int) -> Tensor | None:
        """Return the mask of the layer that looks ahead, or None if it is causal or full attention."""
        length = source.shape[1]
        if self.word_starts is not None:
            return torch.arange(length, device=source.device) < self.seen(source, delay)[:, None, :, None]  # [B 1 S S]
        return look_ahead_mask(length, length, 0, delay, source.device) if self.causal and delay > 1 else None


def tokens_seen(words: Int[Tensor, "B S"], delay: int) -> Int[Tensor, "B S"]:
    """Return how many tokens each state sees: up to the end of the word of token t+k-1."""
    last = (torch.arange(words.shape[1], device=words.device) + delay - 1).clamp(max=words.shape[1] - 1)
    return torch.searchsorted(words, words[:, last], right=True)


def look_ahead_mask(
    queries: int, keys: int, first_query: int, delay: int, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Return a mask for query t, starting at `first_query`, to attend to keys up to t + delay - 1."""
    t = torch.arange(first_query, first_query + queries, device=device)
    return torch.arange(keys, device=device)[None, :] < (t + delay)[:, None]


def sinusoids(positions: Int[Tensor, "*N"], width: int) -> Float[Tensor, "*N D"]:
    """Return sinusoidal positions: sines, then cosines, wavelengths from 2 pi to 10,000 * 2 pi."""
    half = width // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / max(half - 1, 1)
    angles = positions[..., None].float() * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat([angles.sin(), angles.cos()], -1)


def length_mask(lengths: Int[Tensor, " B"], longest: int, device: torch.device) -> Bool[Tensor, "B L"] | None:
    """Return a mask of positions before each length, or None without padding. `lengths` is a CPU tensor."""
    if bool((lengths == longest).all()):
        return None
    return torch.arange(longest, device=device) < lengths.to(device, non_blocking=True)[:, None]


@contextmanager
def without_dropout(*modules: nn.Module) -> Iterator[None]:
    """Switch dropout off in `modules` during the block."""
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)


def check_sizes(width: int, heads: int, dropout: float) -> None:
    """Raise ConfigError unless a Transformer can have these sizes."""
    require(0 <= dropout < 1, f"dropout must be at least 0 and below 1, got {dropout}")
    require(heads >= 1 and width % heads == 0, f"width ({width}) must be a multiple of heads ({heads})")
    require(width % 2 == 0, f"width must be even, got {width}")


def check_delay(delay: int) -> None:
    require(delay >= 1, f"delay k must be at least 1, got {delay}")


def check_tokens(tokens: Int[Tensor, "B N"], vocabulary: int, side: str) -> None:
    """Raise VocabularyError if a token id is outside the vocabulary.

    Skipped on an accelerator, where it would force a synchronisation; there tokens come from a token store that was
    checked on opening.
    """
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise VocabularyError(
            f"{side} token id {bad} is not in 0..{vocabulary - 1}: was the text encoded with this vocabulary?"
        )


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` for GPU arguments, where launching many small kernels is slow."""
    compile_once = cache(lambda: torch.compile(function, dynamic=True))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        chosen = compile_once() if isinstance(first, Tensor) and first.is_cuda else function
        return chosen(*args, **kwargs)

    return run


class Loss(NamedTuple):
    """Summed loss of a batch; the training loop divides by the tokens of an update."""

    total: Tensor  # with label smoothing; the training objective
    likelihood: Tensor  # the negative log-likelihood alone
    tokens: Tensor  # target tokens counted
    skipped: Tensor  # sentences without a valid alignment; they count neither here nor in `tokens`

    @staticmethod
    def of_aligned(
        total: Tensor, likelihood: Tensor, lengths: Int[Tensor, " B"], alignable: Bool[Tensor, " B"]
    ) -> Loss:
        """Return the loss with the counts of the sentences that can be aligned."""
        return Loss(total, likelihood, (lengths * alignable).sum(), (~alignable).sum())


def project_and_loss(
    frames: Float[Tensor, "B U D"],
    table: Float[Tensor, "V D"],
    columns: Int[Tensor, "B C"],
    weights: Float[Tensor, "B U"],
    align: Align,
    smoothing: float,
    chunk: int = FRAMES_PER_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the label-smoothed loss, (1 - eps) * NLL + eps * uniform cross entropy, and the NLL alone, which carries
    no gradient.

    `weights` are one on real frames and zero on padding.
    """
    with autocast_disabled(frames) as (frames,):
        arguments = (frames, table, columns, weights, align, smoothing, chunk, torch.is_grad_enabled())
        return _ProjectAndLoss.apply(*arguments)  # type: ignore[no-untyped-call]


@contextmanager
def autocast_disabled(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cast tensors to the autocast type, then disable autocast, so that products run in the type of their operands."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(each.to(dtype) for each in tensors)
    with torch.autocast(device, enabled=False):
        yield tensors


def sentence_chunks(frames: Float[Tensor, "B U D"], size: int) -> Iterator[slice]:
    """Yield slices of sentences that together have at most `size` frames, or of single sentences."""
    sentences = max(1, size // frames.shape[1])
    return (slice(start, start + sentences) for start in range(0, len(frames), sentences))


class GradientsInForward(torch.autograd.Function):
    """A function whose forward computes and saves the gradients of its first arguments.

    Backward only scales them by the gradient of the first output.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient * gradients[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled)))


class _ProjectAndLoss(GradientsInForward):
    @staticmethod
    def forward(
        ctx: Any,
        frames: Tensor,
        table: Tensor,
        columns: Tensor,
        weights: Tensor,
        align: Align,
        smoothing: float,
        chunk: int,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        vocabulary_pass = _sweep_vocabulary(frames, table.to(frames.dtype), columns, weights, chunk, with_gradients)
        negative, posterior = align(vocabulary_pass.log_probs)
        if with_gradients:
            ctx.save_for_backward(*_gradients(vocabulary_pass, frames, table, columns, posterior, weights, smoothing))
        ctx.mark_non_differentiable(negative)
        return (1 - smoothing) * negative + smoothing * vocabulary_pass.uniform, negative


class _VocabularyPass(NamedTuple):
    log_probs: Float[Tensor, "B U C"]
    uniform: Tensor  # sum over counted frames of the mean of -log p over the vocabulary
    grad_frames: Float[Tensor, "B U D"]  # p without the label columns times the table
    grad_table: Float[Tensor, "V D"]  # the same times the frames


def _sweep_vocabulary(
    frames: Tensor,
    table: Tensor,
    columns: Int[Tensor, "B C"],
    weights: Float[Tensor, "B U"],
    chunk: int,
    with_gradients: bool,
) -> _VocabularyPass:
    """Compute normalisers, label columns and the products with the softmax, in one pass over chunks of frames x V."""
    B, U, _ = frames.shape
    h, w = frames.flatten(0, 1), weights.flatten()  # [B*U D], [B*U]
    column_of = columns[:, None, :].expand(-1, U, -1).flatten(0, 1)  # [B*U C]
    log_probs = w.new_empty(column_of.shape)
    normalisers = torch.empty_like(w)
    grad_frames, grad_table = torch.empty_like(h), torch.zeros_like(table, dtype=w.dtype)
    for part in (slice(start, start + chunk) for start in range(0, B * U, chunk)):
        logits = h[part] @ table.T
        normalisers[part], p = softmax_rows(logits, w[part])
        log_probs[part] = logits.gather(-1, column_of[part]).to(w.dtype) - normalisers[part, None]
        if with_gradients:
            p.scatter_(-1, column_of[part], 0)
            grad_frames[part] = p @ table
            grad_table += p.T @ h[part]
    mean_logits = h.to(w.dtype) @ table.to(w.dtype).mean(0)
    uniform = ((normalisers - mean_logits) * w).sum()
    return _VocabularyPass(log_probs.unflatten(0, (B, U)), uniform, grad_frames.unflatten(0, (B, U)), grad_table)


def _gradients(
    vocabulary_pass: _VocabularyPass,
    frames: Tensor,
    table: Tensor,
    columns: Int[Tensor, "B C"],
    posterior: Float[Tensor, "B U C"],
    weights: Float[Tensor, "B U"],
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Complete the gradients of frames and table with the label columns and the uniform part."""
    V, dtype = table.shape[0], weights.dtype
    wide, label_rows = frames.to(dtype), table[columns].to(dtype)  # [B U D], [B C D]
    p = vocabulary_pass.log_probs.exp() * weights[:, :, None] * first_occurrences(columns)[:, None, :]
    difference = p - (1 - smoothing) * posterior
    grad_frames = vocabulary_pass.grad_frames.to(dtype) + difference @ label_rows
    grad_frames -= smoothing * weights[:, :, None] * table.to(dtype).mean(0)
    grad_table = vocabulary_pass.grad_table - smoothing / V * (wide * weights[:, :, None]).sum((0, 1))
    grad_table.index_add_(0, columns.flatten(), (difference.transpose(1, 2) @ wide).flatten(0, 1))
    return grad_frames.to(frames.dtype), grad_table.to(table.dtype)


def softmax_rows(logits: Float[Tensor, "N V"], weights: Float[Tensor, " N"]) -> tuple[Tensor, Float[Tensor, "N V"]]:
    """Return the log-normaliser of each row (at least fp32), and the weighted softmax in the logits' type."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from simulmt.model import triton_kernels

        return triton_kernels.softmax_rows(logits, weights)
    wide = at_least_float32(logits)
    normalisers = wide.logsumexp(-1)
    return normalisers, ((wide - normalisers[:, None]).exp() * weights[:, None]).to(logits.dtype)


def first_occurrences(columns: Int[Tensor, "B C"]) -> Bool[Tensor, "B C"]:
    """Return a mask of the first column of each distinct label, since repeated labels share a probability."""
    equal = columns[:, :, None] == columns[:, None, :]  # [B C C]
    return ~equal.tril(-1).any(-1)


def at_least_float32(x: Tensor) -> Tensor:
    """Cast to fp32 unless already wider; losses are never computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
