from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.decoding import log_softmax
from simulmt.runtime.seq2seq import BeamSearch
from simulmt.text import END, SPECIAL_SYMBOLS

V = 8  # symbols 6 and 7 beside the special ones


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
    while not search.is_done:
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
    assert (search.is_done, search.open) == (False, [[6, 6]])
    frame[0, END] = 0.0
    search.extend(frame)
    assert (search.is_done, search.best) == (True, [6, 6])


def test_beam_search_writes_no_special_symbol_and_something() -> None:
    tempting = np.zeros((1, V))
    tempting[0, len(SPECIAL_SYMBOLS) :] = -5
    search = BeamSearch(size=1, longest=1)
    search.extend(tempting)
    assert search.open == [[6]]
    search.extend(tempting)
    assert (search.is_done, search.best) == (True, [6])


def _prefixes(length: int) -> list[tuple[int, ...]]:
    return list(product(range(len(SPECIAL_SYMBOLS), V), repeat=length))
