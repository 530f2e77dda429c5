"""Run graphs over the key-value caches of many sentences, without copying them.

A sentence holds a Slot, one row of a Pool, which is one memory block for the caches of many rows. Before a graph runs,
its rows are moved next to each other; as long as the same sentences advance together, nothing moves again. That part of
the pool is bound to the graph, which writes into it.

Axis letters: B rows, N positions, R tokens read, C capacity of a cache.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from simulmt.runtime.bundle import Session

Array = np.ndarray[Any, np.dtype[Any]]

SMALLEST_CAPACITY = 32
BINDINGS_KEPT = 64  # of one pool
PAST, PRESENT, SLOTS = "past_", "present_", "slots"
TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}


class Slot:
    """A row of caches, placed by `Caches.reserve`; freed when the Slot is garbage-collected."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.row = -1


class Pool:
    """Caches of one capacity in one block, [caches rows 1 heads C D/heads]."""

    def __init__(self, caches: int, heads: int, capacity: int, head_width: int) -> None:
        self.capacity = capacity
        # Zeros, not uninitialised memory: a masked NaN would still give NaN, since NaN * 0 = NaN.
        self.block: Array = np.zeros((caches, 1, 1, heads, capacity, head_width), dtype=np.float32)
        self.bindings: dict[tuple[Any, ...], Binding] = {}  # to this block, by graph, first row and shape
        self._holders: list[weakref.ref[Slot] | None] = [None]

    def take(self, slot: Slot) -> None:
        """Assign a free row to the slot; its contents are undefined."""
        rows = len(self._holders)
        row = next((row for row in range(rows) if self.holder(row) is None), rows)
        if row == rows:
            self._double()
        slot.pool, slot.row = self, row
        self._holders[row] = weakref.ref(slot)

    def _double(self) -> None:
        caches, rows, *shape = self.block.shape
        block = np.zeros((caches, 2 * rows, *shape), dtype=np.float32)  # unused pages take no memory
        block[:, :rows] = self.block
        self.block = block
        self.bindings.clear()
        self._holders += [None] * rows

    def gather(self, slots: Sequence[Slot]) -> int:
        """Move slots next to each other, moving as few as possible; return the first row."""
        rows = sorted(slot.row for slot in slots)
        start = self._best_start(rows)
        inside = range(start, start + len(rows))
        free = sorted(set(inside).difference(rows))
        for slot, row in zip([slot for slot in slots if slot.row not in inside], free, strict=True):
            self._swap(slot, row)
        return start

    def _best_start(self, rows: Sequence[int]) -> int:
        if rows[-1] - rows[0] == len(rows) - 1:
            return rows[0]
        starts = {min(row, len(self._holders) - len(rows)) for row in rows}
        return max(starts, key=lambda start: bisect_left(rows, start + len(rows)) - bisect_left(rows, start))

    def _swap(self, slot: Slot, row: int) -> None:
        other, left = self.holder(row), slot.row
        if other is None:
            self.block[:, row] = self.block[:, left]
        else:
            self.block[:, [row, left]] = self.block[:, [left, row]]
            other.row = left
        slot.row = row
        self._holders[row], self._holders[left] = self._holders[left], self._holders[row]

    def holder(self, row: int) -> Slot | None:
        reference = self._holders[row]
        slot = None if reference is None else reference()
        return slot if slot is not None and slot.pool is self else None


class Caches:
    """All pools of a translator, one per capacity."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        shapes = {
            entry.name.removeprefix(PAST): entry.shape
            for session in sessions
            for entry in session.get_inputs()
            if entry.name.startswith(PAST)
        }
        self.index = {name: index for index, name in enumerate(shapes)}
        _, _, self.heads, _, self.head_width = next(iter(shapes.values()))
        self.pools: dict[int, Pool] = {}  # by capacity

    def reserve(self, slot: Slot, length: int) -> None:
        """Grow the slot to the given number of positions, keeping its contents."""
        pool, row = slot.pool, slot.row
        if pool is not None and pool.capacity >= length:
            return
        capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
        if capacity not in self.pools:
            self.pools[capacity] = Pool(len(self.index), self.heads, capacity, self.head_width)
        larger = self.pools[capacity]
        larger.take(slot)
        if pool is not None:
            larger.block[:, slot.row, :, :, : pool.capacity] = pool.block[:, row]

    def rearrange(self, slots: Sequence[Slot], origins: Sequence[int]) -> None:
        """Copy slot origins[i] to slot i; all are in one pool."""
        pool = slots[0].pool
        assert pool is not None, "a slot must be reserved before it is filled"
        rows = [slot.row for slot in slots]
        pool.block[:, rows[: len(origins)]] = pool.block[:, [rows[origin] for origin in origins]]


class OutputBuffer:
    """Output memory shared by all bindings of a graph; valid until the next run."""

    def __init__(self) -> None:
        self._block: Array = np.zeros(0)

    def array(self, entry: Any, sizes: Mapping[str, int]) -> Array:
        shape = _shape(entry, sizes)
        if self._block.size < math.prod(shape):  # existing bindings keep the smaller block alive
            self._block = np.zeros(math.prod(shape), dtype=TYPES[entry.type])
        return self._block[: math.prod(shape)].reshape(shape)


class Binding:
    """A graph bound to rows of a pool and to its other inputs and outputs."""

    def __init__(
        self,
        session: Session,
        caches: Caches,
        rows: Array,
        sizes: Mapping[str, int],
        buffers: Mapping[str, OutputBuffer],
    ) -> None:
        self._session = session
        self._masks = visibility(sizes["C"])
        self._binding = session.io_binding()
        self._rows = rows  # bound by address, so they must live as long as the binding
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        for entry in session.get_inputs():
            if entry.name.startswith(PAST):
                array = rows[caches.index[entry.name.removeprefix(PAST)]]
            else:
                array = self.inputs[entry.name] = np.zeros(_shape(entry, sizes), dtype=TYPES[entry.type])
            _bind(self._binding.bind_input, entry.name, array)
            if entry.name.endswith(SLOTS):  # [B N heads 4]: row, 0, head, position
                array[..., 0] = np.arange(sizes["B"])[:, None, None]
                array[..., 2] = np.arange(caches.heads)
        for entry in session.get_outputs():
            if entry.name.startswith(PRESENT):
                _bind(self._binding.bind_output, entry.name, rows[caches.index[entry.name.removeprefix(PRESENT)]])
            elif entry.name in buffers:
                array = self.outputs[entry.name] = buffers[entry.name].array(entry, sizes)
                _bind(self._binding.bind_output, entry.name, array)

    def place(self, prefix: str, tokens: Array, positions: Array) -> None:
        """Set the tokens [B N] at positions [B N]."""
        self.inputs[f"{prefix}tokens"][:] = tokens
        self.inputs[f"{prefix}positions"][:] = positions
        self.inputs[f"{prefix}slots"][..., 3] = positions[:, :, None]

    def show(self, mask: str, visible: Array) -> None:
        """Set how many cached positions each position [B N] attends to."""
        self.inputs[mask][:, :, 0, 0] = self._masks[visible]

    def run(self) -> dict[str, Array]:
        """Run the graph; return its outputs, valid until the next run of any binding."""
        self._session.run_with_iobinding(self._binding)
        return self.outputs


class GraphRunner:
    """Binds a graph to slots, caching the bindings of frequent shapes."""

    def __init__(self, session: Session, caches: Caches) -> None:
        self._session = session
        self._caches = caches
        self._buffers: defaultdict[str, OutputBuffer] = defaultdict(OutputBuffer)

    def bind(self, slots: Sequence[Slot], outputs: Sequence[str] = (), **sizes: int) -> Binding:
        """Bind the graph to slots of one pool; inputs follow the order of their rows."""
        pool = slots[0].pool
        assert pool is not None, "a slot must be reserved before it is bound"
        start = pool.gather(slots)
        sizes = {**sizes, "B": len(slots), "C": pool.capacity}
        key = (self, start, *outputs, *sizes.values())
        if key not in pool.bindings:
            if len(pool.bindings) == BINDINGS_KEPT:
                pool.bindings.clear()
            rows = pool.block[:, start : start + len(slots)]
            buffers = {name: self._buffers[name] for name in outputs}
            pool.bindings[key] = Binding(self._session, self._caches, rows, sizes, buffers)
        return pool.bindings[key]


@cache
def visibility(capacity: int) -> Array:
    """Return a mask whose row v is 0 on the first v positions and minus infinity elsewhere."""
    shown = np.arange(capacity) < np.arange(capacity + 1)[:, None]
    return np.where(shown, 0, -np.inf).astype(np.float32)


def _shape(entry: Any, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[size] if isinstance(size, str) else size for size in entry.shape]


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
