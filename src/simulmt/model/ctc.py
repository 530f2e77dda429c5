"""The CTC translator: causal encoder, length projection, and a CTC loss that never stores frames x V.

The loss needs only the normaliser of a frame and the columns of the blank and of the sentence's own labels, which
layers.py computes.

Axis letters: B batch, S source, T target, U = S * mu frames, D width, V vocabulary, C = T + 1 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from simulmt.config import require
from simulmt.model.layers import (
    FRAMES_PER_CHUNK,
    Batch,
    Embedding,
    Encoder,
    Loss,
    at_least_float32,
    check_sizes,
    check_tokens,
    length_mask,
    project_and_loss,
)
from simulmt.text import BLANK


@dataclass(frozen=True)
class CTCConfig:
    """Sizes of the CTC translator; defaults are the paper's."""

    source_vocabulary: int
    target_vocabulary: int
    width: int = 512
    inner: int = 2048
    heads: int = 8
    layers: int = 6
    mu: int = 2
    dropout: float = 0.1
    whole_words: bool = False  # see Encoder
    look_ahead_layer: int = 0  # 0-based; the paper looks ahead in the first layer

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}")
        inside = 0 <= self.look_ahead_layer < self.layers
        require(inside, f"look_ahead_layer must be in 0..{self.layers - 1}, got {self.look_ahead_layer}")
        require(self.mu >= 1, f"mu must be at least 1, got {self.mu}")
        check_sizes(self.width, self.heads, self.dropout)


class CTCModel(nn.Module):
    """CTC translator: causal encoder with delay k, mu frames per state, tied output layer."""

    def __init__(self, encoder: Encoder, target_vocabulary: int, mu: int) -> None:
        super().__init__()
        width = encoder.embedding.embedding_dim
        self.mu = mu
        self.encoder = encoder
        self.length_projection = nn.Linear(width, mu * width)
        nn.init.xavier_uniform_(self.length_projection.weight)
        nn.init.zeros_(self.length_projection.bias)
        self.target_embedding = Embedding(target_vocabulary, width)  # tied with the output layer

    @staticmethod
    def build(config: CTCConfig) -> CTCModel:
        sizes = (config.width, config.inner, config.heads, config.layers, config.dropout)
        encoder = Encoder(
            config.source_vocabulary, *sizes, whole_words=config.whole_words, look_ahead_layer=config.look_ahead_layer
        )
        return CTCModel(encoder, config.target_vocabulary, config.mu)

    def frames(self, H: Float[Tensor, "B S D"]) -> Float[Tensor, "B U D"]:
        """Project each state to mu consecutive frames; position-wise, so it cannot reorder."""
        return self.length_projection(H).unflatten(-1, (self.mu, -1)).flatten(1, 2)

    def logits(self, frames: Float[Tensor, "B U D"]) -> Float[Tensor, "B U V"]:
        return frames @ self.target_embedding.weight.T

    def forward(
        self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], delay: int = 1
    ) -> Float[Tensor, "B U V"]:
        """Return the logits of all frames of whole sentences in source order, as at inference."""
        return self.logits(self.frames(self.encode(source, source_lengths, delay)))

    def encode(
        self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], delay: int = 1
    ) -> Float[Tensor, "B S D"]:
        """Return the states of whole sentences; lengths are a CPU tensor."""
        check_tokens(source, self.encoder.embedding.num_embeddings, "source")
        return self.encoder(source, length_mask(source_lengths, source.shape[1], source.device), delay)

    def loss(self, batch: Batch, delay: int = 1, smoothing: float = 0.1) -> Loss:
        """Return the summed loss of a batch."""
        check_tokens(batch.target, self.target_embedding.num_embeddings, "target")
        H = self.encode(batch.source, batch.source_lengths, delay)
        return self.loss_of_states(H, batch, smoothing)

    def loss_of_states(self, H: Float[Tensor, "B S D"], batch: Batch, smoothing: float) -> Loss:
        """Return the loss of states, in encoder order or sorted."""
        alignments = Alignments.of(batch.target, batch.target_lengths, batch.source_lengths * self.mu)
        return ctc_loss(self.frames(H), self.target_embedding.weight, alignments, smoothing)


class Alignments(NamedTuple):
    """Labels and frames of a batch, with columns for the blank and the labels only.

    Column 0 is the blank, column i the i-th label.
    """

    columns: Int[Tensor, "B C"]
    frame_lengths: Int[Tensor, " B"]  # on the device, like label_lengths
    label_lengths: Int[Tensor, " B"]
    alignable: Bool[Tensor, " B"]  # the labels and the blanks they need fit into the frames

    @staticmethod
    def of(
        target: Int[Tensor, "B T"], target_lengths: Int[Tensor, " B"], frame_lengths: Int[Tensor, " B"]
    ) -> Alignments:
        if target.shape[1] == 0:  # all targets empty: keep one padding column for valid shapes
            target = target.new_zeros(target.shape[0], 1)
        positions = torch.arange(target.shape[1], device=target.device)
        columns = F.pad(target, (1, 0), value=BLANK)
        frame_lengths, label_lengths = (
            lengths.to(target.device, non_blocking=True) for lengths in (frame_lengths, target_lengths)
        )
        repeats = (target[:, 1:] == target[:, :-1]) & (positions[1:] < label_lengths[:, None])
        alignable = label_lengths + repeats.sum(-1) <= frame_lengths
        return Alignments(columns, frame_lengths, label_lengths, alignable)

    def classes(self) -> Int[Tensor, "B T"]:
        """Return the column of each label; equal labels share the first, since CTC needs a blank between them."""
        labels = self.columns[:, 1:]
        columns = torch.arange(1, labels.shape[1] + 1, device=labels.device)
        equal = labels[:, :, None] == labels[:, None, :]  # [B T T]
        return columns.where(equal, labels.shape[1]).amin(-1)

    def frame_weights(self, frames: int, like: Tensor) -> Float[Tensor, "B U"]:
        """Return 1 on real frames, 0 on padding and on sentences that cannot be aligned."""
        lengths = self.frame_lengths * self.alignable
        return (torch.arange(frames, device=like.device) < lengths[:, None]).to(like.dtype)


def alignment_likelihood(
    log_probs: Float[Tensor, "B U C"], alignments: Alignments
) -> tuple[Float[Tensor, ""], Float[Tensor, "B U C"]]:
    """Return the summed negative log-likelihood of the labels, and the posterior of each column per frame."""
    if log_probs.is_cuda and log_probs.dtype == torch.float32:
        from simulmt.model import triton_kernels

        negative, posterior = triton_kernels.ctc_forward_backward(log_probs, *alignments)
        return negative.sum(), posterior
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        negative = F.ctc_loss(
            log_probs.transpose(0, 1),
            alignments.classes(),
            alignments.frame_lengths,
            alignments.label_lengths,
            blank=0,
            reduction="none",
            zero_infinity=True,
        )
        (gradient,) = torch.autograd.grad(negative.sum(), log_probs)
    # PyTorch returns the gradient with respect to the logits below a log-softmax over these columns, probability minus
    # posterior; over a subset of the vocabulary there is no such log-softmax, so remove the probability.
    posterior = log_probs.detach().exp() - gradient
    weights = alignments.frame_weights(log_probs.shape[1], posterior)
    return (negative.detach() * weights[:, 0]).sum(), posterior * weights[:, :, None]


def ctc_loss(
    frames: Float[Tensor, "B U D"],
    table: Float[Tensor, "V D"],
    alignments: Alignments,
    smoothing: float,
    chunk: int = FRAMES_PER_CHUNK,
) -> Loss:
    """Return the loss of `frames @ table.T` without storing that product."""
    weights = alignments.frame_weights(frames.shape[1], at_least_float32(frames))
    align = partial(alignment_likelihood, alignments=alignments)
    total, negative = project_and_loss(frames, table, alignments.columns, weights, align, smoothing, chunk)
    return Loss.of_aligned(total, negative, alignments.label_lengths, alignments.alignable)
