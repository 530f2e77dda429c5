"""Runs a graph over the caches of many sentences at once, without copying what is cached.

A sentence holds a Slot: one row of a Pool, which is one block of memory for all caches of some rows. Before a graph
runs, the rows it is to work on are swapped to the front of their pool, where they stay; so as long as the same
sentences go on together nothing moves. Then the front of the pool is bound to the graph, which writes into it.

Axis letters: B rows, N positions, R tokens read, C capacity of a cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulmt.bundle import Session

Array = NDArray[Any]

SMALLEST_CAPACITY = 32
BINDINGS_KEPT = 64
PAST, PRESENT, SLOTS = "past_", "present_", "slots"
TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}


class Slot:
    """A row of a pool; it belongs to whoever holds the Slot, and is free again when nobody does."""

    def __init__(self, pool: Pool, row: int) -> None:
        self.pool = pool
        self.row = row


class Pool:
    """Rows of caches of one capacity, [caches rows 1 heads C D/heads], all zero or filled with finite numbers."""

    def __init__(self, caches: int, heads: int, capacity: int, head_width: int) -> None:
        self.capacity = capacity
        self.block = np.zeros((caches, 1, 1, heads, capacity, head_width), dtype=np.float32)
        self.masks = visibility(capacity)
        self.bindings: dict[tuple[Any, ...], Binding] = {}  # to this block, by graph and shape
        self._holders: list[weakref.ref[Slot] | None] = [None]

    def take(self) -> Slot:
        """A free row, which may still hold what an earlier sentence left there."""
        row = next((row for row in range(len(self._holders)) if self._holder(row) is None), len(self._holders))
        if row == len(self._holders):
            self.block = np.concatenate([self.block, np.zeros_like(self.block)], axis=1)
            self.bindings.clear()
            self._holders *= 2
            self._holders[row:] = [None] * row
        slot = Slot(self, row)
        self._holders[row] = weakref.ref(slot)
        return slot

    def gather(self, slots: Sequence[Slot]) -> None:
        """Bring the slots into the first rows, in any order."""
        strays = [slot for slot in slots if slot.row >= len(slots)]
        wanted = {slot.row for slot in slots}
        places = (row for row in range(len(slots)) if row not in wanted)
        for slot, row in zip(strays, places, strict=True):
            self._swap(slot, row)

    def _swap(self, slot: Slot, row: int) -> None:
        other, left = self._holder(row), slot.row
        if other is None:
            self.block[:, row] = self.block[:, left]
        else:
            self.block[:, [row, left]] = self.block[:, [left, row]]
            other.row = left
        slot.row = row
        self._holders[row], self._holders[left] = self._holders[left], self._holders[row]

    def _holder(self, row: int) -> Slot | None:
        reference = self._holders[row]
        return None if reference is None else reference()


class Caches:
    """The pools of a translator, one for each capacity, and the order in which their blocks hold the caches."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        shapes = {
            entry.name.removeprefix(PAST): entry.shape
            for session in sessions
            for entry in session.get_inputs()
            if entry.name.startswith(PAST)
        }
        self.index = {name: index for index, name in enumerate(sorted(shapes))}
        _, _, self.heads, _, self.head_width = next(iter(shapes.values()))
        self._pools: dict[int, Pool] = {}

    def reserve(self, slot: Slot | None, length: int) -> Slot:
        """A slot with room for `length` positions that holds what `slot` holds."""
        if slot is not None and slot.pool.capacity >= length:
            return slot
        capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
        if capacity not in self._pools:
            self._pools[capacity] = Pool(len(self.index), self.heads, capacity, self.head_width)
        larger = self._pools[capacity].take()
        if slot is not None:
            copy(slot, larger)
        return larger


def copy(source: Slot, target: Slot) -> None:
    """Copy a row of caches into another of at least the same capacity."""
    target.pool.block[:, target.row, :, :, : source.pool.capacity] = source.pool.block[:, source.row]


class Binding:
    """A graph bound to the first rows of a pool and to arrays that hold its other inputs and outputs."""

    def __init__(self, session: Session, caches: Caches, pool: Pool, sizes: Mapping[str, int], outputs: Sequence[str]):
        self._session = session
        self._binding = session.io_binding()
        self._block = pool.block  # bound by address, so it must live as long as the binding
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}
        rows = pool.block[:, : sizes["B"]]
        for entry in session.get_inputs():
            if entry.name.startswith(PAST):
                self._bind(self._binding.bind_input, entry.name, rows[caches.index[entry.name.removeprefix(PAST)]])
            else:
                array = self.inputs[entry.name] = _array(entry, sizes)
                self._bind(self._binding.bind_input, entry.name, array)
                if entry.name.endswith(SLOTS):
                    array[..., 0] = np.arange(sizes["B"])[:, None, None]
                    array[..., 2] = np.arange(caches.heads)
        for entry in session.get_outputs():
            if entry.name.startswith(PRESENT):
                cache = rows[caches.index[entry.name.removeprefix(PRESENT)]]
                self._bind(self._binding.bind_output, entry.name, cache)
            elif entry.name in outputs:
                array = self.outputs[entry.name] = _array(entry, sizes)
                self._bind(self._binding.bind_output, entry.name, array)

    def place(self, prefix: str, tokens: Array, positions: Array) -> None:
        """Say which tokens [B N] stand at which positions [B N]."""
        self.inputs[f"{prefix}tokens"][:] = tokens
        self.inputs[f"{prefix}positions"][:] = positions
        self.inputs[f"{prefix}slots"][..., 3] = positions[:, :, None]

    def run(self) -> dict[str, Array]:
        """Run the graph; the arrays it returns are overwritten by the next run."""
        self._session.run_with_iobinding(self._binding)
        return self.outputs

    def _bind(self, bind: Any, name: str, array: Array) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class GraphRunner:
    """One graph, ready to be bound to slots; bindings are kept for the shapes that come again and again."""

    def __init__(self, session: Session, caches: Caches) -> None:
        self._session = session
        self._caches = caches

    def bind(self, slots: Sequence[Slot], outputs: Sequence[str] = (), **sizes: int) -> Binding:
        """The graph bound to these slots, which must be of one pool: slot i is row `slots[i].row` of every input."""
        pool = slots[0].pool
        pool.gather(slots)
        sizes = {**sizes, "B": len(slots), "C": pool.capacity}
        key = (self, *outputs, *sizes.values())
        if key not in pool.bindings:
            if len(pool.bindings) == BINDINGS_KEPT:
                pool.bindings.clear()
            pool.bindings[key] = Binding(self._session, self._caches, pool, sizes, outputs)
        return pool.bindings[key]


def visibility(capacity: int) -> Array:
    """Row v shows the first v positions of a cache: 0 there, minus infinity behind."""
    shown = np.arange(capacity) < np.arange(capacity + 1)[:, None]
    return np.where(shown, 0, -np.inf).astype(np.float32)


def _array(entry: Any, sizes: Mapping[str, int]) -> Array:
    shape = [sizes[size] if isinstance(size, str) else size for size in entry.shape]
    return np.zeros(shape, dtype=TYPES[entry.type])
