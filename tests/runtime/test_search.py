from __future__ import annotations

import math
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.search import PATIENCE, BeamSearch, Collapse, PrefixBeam, log_softmax
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS

V = 8  # symbols 6 and 7 beside the special ones


def random_frames(seed: int, frames: int, sharpness: float = 2.0) -> np.ndarray:
    return log_softmax(np.random.default_rng(seed).normal(size=(frames, V)) * sharpness)


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
def test_collapse_online_is_collapse_at_once(frames: list[int], cuts: list[int]) -> None:
    collapse, written, rest = Collapse(), list[int](), frames
    for cut in cuts:
        written += collapse.push(rest[:cut])
        rest = rest[cut:]
    written += collapse.push(rest)
    assert written == [symbol for symbol, _ in groupby(frames) if symbol != BLANK]


@given(st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_beam_that_prunes_nothing_finds_the_most_probable_labels(seed: int, frames: int) -> None:
    scores = random_frames(seed, frames)
    totals: dict[tuple[int, ...], float] = {}
    for alignment in product(range(V), repeat=frames):
        labels = tuple(symbol for symbol, _ in groupby(alignment) if symbol != BLANK)
        score = sum(scores[index, symbol] for index, symbol in enumerate(alignment))
        totals[labels] = np.logaddexp(totals.get(labels, -math.inf), score)
    search = PrefixBeam(size=10**6, patience=math.inf)
    assert tuple(search.push(scores) + search.finish()) == max(totals, key=lambda labels: totals[labels])


def test_a_blank_between_equal_symbols_keeps_both_in_a_beam() -> None:
    sure = np.full((3, V), -20.0)
    sure[[0, 1, 2], [7, BLANK, 7]] = 0.0
    search = PrefixBeam(size=4)
    assert search.push(log_softmax(sure)) + search.finish() == [7, 7]


@given(st.integers(0, 1000), st.integers(2, 6), st.lists(st.integers(1, 5), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_beam_does_not_depend_on_how_its_frames_are_cut(seed: int, size: int, cuts: list[int]) -> None:
    scores = random_frames(seed, 24)
    whole, parts, written, start = PrefixBeam(size), PrefixBeam(size), list[int](), 0
    for cut in cuts:
        written += parts.push(scores[start : start + cut])
        start += cut
    written += parts.push(scores[start:]) + parts.finish()
    assert written == whole.push(scores) + whole.finish()


def test_a_beam_commits_what_is_certain_at_once() -> None:
    sure = np.full((1, V), -1000.0)
    sure[0, 6] = 0.0
    search = PrefixBeam(size=1)
    assert search.push(log_softmax(sure)) == [6]


def test_disagreement_ends_after_some_frames_of_patience() -> None:
    open_question = np.full((1, V), -1000.0)
    open_question[0, [6, 7]] = [math.log(0.51), math.log(0.49)]
    silence = np.full((1, V), -1000.0)
    silence[0, BLANK] = 0.0
    search = PrefixBeam(size=2)
    frames = [search.push(open_question)] + [search.push(silence) for _ in range(PATIENCE)]
    assert frames == [[]] * (PATIENCE - 1) + [[6], []]


@given(st.integers(0, 1000), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_wide_beam_search_finds_the_best_translation(seed: int, longest: int) -> None:
    generator = np.random.default_rng(seed)
    table = {prefix: log_softmax(generator.normal(size=V) * 2) for n in range(longest + 1) for prefix in _prefixes(n)}
    complete = {
        prefix: (sum(table[prefix[:i]][token] for i, token in enumerate(prefix)) + table[prefix][END])
        / (len(prefix) + 1)
        for n in range(1, longest + 1)
        for prefix in _prefixes(n)
    }
    search = BeamSearch(size=100, longest=longest)
    while not search.is_settled:
        search.extend(np.stack([table[tuple(hypothesis)] for hypothesis in search.open]))
    assert tuple(search.best) == max(complete, key=lambda prefix: complete[prefix])


def test_beam_search_says_where_each_hypothesis_grew_from() -> None:
    search = BeamSearch(size=2, longest=5)
    first = np.full((1, V), -9.0)
    first[0, [6, 7]] = [-0.1, -0.2]
    assert (search.extend(first), search.open) == ([0, 0], [[6], [7]])
    second = np.full((2, V), -9.0)
    second[1, [6, 7]] = -0.1
    assert (search.extend(second), search.open) == ([1, 1], [[7, 6], [7, 7]])


def test_an_ending_below_the_beam_does_not_count() -> None:
    search = BeamSearch(size=1, longest=5)
    frame = np.full((1, V), -9.0)
    frame[0, [6, END]] = [-0.1, -0.2]
    search.extend(frame)
    search.extend(frame)
    assert (search.is_settled, search.open) == (False, [[6, 6]])
    frame[0, END] = 0.0
    search.extend(frame)
    assert (search.is_settled, search.best) == (True, [6, 6])


def test_beam_search_writes_no_special_symbol_and_something() -> None:
    tempting = np.zeros((1, V))
    tempting[0, len(SPECIAL_SYMBOLS) :] = -5
    search = BeamSearch(size=1, longest=1)
    search.extend(tempting)
    assert search.open == [[6]]
    search.extend(tempting)
    assert (search.is_settled, search.best) == (True, [6])


def _prefixes(length: int) -> list[tuple[int, ...]]:
    return list(product(range(len(SPECIAL_SYMBOLS), V), repeat=length))
