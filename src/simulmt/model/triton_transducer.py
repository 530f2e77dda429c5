"""The transducer's forward and backward pass for GPUs; imported only where one is in use, as Triton comes with CUDA.

One program a sentence and one lane a number of labels written. From one frame to the next a path stays in its lane (the
blank) or moves to the next one (a label), which is read from memory behind a barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from simulmt.model.transducer import Posteriors

NEVER = tl.constexpr(-1e30)  # the log-probability of what cannot be; finite, so that differences stay defined


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_add(a, b):  # type: ignore[no-untyped-def]
    high = tl.maximum(a, b)
    return high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - high))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_backward_kernel(  # type: ignore[no-untyped-def]
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

    alpha = tl.where(i == 0, 0.0, NEVER)
    for frame in range(frames):
        row = frame * C
        tl.store(alphas + row + i, alpha, mask=is_state)
        tl.debug_barrier()
        previous = tl.load(alphas + row + i - 1, mask=has_previous, other=NEVER)
        write = tl.load(labels + row + i - 1, mask=has_previous, other=0.0)
        wait = tl.load(blanks + row + i, mask=is_state, other=0.0)
        alpha = tl.where(is_state, _log_add(alpha + wait, previous + write), NEVER)
    evidence = tl.sum(tl.where(i == count, alpha, 0.0))
    tl.store(negative + sentence, -evidence)

    beta = tl.where(i == count, 0.0, NEVER)  # what follows the frame
    for step in range(frames):
        row = (frames - 1 - step) * C
        scratch = betas + (step % 2) * C  # two in turn: nobody overwrites what a neighbour still reads
        tl.store(scratch + i, beta, mask=is_state)
        tl.debug_barrier()
        following = tl.load(scratch + i + 1, mask=has_next, other=NEVER)
        alpha = tl.load(alphas + row + i, mask=is_state, other=NEVER)
        waits = tl.load(blanks + row + i, mask=is_state, other=0.0) + beta
        writes = tl.load(labels + row + i, mask=has_next, other=0.0) + following
        tl.store(blank_posterior + row + i, tl.exp(alpha + waits - evidence), mask=is_state)
        tl.store(label_posterior + row + i, tl.exp(alpha + writes - evidence), mask=has_next)
        beta = tl.where(is_state, _log_add(waits, writes), NEVER)


def forward_backward(
    blank: Tensor, label: Tensor, frame_lengths: Tensor, label_lengths: Tensor, alignable: Tensor
) -> tuple[Tensor, Posteriors]:
    """See simulmt.model.transducer.forward_backward."""
    from simulmt.model.transducer import Posteriors

    B, U, C = blank.shape
    blank, label = blank.contiguous(), label.contiguous()
    negative = blank.new_empty(B)
    posteriors = Posteriors(torch.zeros_like(blank), torch.zeros_like(label))
    alphas, betas = torch.empty_like(blank), blank.new_empty(B, 2, C)
    lengths = frame_lengths.int(), label_lengths.int(), alignable.int()
    block = triton.next_power_of_2(C)
    _forward_backward_kernel[(B,)](
        blank,
        label,
        *lengths,
        alphas,
        betas,
        negative,
        *posteriors,
        U,
        C,
        BLOCK=block,
        num_warps=min(16, max(1, block // 64)),
    )
    return negative, posteriors
