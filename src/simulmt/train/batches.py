"""Training batches as a pure function of (seed, batch number).

Where possible a batch holds sentences of one source length, so attention needs no padding mask; rare lengths are joined
with the next longer ones. Batch boundaries depend on lengths only, so every epoch has the same number of batches, and
batch g can be computed without its predecessors: to resume, a run needs only g.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from simulmt.data.store import TokenStore
from simulmt.errors import TrainingError
from simulmt.model.layers import Batch
from simulmt.text import PAD

TARGET_BUCKET = 4  # granularity of target lengths when sorting


class DeviceStore:
    """A token store on the device; a batch is one gather per side."""

    def __init__(self, store: TokenStore, device: torch.device) -> None:
        self.device = device
        self.source_lengths, self.target_lengths = store.source_lengths, store.target_lengths
        self._source = _to_device(store.source_tokens, store.source_offsets, device)
        self._target = _to_device(store.target_tokens, store.target_offsets, device)

    def __len__(self) -> int:
        return len(self.source_lengths)

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Return the given pairs as a padded batch."""
        source_lengths = torch.from_numpy(self.source_lengths[rows])
        target_lengths = torch.from_numpy(self.target_lengths[rows])
        on_device = torch.from_numpy(rows).to(self.device, non_blocking=True)
        source = gather(*self._source, on_device, int(source_lengths.max()))
        target = gather(*self._target, on_device, int(target_lengths.max()))
        return Batch(source, source_lengths, target, target_lengths)

    def by_length(self, batch_tokens: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield every pair once, longest source first, for decoding: the rows of each batch, and the batch."""
        order = np.argsort(-self.source_lengths, kind="stable")
        start = 0
        while start < len(order):
            stop = start + max(1, batch_tokens // int(self.source_lengths[order[start]]))
            yield order[start:stop], self.batch(order[start:stop])
            start = stop


class BatchPlan:
    """The infinite sequence of training batches: which pairs are in batch g."""

    def __init__(
        self, source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64], batch_tokens: int, seed: int
    ) -> None:
        if not len(source_lengths):
            raise TrainingError("the training store is empty; its manifest.json lists why pairs were dropped")
        self._source_lengths, self._target_lengths = source_lengths, target_lengths
        self._seed = seed
        self._cuts = cut_by_length(np.bincount(source_lengths), batch_tokens)
        self._thread = ThreadPoolExecutor(1)
        self._shuffled: dict[int, Future[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}  # this epoch and the next

    @property
    def batches_per_epoch(self) -> int:
        return len(self._cuts) - 1

    def rows(self, number: int) -> NDArray[np.int64]:
        """Return the pairs of batch `number`, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.batches_per_epoch)
        if self._shuffled.keys() != {epoch, epoch + 1}:
            self._shuffled = {
                each: self._shuffled.get(each) or self._thread.submit(self._shuffle, each)
                for each in (epoch, epoch + 1)
            }
        rows, order = self._shuffled[epoch].result()
        return rows[self._cuts[order[index]] : self._cuts[order[index] + 1]]

    def padding_share(self) -> float:
        """Return the share of padding among source positions over an epoch."""
        ordered = np.sort(self._source_lengths)
        longest = ordered[self._cuts[1:] - 1]
        return 1.0 - float(ordered.sum() / (longest * np.diff(self._cuts)).sum())

    def _shuffle(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sort by source length, coarse target length, and at random, with one integer key."""
        random = np.random.default_rng((self._seed, epoch))
        key = self._source_lengths.astype(np.int64) << 44
        key |= np.minimum(self._target_lengths.astype(np.int64) // TARGET_BUCKET, 0xFFF) << 32
        key |= random.integers(0, 1 << 32, len(key), dtype=np.int64)
        rows = np.argsort(key, kind="stable")  # stable, or ties would depend on the CPU
        return rows, random.permutation(self.batches_per_epoch)


class BatchQueue:
    """Prefetches batches while the device is busy."""

    def __init__(self, store: DeviceStore, plan: BatchPlan) -> None:
        self._store, self._plan = store, plan
        self._ready: tuple[int, Batch] | None = None

    def take(self, number: int) -> Batch:
        """Return batch `number`."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == number else self._make(number)

    def prepare(self, number: int) -> None:
        """Prefetch the batch to be taken next; do nothing on a CPU."""
        if self._store.device.type != "cpu":
            self._ready = number, self._make(number)

    def _make(self, number: int) -> Batch:
        return self._store.batch(self._plan.rows(number))


class MixedQueue:
    """Takes some batches from a second queue, depending on their number only."""

    def __init__(self, first: BatchQueue, second: BatchQueue, is_second: Callable[[int], bool]) -> None:
        self._queues = (first, second)
        self._is_second = is_second

    def take(self, number: int) -> Batch:
        """Return batch `number` of its queue."""
        return self._queues[self._is_second(number)].take(number)

    def prepare(self, number: int) -> None:
        """Prefetch the batch to be taken next."""
        self._queues[self._is_second(number)].prepare(number)


def cut_by_length(counts: NDArray[np.int64], batch_tokens: int) -> NDArray[np.int64]:
    """Return the batch boundaries of pairs sorted by source length, with `counts[n]` of length n.

    A batch holds at most batch_tokens // (longest source) pairs, and at least one. A remainder of less than half a
    batch is joined with longer sentences; only such batches contain padding.
    """
    cuts, waiting, seen = [0], 0, 0
    for length in np.flatnonzero(counts):
        capacity = max(1, batch_tokens // int(length))
        if waiting > capacity:  # the open batch is full at this length
            cuts.append(seen)
            waiting = 0
        waiting += int(counts[length])
        seen += int(counts[length])
        while waiting >= capacity:
            cuts.append(cuts[-1] + capacity)
            waiting -= capacity
        if 2 * waiting >= capacity:
            cuts.append(seen)
            waiting = 0
    if waiting:
        cuts.append(seen)
    return np.array(cuts)


def draw_delay(delays: tuple[int, ...], seed: int, number: int) -> int:
    """Draw the delay k of batch `number`, so that one checkpoint learns all delays."""
    return delays[0] if len(delays) == 1 else int(np.random.default_rng((seed, number, 1)).choice(delays))


def draws_low_delay_data(number: int, seed: int, share: float) -> bool:
    """Draw whether batch `number`, which has a low delay, is one of the share taken from the data for low delays."""
    return bool(np.random.default_rng((seed, number, 2)).random() < share)


def _to_device(
    tokens: NDArray[np.unsignedinteger], offsets: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    # PyTorch supports few operations on unsigned integers: store them as signed ones, see gather.
    signed = tokens.view(np.int16 if tokens.itemsize == 2 else np.int32)
    with warnings.catch_warnings():  # torch warns that the mapped file is read-only
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(signed).to(device), torch.from_numpy(offsets).to(device)


def gather(tokens: Tensor, offsets: Tensor, rows: Int[Tensor, " B"], longest: int) -> Int[Tensor, "B L"]:
    """Gather rows of the flat token sequence, padded with PAD."""
    starts, stops = offsets[rows], offsets[rows + 1]
    index = starts[:, None] + torch.arange(longest, device=rows.device)
    inside = index < stops[:, None]
    values = tokens[torch.where(inside, index, 0)].long()
    if tokens.dtype == torch.int16:
        values &= 0xFFFF
    return torch.where(inside, values, PAD)
