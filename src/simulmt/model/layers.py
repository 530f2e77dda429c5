"""Transformer layers: pre-norm, ReLU, sinusoidal positions.

Axis letters: B batch, S source, T target, D width, N new positions, L all positions so far.
Masks are boolean, True where a query may attend.

Encoders run over whole sentences; decoder layers also run step by step, with cached keys and values, for beam search.
Streaming is the runtime's: see simulmt.train.graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.config import require
from simulmt.errors import VocabularyError
from simulmt.text import PAD

NormPlacement = Literal["pre", "post"]
P = ParamSpec("P")
R = TypeVar("R")


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
        return self._finish(x, normed, self.attention.project(normed), mask, causal)

    def step(self, x: Float[Tensor, "B 1 D"], past: KeyValueBuffer) -> tuple[Float[Tensor, "B 1 D"], KeyValueBuffer]:
        """Run the next position of a causal layer; return its output, and `past` with its keys and values."""
        normed = self.attention_norm(x)
        past = past.append(self.attention.project(normed))
        return self._finish(x, normed, past.filled, None, causal=False), past

    def _finish(self, x: Tensor, normed: Tensor, context: KeysValues, mask: Tensor | None, causal: bool) -> Tensor:
        x = x + self.dropout(self.attention(normed, context, mask, causal))
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
