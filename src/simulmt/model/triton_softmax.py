"""Softmax as a Triton kernel; imported only on GPUs, since Triton comes with CUDA builds only.

One program per row, held in registers: logits are read once, where compiled PyTorch reads them three times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """See simulmt.model.kernels.softmax_rows."""
    rows, columns = logits.shape
    softmax, normalisers = torch.empty_like(logits), torch.empty_like(weights)
    block = triton.next_power_of_2(columns)
    warps = min(32, max(4, block // 1024))
    _softmax_kernel[(rows,)](logits, weights, softmax, normalisers, columns, BLOCK=block, num_warps=warps)
    return normalisers, softmax
