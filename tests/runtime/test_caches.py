from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.caches import Caches, Pool, Slot, visibility


def pool(capacity: int = 4) -> Pool:
    return Pool(caches=2, heads=1, capacity=capacity, head_width=3)


def mark(slot: Slot, value: float) -> None:
    assert slot.pool is not None
    slot.pool.block[:, slot.row] = value


def marks(slots: Sequence[Slot]) -> list[float]:
    found = []
    for slot in slots:
        assert slot.pool is not None
        (value,) = np.unique(slot.pool.block[:, slot.row])
        found.append(float(value))
    return found


@given(st.integers(1, 12), st.lists(st.lists(st.integers(0, 11), min_size=1, unique=True), max_size=6))
@settings(deadline=None)
def test_gathered_slots_lie_side_by_side_and_keep_what_they_hold(count: int, groups: list[list[int]]) -> None:
    rows, slots = pool(), [Slot() for _ in range(count)]
    for value, slot in enumerate(slots):
        rows.take(slot)
        mark(slot, value)
    for group in groups:
        chosen = [slots[index] for index in group if index < count]
        if chosen:
            start = rows.gather(chosen)
            assert sorted(slot.row for slot in chosen) == list(range(start, start + len(chosen)))
            assert marks(slots) == list(range(count))


def test_slots_that_lie_side_by_side_do_not_move() -> None:
    rows, slots = pool(), [Slot() for _ in range(8)]
    for slot in slots:
        rows.take(slot)
    before = [slot.row for slot in slots]
    assert rows.gather(slots[3:6]) == 3
    assert [slot.row for slot in slots] == before


def test_a_row_is_free_once_its_slot_is_garbage_collected() -> None:
    rows, kept = pool(), Slot()
    rows.take(kept)
    mark(kept, 5.0)
    for _ in range(100):
        rows.take(Slot())
    assert rows.block.shape[1] == 2
    assert marks([kept]) == [5.0]


def test_growing_keeps_what_a_slot_holds_and_frees_its_old_row() -> None:
    caches, slot = _caches(), Slot()
    caches.reserve(slot, 3)
    small = slot.pool
    assert small is not None
    mark(slot, 7.0)
    caches.reserve(slot, small.capacity)
    assert slot.pool is small
    caches.reserve(slot, small.capacity + 1)
    assert slot.pool is not None
    assert slot.pool.capacity == 2 * small.capacity
    assert np.all(slot.pool.block[:, slot.row, :, :, : small.capacity] == 7.0)
    other = Slot()
    caches.reserve(other, 3)
    assert (other.pool, other.row, small.block.shape[1]) == (small, 0, 1)


def test_rearranged_slots_hold_what_their_origins_held() -> None:
    caches, slots = _caches(), [Slot() for _ in range(4)]
    for value, slot in enumerate(slots):
        caches.reserve(slot, 1)
        mark(slot, value)
    caches.rearrange(slots, [2, 0, 0])
    assert marks(slots) == [2, 0, 0, 3]


def test_visibility_shows_the_first_positions() -> None:
    assert np.isneginf(visibility(3)).tolist() == [[True] * 3, [False, True, True], [False, False, True], [False] * 3]


class _Session:
    """A fake onnxruntime session with the parts that caches use."""

    class _Input:
        name = "past_layer_0_keys"
        shape = ("B", 1, 2, "C", 3)

    def get_inputs(self) -> list[_Session._Input]:
        return [self._Input()]


def _caches() -> Caches:
    return Caches([_Session()])
