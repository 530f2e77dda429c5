"""CTC forward-backward as a Triton kernel; imported only on GPUs, since Triton comes with CUDA builds only.

PyTorch's CTC copies lengths to the CPU and stalls; here everything stays on the GPU, and one launch does both
directions. There is one program per sentence. Its lanes hold the states "label i" and "the blank before label i", so a
frame depends only on the neighbouring lane of the previous one, which is read from memory after a barrier.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(-1e30)  # log of zero; finite, so that differences are defined


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_add(a, b):  # type: ignore[no-untyped-def]
    high = tl.maximum(a, b)
    return high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - high))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_backward_kernel(  # type: ignore[no-untyped-def]
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

    label = tl.where(i == 0, 0.0, NEVER)  # before the first frame: about to enter label 0 ...
    blank = tl.where(i == 0, 0.0, NEVER)  # ... or the blank before it
    previous = tl.full((BLOCK,), NEVER, tl.float32)
    for frame in range(frames):
        row = log_probs + frame * C
        emit = tl.load(row + i + 1, mask=is_label, other=NEVER)
        emit_blank = tl.load(row)
        if frame > 0:
            label = _log_add(_log_add(label, blank), tl.where(enters_by_skip, previous, NEVER))
            blank = _log_add(blank, previous)
        label = tl.where(is_label, label + emit, NEVER)
        blank = tl.where(is_blank, blank + emit_blank, NEVER)
        scratch = alphas + frame * 2 * C
        tl.store(scratch + i, label, mask=is_blank)
        tl.store(scratch + C + i, blank, mask=is_blank)
        tl.debug_barrier()
        previous = tl.load(scratch + i - 1, mask=is_blank & (i > 0), other=NEVER)

    # The last frame is in the last label or in the blank after it.
    ends_in_label, ends_in_blank = (i == labels - 1) & (frames > 0), i == labels
    top = tl.maximum(tl.max(tl.where(ends_in_label, label, NEVER)), tl.max(tl.where(ends_in_blank, blank, NEVER)))
    total = tl.sum(
        tl.where(ends_in_label, tl.exp(label - top), 0.0) + tl.where(ends_in_blank, tl.exp(blank - top), 0.0)
    )
    evidence = top + tl.log(total)
    tl.store(negative + sentence, -evidence)

    label, blank = tl.where(ends_in_label, 0.0, NEVER), tl.where(ends_in_blank, 0.0, NEVER)  # what follows the frame
    for step in range(frames):
        frame = frames - 1 - step
        scratch = alphas + frame * 2 * C
        by_label = tl.exp(tl.load(scratch + i, mask=is_blank, other=NEVER) + label - evidence)
        by_blank = tl.exp(tl.load(scratch + C + i, mask=is_blank, other=NEVER) + blank - evidence)
        tl.store(posterior + frame * C + i + 1, by_label, mask=is_label)
        tl.store(posterior + frame * C, tl.sum(tl.where(is_blank, by_blank, 0.0)))

        row = log_probs + frame * C
        label = tl.where(is_label, label + tl.load(row + i + 1, mask=is_label, other=NEVER), NEVER)
        blank = tl.where(is_blank, blank + tl.load(row), NEVER)
        scratch = betas + (step % 2) * 2 * C  # double buffer: do not overwrite what a neighbour reads
        tl.store(scratch + i, label, mask=is_blank)
        tl.store(scratch + C + i, blank, mask=is_blank)
        tl.debug_barrier()
        next_label = tl.load(scratch + i + 1, mask=leaves_by_skip, other=NEVER)
        next_blank = tl.load(scratch + C + i + 1, mask=is_label, other=NEVER)
        blank = _log_add(blank, label)
        label = _log_add(_log_add(label, next_blank), next_label)


def forward_backward(
    log_probs: Tensor, columns: Tensor, frame_lengths: Tensor, label_lengths: Tensor, alignable: Tensor
) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of each sentence's labels, [B], and the posterior of each column, [B U C].

    Both are zero for sentences that cannot be aligned. Each occurrence of a repeated label has its own column.
    """
    B, U, C = log_probs.shape
    negative, posterior = log_probs.new_empty(B), torch.zeros_like(log_probs)
    alphas, betas = log_probs.new_empty(B, U, 2, C), log_probs.new_empty(B, 2, 2, C)
    lengths = frame_lengths.int(), label_lengths.int(), alignable.int()
    block = triton.next_power_of_2(C)
    _forward_backward_kernel[(B,)](
        log_probs,
        columns,
        *lengths,
        alphas,
        betas,
        negative,
        posterior,
        U,
        C,
        BLOCK=block,
        num_warps=min(16, max(1, block // 64)),
    )
    return negative, posterior
