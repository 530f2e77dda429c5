"""Output layer fused with the loss, so that frames x V is never stored.

Every loss here is a cross entropy with soft targets. Its gradient by the logits of a frame is

    p - (1 - eps) * posterior - eps / V

where p is the softmax, eps the label smoothing, and `posterior`, nonzero in a few label columns only, the probability
that the frame is aligned to each label. The two large products of the backward pass, p times the table and p times the
frames, do not need the posterior: they are computed chunk by chunk along with the normalisers, without the label
columns, which are added with the uniform part once the posterior is known. This takes three matrix products over frames
x V, as many as with stored logits, and computes p - posterior, often a small difference, in fp32.

Axis letters: B sentences, U frames of each, C label columns of each, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

FRAMES_PER_CHUNK = 8192

# From the log-probabilities of the label columns, [B U C], to the sum of negative log-likelihoods and the posterior.
Align = Callable[[Tensor], tuple[Tensor, Tensor]]


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


def cross_entropy(
    states: Float[Tensor, "*N D"],
    table: Float[Tensor, "V D"],
    labels: Int[Tensor, "*N"],
    weights: Float[Tensor, "*N"],
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Return the label-smoothed cross entropy of `states @ table.T`, one known label each, and the NLL alone."""
    weights = weights.flatten()[:, None].to(at_least_float32(states).dtype)

    def align(log_probs: Float[Tensor, "N 1 1"]) -> tuple[Float[Tensor, ""], Float[Tensor, "N 1 1"]]:
        return -(log_probs[:, :, 0] * weights).sum(), weights[:, :, None]

    states = states.flatten(0, -2)[:, None]  # [N 1 D]
    return project_and_loss(states, table, labels.flatten()[:, None], weights, align, smoothing)


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

    They lack only a factor, the gradient of the first output.
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
