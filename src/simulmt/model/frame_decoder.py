"""The decoder of a transducer: an autoregressive model that writes one symbol, or the blank, per frame.

A label context knows the last few symbols only. The decoder is a causal Transformer over frames, each with the last
symbol written before it, so it knows all that was read and written. It reads no further than the frame does: a stream
runs it step by step, with cached keys and values.

It is trained on the reference with a known symbol for every frame. The transducer without the decoder provides these:
its lattice of alignments gives the frame by which each label has been written with probability `quantile`. Labels are
written in order, at most one per frame, so these frames are strictly increasing: a valid alignment. A lower quantile
writes earlier.

Axis letters: B batch, U frames, T labels, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.model.layers import EncoderLayer, KeyValueBuffer, sinusoids
from simulmt.text import BLANK, MASK, START


class FrameDecoder(nn.Module):
    """Causal Transformer layers over frames and what was written before them; adds to the frames."""

    def __init__(self, width: int, inner: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers: Sequence[EncoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(width, inner, heads, dropout) for _ in range(layers)
        )
        self.waited = nn.Parameter(torch.zeros(width))  # added if the previous frame wrote nothing
        self.final_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)
        nn.init.zeros_(self.output.weight)  # at first what was written does not matter
        nn.init.zeros_(self.output.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, frames: Float[Tensor, "B U D"], symbols: Int[Tensor, "B U"], embedding: Float[Tensor, "V D"]
    ) -> Float[Tensor, "B U D"]:
        """Return all frames, given the symbols that they write (BLANK for none)."""
        last, waited = self._mask_tokens(last_written(symbols)), F.pad(symbols[:, :-1] == BLANK, (1, 0))
        x = self.dropout(self._embed(frames, last, waited, embedding, 0))
        for layer in self.layers:
            x = layer(x, None, causal=True)
        return self._add_to(frames, x)

    def start(self, frames: Float[Tensor, "B U D"]) -> list[KeyValueBuffer]:
        """Return empty caches for all frames."""
        empty = self.layers[0].attention.project(frames[:, :0])
        return [KeyValueBuffer.like(empty, frames.shape[1]) for _ in self.layers]

    def step(
        self,
        frame: Float[Tensor, "B D"],
        last: Int[Tensor, " B"],
        waited: Bool[Tensor, " B"],
        embedding: Float[Tensor, "V D"],
        caches: list[KeyValueBuffer],
    ) -> Float[Tensor, "B D"]:
        """Return the next frame, given the last symbol written and whether the previous frame wrote none.

        Updates `caches`.
        """
        x = self._embed(frame[:, None], last[:, None], waited[:, None], embedding, caches[0].length)
        for index, layer in enumerate(self.layers):
            x, caches[index] = layer.step(x, caches[index])
        return self._add_to(frame, x[:, 0])

    def _embed(
        self, frames: Tensor, last: Int[Tensor, "B U"], waited: Bool[Tensor, "B U"], embedding: Tensor, first: int
    ) -> Float[Tensor, "B U D"]:
        D = frames.shape[-1]
        positions = sinusoids(torch.arange(first, first + frames.shape[1], device=frames.device), D)
        written = F.embedding(last, embedding) * math.sqrt(D) + waited[..., None] * self.waited
        return frames + (written + positions).to(frames.dtype)

    def _add_to(self, frames: Tensor, x: Tensor) -> Tensor:
        added: Tensor = self.output(self.final_norm(x))
        return frames + added

    def _mask_tokens(self, last: Int[Tensor, "B U"]) -> Int[Tensor, "B U"]:
        """During training, replace some symbols by MASK, since at inference the history has errors."""
        p = self.dropout.p
        return last.masked_fill(torch.rand(last.shape, device=last.device) < p, MASK) if self.training and p else last


def last_written(symbols: Int[Tensor, "*B U"]) -> Int[Tensor, "*B U"]:
    """Return the last symbol written before each frame, START if none."""
    U = symbols.shape[-1]
    frame = torch.arange(U, device=symbols.device)
    newest = torch.where(symbols == BLANK, -1, frame).cummax(-1).values  # the last frame that wrote, up to each
    symbol = symbols.gather(-1, newest.clamp(min=0)).masked_fill(newest < 0, START)
    return F.pad(symbol[..., :-1], (1, 0), value=START)


def quantile_alignment(
    label_posteriors: Float[Tensor, "B U T"], labels: Int[Tensor, "B T"], quantile: float
) -> Int[Tensor, "B U"]:
    """Return the symbol of each frame: a label where the probability that it has been written reaches `quantile`."""
    B, U, _ = label_posteriors.shape
    frames = (label_posteriors.cumsum(1) < quantile).sum(1)  # [B T]; padding, which has no posterior, gets U
    symbols = torch.full((B, U + 1), BLANK, device=labels.device)
    return symbols.scatter_(1, frames, labels)[:, :U]
