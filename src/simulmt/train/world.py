"""Distributed training: process rank, device and reductions.

Configured by torchrun's environment variables; without them the world is one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from simulmt.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process and the size of its group."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def distribute(self, module: nn.Module) -> nn.Module:
        """Wrap a module to average gradients over all processes."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def sync_gradients(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Average gradients over processes in this backward pass if `enabled`, or only accumulate them."""
        return nullcontext() if enabled or self.size == 1 else cast(DistributedDataParallel, module).no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def merge(self, part: dict[int, Any]) -> dict[int, Any]:
        """Return the union of all processes' results, in every process."""
        if self.size == 1:
            return part
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return {key: value for each in parts for key, value in each.items()}

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_world(device: str = "auto") -> Iterator[World]:
    """Join the process group inside the context; `device` is auto, cpu, cuda or cuda:N."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size > 1:
        # After a restart, the store may still hold addresses of dead processes.
        store, *_ = next(rendezvous("env://"))
        attempt = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    try:
        yield World(rank, size, place)
    finally:
        if size > 1:
            dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    if name == "cpu":
        return torch.device(name)
    number = re.fullmatch("cuda:([0-9]+)", name)
    if number is None:
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: PyTorch finds no CUDA device on this machine; try --device cpu")
    index, last = int(number[1]), torch.cuda.device_count() - 1
    if index > last:
        raise ConfigError(f"--device {name}: no such GPU; the last one is cuda:{last}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
