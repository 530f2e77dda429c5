from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulmt.runtime.ctc import Collapse
from simulmt.text import BLANK


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
