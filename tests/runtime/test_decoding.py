"""A failed step advances no sentence, so it can be repeated, together or alone; caches move without mixing rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.bundle import Kind
from simulmt.runtime.decoding import Array, Binding, Caches, Collapse, Pool, Slot, visibility
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.text import BLANK, Tokenizer
from tiny_models import STABILITIES, facts, trained, translator

KINDS: tuple[Kind, ...] = ("ctc", "transducer", "wait-k", "full-sentence")
POLICY = "policy"  # a wait-k model that reads on until its predictions are stable
SYSTEMS = (*KINDS, POLICY)
SPOKEN = [
    "the old bridge over the river was closed. nobody knows why",
    "河 and 大! the wind is getting colder",
    9 * "the driver was waiting behind the barn in the cold wind ",
    "we",
]


@pytest.fixture(scope="module")
def translators(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Translator]:
    folder = tmp_path_factory.mktemp("bundles")
    networks = {kind: trained(kind, source_tokenizer, target_tokenizer) for kind in KINDS}
    made: dict[str, Translator] = {kind: translator(networks[kind], kind, "fp32", folder) for kind in KINDS}
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    made[POLICY] = translator(network, "wait-k", "fp32", folder, POLICY, stabilities=STABILITIES)
    return made


@contextmanager
def faults(seed: int, share: float) -> Iterator[None]:
    """Make a share of all graph runs fail, half of them after writing to the caches."""
    dice, run = random.Random(seed), Binding.run

    def faulty(binding: Binding) -> dict[str, Array]:
        (what,) = dice.choices(["works", "fails before", "fails behind"], [1 - share, share / 2, share / 2])
        found = run(binding) if what != "fails before" else {}
        if what != "works":
            raise RuntimeError("a fault of the engine")
        return found

    with patch.object(Binding, "run", faulty):
        yield


def share_for(system: str) -> float:
    return 0.03 if system == "full-sentence" else 0.3  # a beam search is many runs in one step


def opened(model: Translator, system: str) -> list[Stream]:
    delays = (None,) if system == "full-sentence" else (1, 2, 3, 5)
    beams = (1, 3) if system == "full-sentence" else (1,)
    return [model.stream(delays[n % len(delays)], beams[n % len(beams)]) for n in range(len(SPOKEN))]


def drain(model: Translator, streams: list[Stream], seed: int) -> list[list[Commit]]:
    """Advance streams until none is due, retrying failures; return the commits of each."""
    dice, commits = random.Random(seed), [list[Commit]() for _ in streams]
    while due := [stream for stream in streams if stream.is_due]:
        some = dice.sample(due, dice.randint(1, len(due)))
        try:
            model.step(some)
        except RuntimeError:
            continue
        for stream in some:
            commits[streams.index(stream)] += stream.take()
    return commits


def finish(stream: Stream) -> list[Commit]:
    """Finish a stream, retrying failures."""
    while True:
        with suppress(RuntimeError):
            return stream.finish()


@pytest.mark.parametrize("system", SYSTEMS)
@given(seed=st.integers(0, 1_000))
@settings(max_examples=8, deadline=None)
def test_a_failed_step_can_be_repeated(translators: dict[str, Translator], system: str, seed: int) -> None:
    model = translators[system]
    found, alone = opened(model, system), opened(model, system)
    for stream, text in zip(found, SPOKEN, strict=True):
        stream.accept(text)
        stream.accept_finish()
    with faults(seed, share_for(system)):
        commits = drain(model, found, seed)
    for stream, text, written in zip(alone, SPOKEN, commits, strict=True):
        assert facts(written) == facts(stream.push(text) + stream.finish())


@pytest.mark.parametrize("system", SYSTEMS)
@given(seed=st.integers(0, 1_000))
@settings(max_examples=8, deadline=None)
def test_a_call_that_fails_loses_nothing(translators: dict[str, Translator], system: str, seed: int) -> None:
    model = translators[system]
    found, alone, commits = opened(model, system), opened(model, system), [list[Commit]() for _ in SPOKEN]
    with faults(seed, share_for(system)):
        for part in (slice(20), slice(20, 40), slice(40, None)):
            chunks = [(stream, text[part]) for stream, text in zip(found, SPOKEN, strict=True)]
            with suppress(RuntimeError):
                for written, news in zip(commits, model.push_many(chunks), strict=True):
                    written += news
        for stream, written in zip(found, commits, strict=True):
            with suppress(RuntimeError):
                written += stream.push("")
            written += finish(stream)
    for stream, text, written in zip(alone, SPOKEN, commits, strict=True):
        assert facts(written) == facts(stream.push(text) + stream.finish())


@pytest.mark.parametrize(
    ("frames", "written"),
    [
        ([7, 7, 7], [7]),
        ([7, BLANK, 7], [7, 7]),
        ([BLANK, BLANK, 6, BLANK, 7, 7, 6], [6, 7, 6]),
        ([BLANK], []),
        ([], []),
    ],
)
def test_collapse(frames: list[int], written: list[int]) -> None:
    assert Collapse().push(frames) == written


@given(st.lists(st.integers(BLANK, 7)), st.lists(st.integers(0, 5)))
def test_incremental_collapse_equals_collapse(frames: list[int], cuts: list[int]) -> None:
    collapse, written, rest = Collapse(), list[int](), frames
    for cut in cuts:
        written += collapse.push(rest[:cut])
        rest = rest[cut:]
    written += collapse.push(rest)
    assert written == [symbol for symbol, _ in groupby(frames) if symbol != BLANK]


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
