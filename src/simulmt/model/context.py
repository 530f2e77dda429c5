"""The label context of a transducer: the part of a symbol's score that depends on what was written.

An additive context depends on the last few symbols only. One with attention also sees the frame, and what was read and
written before: each earlier source position, its frames and the symbols that they wrote, is an entry of a memory.

Axis letters: B batch, N samples, S source positions, T labels, C = T + 1 histories, L symbols of a history, V
vocabulary, D width, I hidden layer, R rank.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from simulmt.model.layers import Attention, KeysValues, KeyValueBuffer
from simulmt.text import MASK, PAD, START

LabelContextKind = Literal["additive", "attention"]


class LabelContext(nn.Module):
    """Scores of the next symbol, as `forward(...) @ table.T`."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        symbols: int,
        inner: int,
        rank: int,
        dropout: float,
        kind: LabelContextKind = "additive",
        heads: int = 1,
    ) -> None:
        super().__init__()
        self.symbols = symbols
        self.dropout = dropout
        self.expand = nn.Linear(symbols * width, inner)
        self.contract = nn.Linear(inner, rank)
        self.table = nn.Parameter(
            torch.zeros(vocabulary, rank)
        )  # zero: initially the scores do not depend on the context
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.expand_frame: nn.Linear | None = None
        self.memory: PositionAttention | None = None
        if kind == "attention":  # initially without effect, so that it can start from the weights of an additive one
            self.expand_frame = nn.Linear(width, inner, bias=False)
            nn.init.zeros_(self.expand_frame.weight)
            self.memory = PositionAttention(width, inner, heads)

    def histories(self, labels: Int[Tensor, "*B T"]) -> Int[Tensor, "*B C L"]:
        """Return the last symbols, newest first, before each label and after the last one."""
        padded = F.pad(labels, (self.symbols, 0), value=START)
        return padded.unfold(-1, self.symbols, 1).flip(-1)

    def mask_tokens(self, history: Int[Tensor, "*N L"]) -> Int[Tensor, "*N L"]:
        """During training on references, replace some symbols by MASK, since at inference the history has errors."""
        if not self.training or self.dropout == 0:
            return history
        return history.masked_fill(torch.rand(history.shape, device=history.device) < self.dropout, MASK)

    def forward(
        self,
        history: Int[Tensor, "*N L"],
        embedding: Float[Tensor, "V D"],
        frames: Float[Tensor, "*N D"] | None = None,
        attended: Float[Tensor, "*N I"] | None = None,
    ) -> Float[Tensor, "*N R"]:
        """Return what the scores are computed from, given the last symbols, newest first."""
        return self.combine(self.expand_history(history, embedding), frames, attended)

    def expand_history(self, history: Int[Tensor, "*N L"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "*N I"]:
        """Return the part of the hidden layer that depends on the history."""
        return self.expand(_embed(history, embedding).flatten(-2))

    def combine(
        self,
        hidden: Float[Tensor, "*N I"],
        frames: Float[Tensor, "*N D"] | None = None,
        attended: Float[Tensor, "*N I"] | None = None,
    ) -> Float[Tensor, "*N R"]:
        """Finish `forward`, given the output of `expand_history`."""
        if self.expand_frame is not None and frames is not None:
            hidden = hidden + self.expand_frame(frames)
        if attended is not None:
            hidden = hidden + attended
        return self.contract(F.relu(hidden))

    def start_memory(
        self, frames: Float[Tensor, "B S mu D"], samples: int, embedding: Float[Tensor, "V D"]
    ) -> Memory | None:
        """Return the memory of sentences of which nothing was written, or None if the context does not attend."""
        return None if self.memory is None else Memory(self.memory, frames, samples, embedding)


class PositionAttention(nn.Module):
    """Attention of a source position to those before it, each with its frames and the symbols that they wrote.

    Entry i + 1 of the memory is the sum of all frames and symbols of position i; entry 0, for the first position, has
    no frames, and PAD for their symbols. The query is the sum of the frames of the position and of the last symbol
    written before it.
    """

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(width)
        self.entry_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.attention.output = nn.Linear(width, inner)
        nn.init.zeros_(self.attention.output.weight)
        nn.init.zeros_(self.attention.output.bias)

    def forward(
        self,
        frames: Float[Tensor, "B S mu D"],
        symbols: Int[Tensor, "B N S mu"],
        last: Int[Tensor, "B N S"],
        embedding: Float[Tensor, "V D"],
    ) -> Float[Tensor, "B N S I"]:
        """Attend with all positions of sampled translations; `last` is the last symbol before each position."""
        positions = frames.sum(2)[:, None]  # [B 1 S D]
        before = F.pad(symbols[:, :, :-1], (0, 0, 1, 0), value=PAD)
        entries = F.pad(positions[:, :, :-1], (0, 0, 1, 0)) + _embed(before, embedding).sum(3)  # [B N S D]
        queries = self.query_norm(positions + _embed(last, embedding))
        keys_values = self.project(entries.flatten(0, 1))
        return self.attention(queries.flatten(0, 1), keys_values, causal=True).unflatten(0, symbols.shape[:2])

    def project(self, entries: Float[Tensor, "B S D"]) -> KeysValues:
        return self.attention.project(self.entry_norm(entries))


class Memory:
    """What sentences have read and written, position by position."""

    def __init__(
        self,
        module: PositionAttention,
        frames: Float[Tensor, "B S mu D"],
        samples: int,
        embedding: Float[Tensor, "V D"],
    ) -> None:
        B, S, mu, _ = frames.shape
        self._module = module
        self._positions = frames.sum(2)[:, :, None]  # [B S 1 D]
        self._entry = _embed(torch.full((B, samples), PAD, device=frames.device), embedding) * mu  # the next one
        self._keys_values = KeyValueBuffer.like(module.project(self._entry.flatten(0, 1)[:, None]), S)

    def attend(self, last: Int[Tensor, "B N"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "B N I"]:
        """Return the part of the hidden layer for the next position, given the last symbol written."""
        self._keys_values = self._keys_values.append(self._module.project(self._entry.flatten(0, 1)[:, None]))
        self._entry = self._positions[:, self._keys_values.length - 1].expand_as(self._entry)
        queries = self._module.query_norm(self._entry + _embed(last, embedding)).flatten(0, 1)
        return self._module.attention(queries[:, None], self._keys_values.filled).view(*last.shape, -1)

    def append(self, symbol: Int[Tensor, "B N"], embedding: Float[Tensor, "V D"]) -> None:
        """Add the symbol of a frame to the entry of its position."""
        self._entry = self._entry + _embed(symbol, embedding)


def _embed(symbols: Int[Tensor, "*N"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "*N D"]:
    return F.embedding(symbols, embedding) * math.sqrt(embedding.shape[1])
