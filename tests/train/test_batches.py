from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulmt.errors import TrainingError
from simulmt.text import PAD
from simulmt.train.batches import BatchPlan, BatchQueue, DeviceStore, cut_by_length, draw_delay

from .helpers import store_of

CPU = torch.device("cpu")
Lengths = NDArray[np.int64]


def some_lengths(pairs: int, seed: int = 0) -> tuple[Lengths, Lengths]:
    """Draw source and target lengths, mostly short."""
    random = np.random.default_rng(seed)
    source = 2 + random.geometric(0.1, pairs)
    return source, 1 + random.poisson(source * 1.2)


def epoch(plan: BatchPlan, number: int = 0) -> list[list[int]]:
    first = number * plan.batches_per_epoch
    return [plan.rows(first + index).tolist() for index in range(plan.batches_per_epoch)]


histograms = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)


@settings(deadline=None, max_examples=200)
@given(counts=histograms, batch_tokens=st.integers(1, 500))
def test_invariants_of_cuts(counts: list[int], batch_tokens: int) -> None:
    ordered = np.repeat(np.arange(1, len(counts) + 1), counts)
    cuts = cut_by_length(np.array([0, *counts]), batch_tokens)
    assert (cuts[0], cuts[-1]) == (0, len(ordered))
    assert (np.diff(cuts) > 0).all()
    for start, stop in pairwise(cuts):
        batch = ordered[start:stop]
        assert len(batch) <= max(1, batch_tokens // batch[-1])
        for shorter in set(batch.tolist()) - {batch[-1]}:
            # Padded are only remainders of less than half a batch.
            assert 2 * (batch <= shorter).sum() < batch_tokens // shorter


@pytest.mark.parametrize(
    ("counts", "cuts"),
    [
        # Six of length 2 fill a batch. The two left over are less than half of one and wait for two of length 3. The
        # three left then are more than half of four, so they do not wait for longer ones, of which one is a batch.
        ({2: 8, 3: 5, 7: 1, 9: 2}, [0, 6, 10, 13, 14, 15, 16]),
        ({1: 5, 2: 1}, [0, 6]),
        ({1: 2, 9: 1}, [0, 2, 3]),  # two that wait are already more than a batch of the next length may hold
        ({1: 1, 9: 1}, [0, 1, 2]),
        ({20: 2}, [0, 1, 2]),
    ],
)
def test_cuts_of_twelve_tokens_by_hand(counts: dict[int, int], cuts: list[int]) -> None:
    histogram = np.zeros(max(counts) + 1, np.int64)
    histogram[list(counts)] = list(counts.values())
    assert cut_by_length(histogram, 12).tolist() == cuts


def test_every_pair_is_in_one_batch_of_an_epoch_within_the_tokens() -> None:
    source, target = some_lengths(1000)
    plan = BatchPlan(source, target, batch_tokens=200, seed=3)
    for number in (0, 1, 5):
        batches = epoch(plan, number)
        assert sorted(row for batch in batches for row in batch) == list(range(1000))
        assert all(len(batch) * source[batch].max() <= 200 or len(batch) == 1 for batch in batches)


def test_a_pair_longer_than_a_batch_is_a_batch_of_its_own() -> None:
    plan = BatchPlan(np.array([300, 4, 500]), np.array([3, 3, 3]), batch_tokens=100, seed=1)
    assert sorted(epoch(plan)) == [[0], [1], [2]]


def test_target_lengths_of_any_size_leave_the_source_order_alone() -> None:
    source = np.array([5, 6] * 50)
    target = np.array([100_000, 1] * 50)
    plan = BatchPlan(source, target, batch_tokens=60, seed=1)
    batches = epoch(plan)
    assert all(len(batch) * source[batch].max() <= 60 for batch in batches)
    assert sum(len(set(source[batch])) > 1 for batch in batches) == 1


def test_a_batch_depends_on_seed_and_number_only() -> None:
    source, target = some_lengths(400)
    count = BatchPlan(source, target, 150, seed=7).batches_per_epoch
    in_order = BatchPlan(source, target, 150, seed=7)
    expected = [in_order.rows(number).tolist() for number in range(3 * count)]
    jumping = BatchPlan(source, target, 150, seed=7)
    for number in np.random.default_rng(0).permutation(3 * count):
        assert jumping.rows(int(number)).tolist() == expected[number]


def test_epochs_and_seeds_shuffle_differently() -> None:
    source, target = some_lengths(5000)
    plan, other = BatchPlan(source, target, 150, seed=7), BatchPlan(source, target, 150, seed=8)
    first, second = epoch(plan), epoch(plan, 1)
    assert first != second
    assert first != epoch(other)
    # Not only the order of the batches differs but also what is in them.
    assert len({frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}) < len(first) / 2
    # And they do not come shortest first.
    longest = [source[batch].max() for batch in first]
    assert longest != sorted(longest)


def test_padding_share_is_the_counted_one() -> None:
    source, target = some_lengths(500)
    plan = BatchPlan(source, target, batch_tokens=120, seed=1)
    positions = sum(len(batch) * int(source[batch].max()) for batch in epoch(plan))
    assert plan.padding_share() == pytest.approx(1 - source.sum() / positions)
    assert 0 < plan.padding_share() < 0.2


def test_batches_of_one_source_length_hold_targets_of_about_one_length() -> None:
    source = np.full(4000, 10)
    target = np.random.default_rng(0).integers(1, 41, 4000)
    batches = epoch(BatchPlan(source, target, batch_tokens=1000, seed=1))
    assert all(np.ptp(target[batch]) <= 8 for batch in batches)


def test_a_large_corpus_is_planned_from_arrays() -> None:
    source, target = some_lengths(200_000)
    plan = BatchPlan(source, target, batch_tokens=8192, seed=1)
    assert len(plan.rows(plan.batches_per_epoch * 2 + 5))
    assert plan.padding_share() < 0.01


def test_an_empty_store_is_an_error() -> None:
    nothing = np.empty(0, np.int64)
    with pytest.raises(TrainingError, match="training store is empty"):
        BatchPlan(nothing, nothing, batch_tokens=100, seed=1)


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 65_535), ("<u4", 130_000)])
def test_a_gathered_batch_holds_the_pairs_of_the_store(dtype: str, largest: int) -> None:
    random = np.random.default_rng(1)
    pairs = [
        (random.integers(1, largest, random.integers(1, 9)).tolist(), [largest, *random.integers(1, largest, n % 7)])
        for n in range(40)
    ]
    pairs[7][0][0] = 32_768
    store = store_of(pairs, dtype)
    rows = np.array([39, 7, 0, 7, 12])
    batch = DeviceStore(store, CPU).batch(rows)
    for position, row in enumerate(rows):
        expected = [ids.astype(np.int64).tolist() for ids in store.pair(row)]
        sides = (batch.source, batch.source_lengths), (batch.target, batch.target_lengths)
        for (tokens, lengths), ids in zip(sides, expected, strict=True):
            assert lengths[position] == len(ids)
            assert tokens[position, : len(ids)].tolist() == ids
            assert set(tokens[position, len(ids) :].tolist()) <= {PAD}
            assert tokens.shape[1] == lengths.max()


def test_in_order_covers_every_pair_once_longest_first() -> None:
    random = np.random.default_rng(2)
    pairs = [([5] * random.integers(1, 30), [6]) for _ in range(100)]
    batches = list(DeviceStore(store_of(pairs), CPU).by_length(batch_tokens=60))
    assert Counter(row for rows, _ in batches for row in rows.tolist()) == Counter(range(100))
    lengths = [length for _, batch in batches for length in batch.source_lengths.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert all(batch.source.numel() <= 60 for _, batch in batches)


def test_the_delay_of_a_batch_is_drawn_evenly_and_always_the_same() -> None:
    delays = (1, 3, 9)
    drawn = [draw_delay(delays, 5, number) for number in range(3000)]
    assert drawn == [draw_delay(delays, 5, number) for number in range(3000)]
    assert drawn != [draw_delay(delays, 6, number) for number in range(3000)]
    assert all(850 < drawn.count(delay) < 1150 for delay in delays)
    # No pattern: a delay says nothing about the next one.
    followers = Counter(pairwise(drawn))
    assert all(230 < followers[pair] < 440 for pair in followers)
    assert len(followers) == 9


def test_one_delay_is_that_delay() -> None:
    assert {draw_delay((4,), 1, number) for number in range(10)} == {4}


class RecordingStore:
    """A stand-in for a store on another device, whose batches are the requested rows."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.made: list[list[int]] = []

    def batch(self, rows: Lengths) -> list[int]:
        self.made.append(rows.tolist())
        return self.made[-1]


@pytest.mark.parametrize(("device", "made_ahead"), [("meta", 1), ("cpu", 0)])
def test_the_next_batch_is_made_while_the_device_works(device: str, made_ahead: int) -> None:
    plan, store = BatchPlan(*some_lengths(200), 100, seed=1), RecordingStore(device)
    queue = BatchQueue(store, plan)  # type: ignore[arg-type]
    for number in range(2 * plan.batches_per_epoch):  # over the end of an epoch
        assert queue.take(number) == plan.rows(number).tolist()
        made = len(store.made)
        queue.prepare(number + 1)
        assert len(store.made) == made + made_ahead
    assert len(store.made) == 2 * plan.batches_per_epoch + made_ahead


def test_a_batch_that_was_not_prefetched_is_made_on_demand() -> None:
    plan, store = BatchPlan(*some_lengths(200), 100, seed=1), RecordingStore("meta")
    queue = BatchQueue(store, plan)  # type: ignore[arg-type]
    queue.prepare(3)
    assert queue.take(5) == plan.rows(5).tolist()
    assert queue.take(3) == plan.rows(3).tolist()


def test_epochs_may_be_visited_in_any_order() -> None:
    lengths = some_lengths(200)
    in_order = BatchPlan(*lengths, 100, seed=1)
    expected = [epoch(in_order, number) for number in range(4)]
    jumping = BatchPlan(*lengths, 100, seed=1)
    for number in (2, 3, 1, 0, 3):
        assert epoch(jumping, number) == expected[number]
