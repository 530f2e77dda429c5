"""Helpers for tests of networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Network = TypeVar("Network", bound=nn.Module)


def randomise(network: Network, seed: int = 0, std: float = 0.5) -> Network:
    """Randomise all parameters, in fp64 and eval mode: zero biases and unit gains could hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    network.double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=std, generator=generator)
    return network


def assert_same(
    found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], tolerance: float = 1e-10
) -> None:
    """Assert that tensors are equal up to rounding, in shape and in type."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def parameter_count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def gradients(network: nn.Module, loss: Tensor) -> list[Tensor]:
    """Return the gradient of `loss` by every parameter; zero if there is none."""
    parameters = list(network.parameters())
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def sum_gradients(each: Sequence[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]


def pad(sentences: Sequence[Sequence[int]], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Return sentences as a padded batch, and their lengths."""
    longest = max(map(len, sentences))
    rows = [list(sentence) + [filler] * (longest - len(sentence)) for sentence in sentences]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), longest), torch.tensor(
        [len(sentence) for sentence in sentences]
    )


class Allocations(TorchDispatchMode):
    """Records the operations inside the block whose results hold at least `elements` numbers."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = elements
        self.operations: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                # The storage counts: a view that expands a small tensor takes no memory.
                numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, numbers)
                if numbers >= self.elements:
                    self.operations.append(str(func))
        return result
