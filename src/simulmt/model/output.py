"""The output layer fused with the loss above it: frames x V is never stored.

Every loss here is a cross entropy with soft targets. Its gradient by the logits of a frame is

    p - (1 - eps) * posterior - eps / V

where p is the softmax, eps the label smoothing, and `posterior`, zero outside a few label columns, says how much of the
frame belongs to each label. So the two large products of the backward pass, p times the table and p times the frames,
need not wait for the posterior: they are done chunk by chunk while the normalisers are computed, and what is sparse or
uniform is taken off afterwards. That is three matrix products over frames x V, as many as storing it would take.

Axis letters: B sentences, U frames of each, C label columns of each, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from simulmt.model.kernels import softmax_rows

FRAMES_PER_CHUNK = 8192

# From the log-probabilities of the label columns, [B U C], to the sum of negative log-likelihoods and the posterior.
Align = Callable[[Tensor], tuple[Tensor, Tensor]]


class Loss(NamedTuple):
    """A batch's loss, summed; the training loop divides by the tokens of all batches of an update."""

    total: Tensor  # with label smoothing; what is minimised
    likelihood: Tensor  # the negative log-likelihood alone
    tokens: Tensor  # target tokens counted
    skipped: Tensor  # sentences no alignment can reach; they add nothing, here or to `tokens`


def project_and_loss(
    frames: Float[Tensor, "B U D"],
    table: Float[Tensor, "V D"],
    columns: Int[Tensor, "B C"],
    weights: Float[Tensor, "B U"],
    align: Align,
    smoothing: float,
    chunk: int = FRAMES_PER_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Two sums: (1 - eps) times the negative log-likelihood plus eps times the cross entropy with the uniform
    distribution, which carries the gradient; and the negative log-likelihood alone, which does not.

    `weights` are one on the frames that count and zero on the others.
    """
    device = frames.device.type
    if torch.is_autocast_enabled(device):
        frames = frames.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):  # below, each product runs in the precision of its operands
        return _ProjectAndLoss.apply(frames, table, columns, weights, align, smoothing, chunk)  # type: ignore[no-untyped-call]


class _ProjectAndLoss(torch.autograd.Function):
    """Forward computes the gradients too, up to the factor that only backward knows."""

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
    ) -> tuple[Tensor, Tensor]:
        swept = _sweep_vocabulary(frames, table.to(frames.dtype), columns, weights, chunk)
        negative, posterior = align(swept.log_probs)
        if any(ctx.needs_input_grad[:2]):
            soft = (1 - smoothing) * posterior
            ctx.save_for_backward(*_subtract_targets(swept, frames, table, columns, soft, weights, smoothing))
        ctx.mark_non_differentiable(negative)
        return (1 - smoothing) * negative + smoothing * swept.uniform, negative

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_frames, by_table = ctx.saved_tensors
        return by_frames * gradients[0], by_table * gradients[0], None, None, None, None, None


class _Swept(NamedTuple):
    log_probs: Float[Tensor, "B U C"]
    uniform: Tensor  # sum over counted frames of the mean of -log p over the vocabulary
    by_frames: Float[Tensor, "B U D"]  # p times table
    by_table: Float[Tensor, "V D"]  # p times frames


def _sweep_vocabulary(
    frames: Tensor, table: Tensor, columns: Int[Tensor, "B C"], weights: Float[Tensor, "B U"], chunk: int
) -> _Swept:
    """One pass over frames x V in chunks: normalisers, label columns, and the products with the softmax."""
    B, U, _ = frames.shape
    h, w = frames.flatten(0, 1), weights.flatten()  # [B*U D], [B*U]
    column_of = columns[:, None, :].expand(-1, U, -1).flatten(0, 1)  # [B*U C]
    log_probs = w.new_empty(column_of.shape)
    normalisers = torch.empty_like(w)
    by_frames, by_table = torch.empty_like(h), torch.zeros_like(table, dtype=w.dtype)
    for part in (slice(start, start + chunk) for start in range(0, B * U, chunk)):
        logits = h[part] @ table.T
        normalisers[part], p = softmax_rows(logits, w[part])
        log_probs[part] = logits.gather(-1, column_of[part]).to(w.dtype) - normalisers[part, None]
        by_frames[part] = p @ table
        by_table += p.T @ h[part]
    mean_logits = h @ table.mean(0)
    uniform = ((normalisers - mean_logits) * w).sum()
    return _Swept(log_probs.unflatten(0, (B, U)), uniform, by_frames.unflatten(0, (B, U)), by_table)


def _subtract_targets(
    swept: _Swept,
    frames: Tensor,
    table: Tensor,
    columns: Int[Tensor, "B C"],
    soft: Float[Tensor, "B U C"],
    weights: Float[Tensor, "B U"],
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """From the products with p to the gradients: take off the soft targets, which are sparse or uniform."""
    V, dtype = table.shape[0], weights.dtype
    wide, label_rows = frames.to(dtype), table[columns].to(dtype)  # [B U D], [B C D]
    by_frames = swept.by_frames.to(dtype) - soft @ label_rows
    by_frames -= smoothing * weights[:, :, None] * table.to(dtype).mean(0)
    by_table = swept.by_table - smoothing / V * (wide * weights[:, :, None]).sum((0, 1))
    by_table.index_add_(0, columns.flatten(), (soft.transpose(1, 2) @ wide).flatten(0, 1), alpha=-1)
    return by_frames.to(frames.dtype), by_table.to(table.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Losses are computed in fp32 even where the network runs in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
