"""Compilation of small functions on GPUs, and the softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` for GPU arguments, where launching many small kernels is slow."""
    compile_once = cache(lambda: torch.compile(function, dynamic=True))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        chosen = compile_once() if isinstance(first, Tensor) and first.is_cuda else function
        return chosen(*args, **kwargs)

    return run


def softmax_rows(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-normaliser of each row (at least fp32), and the weighted softmax in the logits' type."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from simulmt.model import triton_kernels

        return triton_kernels.softmax_rows(logits, weights)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normalisers = wide.logsumexp(-1)
    return normalisers, ((wide - normalisers[:, None]).exp() * weights[:, None]).to(logits.dtype)
