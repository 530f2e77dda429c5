"""Triton kernels; imported only on GPUs, since Triton comes with CUDA builds only.

The forward-backward passes of CTC and of the transducer run one program per sentence, and stay on the GPU, where
PyTorch's CTC copies lengths to the CPU and stalls. From one frame to the next a path stays in its lane or moves to the
next; values of the neighbouring lane are exchanged through memory, with a barrier.

The softmax runs one program per row, held in registers: logits are read once, where compiled PyTorch reads them three
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from simulmt.model.transducer import Posteriors

LOG_ZERO = tl.constexpr(-1e30)  # finite, so that differences are defined


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_add(a, b):  # type: ignore[no-untyped-def]
    high = tl.maximum(a, b)
    return high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - high))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ctc_kernel(  # type: ignore[no-untyped-def]
    log_probs,  # [B U C]
    targets,  # [B C]: column 0 the blank, column i + 1 label i
    frame_lengths,
    label_lengths,
    alignable,
    alphas,  # [B U 2 C], scratch: the labels, then the blanks
    betas,  # [B 2 2 C], scratch: the last two frames
    negative,  # [B]
    posterior,  # [B U C], zero where nothing is written
    U,
    C,
    BLOCK: tl.constexpr,
):
    # Lane i holds the states "label i" and "the blank before label i".
    sentence = tl.program_id(0).to(tl.int64)
    if tl.load(alignable + sentence) == 0:
        tl.store(negative + sentence, 0.0)
        return
    frames, labels = tl.load(frame_lengths + sentence), tl.load(label_lengths + sentence)
    log_probs += sentence * U * C
    posterior += sentence * U * C
    alphas += sentence * U * 2 * C
    betas += sentence * 4 * C
    targets += sentence * C

    i = tl.arange(0, BLOCK)
    is_label, is_blank = i < labels, i <= labels
    target = tl.load(targets + i + 1, mask=is_label, other=-1)
    before = tl.load(targets + i, mask=is_label & (i > 0), other=-1)
    after = tl.load(targets + i + 2, mask=i + 1 < labels, other=-1)
    enters_by_skip = is_label & (i > 0) & (target != before)
    leaves_by_skip = (i + 1 < labels) & (target != after)

    label = tl.where(i == 0, 0.0, LOG_ZERO)  # before the first frame: about to enter label 0 ...
    blank = tl.where(i == 0, 0.0, LOG_ZERO)  # ... or the blank before it
    previous = tl.full((BLOCK,), LOG_ZERO, tl.float32)
    for frame in range(frames):
        row = log_probs + frame * C
        emit = tl.load(row + i + 1, mask=is_label, other=LOG_ZERO)
        emit_blank = tl.load(row)
        if frame > 0:
            label = _log_add(_log_add(label, blank), tl.where(enters_by_skip, previous, LOG_ZERO))
            blank = _log_add(blank, previous)
        label = tl.where(is_label, label + emit, LOG_ZERO)
        blank = tl.where(is_blank, blank + emit_blank, LOG_ZERO)
        scratch = alphas + frame * 2 * C
        tl.store(scratch + i, label, mask=is_blank)
        tl.store(scratch + C + i, blank, mask=is_blank)
        tl.debug_barrier()
        previous = tl.load(scratch + i - 1, mask=is_blank & (i > 0), other=LOG_ZERO)

    # The last frame is in the last label or in the blank after it.
    ends_in_label, ends_in_blank = (i == labels - 1) & (frames > 0), i == labels
    top = tl.maximum(tl.max(tl.where(ends_in_label, label, LOG_ZERO)), tl.max(tl.where(ends_in_blank, blank, LOG_ZERO)))
    total = tl.sum(
        tl.where(ends_in_label, tl.exp(label - top), 0.0) + tl.where(ends_in_blank, tl.exp(blank - top), 0.0)
    )
    log_likelihood = top + tl.log(total)
    tl.store(negative + sentence, -log_likelihood)

    label = tl.where(ends_in_label, 0.0, LOG_ZERO)  # beta of the last frame
    blank = tl.where(ends_in_blank, 0.0, LOG_ZERO)
    for step in range(frames):
        frame = frames - 1 - step
        scratch = alphas + frame * 2 * C
        label_posterior = tl.exp(tl.load(scratch + i, mask=is_blank, other=LOG_ZERO) + label - log_likelihood)
        blank_posterior = tl.exp(tl.load(scratch + C + i, mask=is_blank, other=LOG_ZERO) + blank - log_likelihood)
        tl.store(posterior + frame * C + i + 1, label_posterior, mask=is_label)
        tl.store(posterior + frame * C, tl.sum(tl.where(is_blank, blank_posterior, 0.0)))

        row = log_probs + frame * C
        label = tl.where(is_label, label + tl.load(row + i + 1, mask=is_label, other=LOG_ZERO), LOG_ZERO)
        blank = tl.where(is_blank, blank + tl.load(row), LOG_ZERO)
        scratch = betas + (step % 2) * 2 * C  # double buffer: do not overwrite what a neighbouring lane reads
        tl.store(scratch + i, label, mask=is_blank)
        tl.store(scratch + C + i, blank, mask=is_blank)
        tl.debug_barrier()
        next_label = tl.load(scratch + i + 1, mask=leaves_by_skip, other=LOG_ZERO)
        next_blank = tl.load(scratch + C + i + 1, mask=is_label, other=LOG_ZERO)
        blank = _log_add(blank, label)
        label = _log_add(_log_add(label, next_blank), next_label)


def ctc_forward_backward(
    log_probs: Tensor, columns: Tensor, frame_lengths: Tensor, label_lengths: Tensor, alignable: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each sentence's labels, [B], and the posterior of each column, [B U C].

    Both are zero for sentences that cannot be aligned. Each occurrence of a repeated label has its own column.
    """
    B, U, C = log_probs.shape
    negative, posterior = log_probs.new_empty(B), torch.zeros_like(log_probs)
    alphas, betas = log_probs.new_empty(B, U, 2, C), log_probs.new_empty(B, 2, 2, C)
    lengths = (frame_lengths, label_lengths, alignable)
    _run(_ctc_kernel, (log_probs, columns), lengths, (alphas, betas, negative, posterior))
    return negative, posterior


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _transducer_kernel(  # type: ignore[no-untyped-def]
    blanks,  # [B U C]
    labels,  # [B U C]
    frame_lengths,
    label_lengths,
    alignable,
    alphas,  # [B U C], scratch
    betas,  # [B 2 C], scratch: the last two frames
    negative,  # [B]
    blank_posterior,  # [B U C], zero where nothing is written
    label_posterior,  # [B U C], likewise
    U,
    C,
    BLOCK: tl.constexpr,
):
    # Lane i holds the state "i labels written".
    sentence = tl.program_id(0).to(tl.int64)
    if tl.load(alignable + sentence) == 0:
        tl.store(negative + sentence, 0.0)
        return
    frames, count = tl.load(frame_lengths + sentence), tl.load(label_lengths + sentence)
    offset = sentence * U * C
    blanks += offset
    labels += offset
    alphas += offset
    blank_posterior += offset
    label_posterior += offset
    betas += sentence * 2 * C

    i = tl.arange(0, BLOCK)
    is_state, has_next, has_previous = i <= count, i < count, (i > 0) & (i <= count)

    alpha = tl.where(i == 0, 0.0, LOG_ZERO)
    for frame in range(frames):
        row = frame * C
        tl.store(alphas + row + i, alpha, mask=is_state)
        tl.debug_barrier()
        previous = tl.load(alphas + row + i - 1, mask=has_previous, other=LOG_ZERO)
        write = tl.load(labels + row + i - 1, mask=has_previous, other=0.0)
        wait = tl.load(blanks + row + i, mask=is_state, other=0.0)
        alpha = tl.where(is_state, _log_add(alpha + wait, previous + write), LOG_ZERO)
    log_likelihood = tl.sum(tl.where(i == count, alpha, 0.0))
    tl.store(negative + sentence, -log_likelihood)

    beta = tl.where(i == count, 0.0, LOG_ZERO)  # of the last frame
    for step in range(frames):
        row = (frames - 1 - step) * C
        scratch = betas + (step % 2) * C  # double buffer, as above
        tl.store(scratch + i, beta, mask=is_state)
        tl.debug_barrier()
        following = tl.load(scratch + i + 1, mask=has_next, other=LOG_ZERO)
        alpha = tl.load(alphas + row + i, mask=is_state, other=LOG_ZERO)
        waits = tl.load(blanks + row + i, mask=is_state, other=0.0) + beta
        writes = tl.load(labels + row + i, mask=has_next, other=0.0) + following
        tl.store(blank_posterior + row + i, tl.exp(alpha + waits - log_likelihood), mask=is_state)
        tl.store(label_posterior + row + i, tl.exp(alpha + writes - log_likelihood), mask=has_next)
        beta = tl.where(is_state, _log_add(waits, writes), LOG_ZERO)


def transducer_forward_backward(
    blank: Tensor, label: Tensor, frame_lengths: Tensor, label_lengths: Tensor, alignable: Tensor
) -> tuple[Tensor, Posteriors]:
    """See simulmt.model.transducer.forward_backward."""
    from simulmt.model.transducer import Posteriors

    B, _, C = blank.shape
    blank, label = blank.contiguous(), label.contiguous()
    negative = blank.new_empty(B)
    posteriors = Posteriors(torch.zeros_like(blank), torch.zeros_like(label))
    alphas, betas = torch.empty_like(blank), blank.new_empty(B, 2, C)
    lengths = (frame_lengths, label_lengths, alignable)
    _run(_transducer_kernel, (blank, label), lengths, (alphas, betas, negative, *posteriors))
    return negative, posteriors


def _run(kernel: Any, scores: Sequence[Tensor], lengths: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Run one program per sentence, with a lane per column."""
    B, U, C = scores[0].shape
    block = triton.next_power_of_2(C)
    warps = min(16, max(1, block // 64))
    kernel[(B,)](*scores, *(each.int() for each in lengths), *written, U, C, BLOCK=block, num_warps=warps)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _softmax_kernel(logits, weights, softmax, normalisers, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    e = tl.exp(x - top)
    total = tl.sum(e, axis=0)
    tl.store(normalisers + row, top + tl.log(total))
    p = e * (tl.load(weights + row) / total)
    tl.store(softmax + row * columns + column, p.to(softmax.dtype.element_ty), mask=inside)


def softmax_rows(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See simulmt.model.layers.softmax_rows."""
    rows, columns = logits.shape
    softmax, normalisers = torch.empty_like(logits), torch.empty_like(weights)
    block = triton.next_power_of_2(columns)
    warps = min(32, max(4, block // 1024))
    _softmax_kernel[(rows,)](logits, weights, softmax, normalisers, columns, BLOCK=block, num_warps=warps)
    return normalisers, softmax
