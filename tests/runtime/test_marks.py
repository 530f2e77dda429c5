from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulmt.runtime.marks import Marks, one_mark

texts = st.text(alphabet="a字 ,:.!，：。“”（）()", max_size=12)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("是的，。", "是的。"),
        ("抱歉，，我们", "抱歉，我们"),
        ("他说，：“好", "他说：“好"),
        ("走了。，然后", "走了。然后"),
        ("trade unions,, and", "trade unions, and"),
        ("well,.", "well."),
        ("因为下雨，", "因为下雨，"),
        ("1,234.5 at 7:45", "1,234.5 at 7:45"),
        ("e.g., std::vector", "e.g., std::vector"),
        ("“好，”他说：“走。”", "“好，”他说：“走。”"),
        ("what?! well...", "what?! well..."),
        ("他自称“”，然后", "他自称，然后"),
        ("他说，“”，然后", "他说，然后"),
        ("规则（）一", "规则一"),
        ("“好”", "“好”"),
        ("call f() now", "call f() now"),
        ("他说：“", "他说：“"),
    ],
)
def test_examples(written: str, expected: str) -> None:
    assert one_mark(written) == expected


@given(text=texts)
def test_a_mark_gives_way_to_the_next_and_empty_pairs_go(text: str) -> None:
    expected = re.sub("“”|（）|[,，：](?=[.,:!，：。])|:(?=[.,!，：。])", "", text)
    assert one_mark(text) == re.sub("(?<=[。，：])[，：]+", "", expected)


@given(text=texts, cuts=st.lists(st.integers(0, 12)))
def test_any_pieces_give_the_same_and_nothing_is_taken_back(text: str, cuts: list[int]) -> None:
    marks, written = Marks(), ""
    places = [0, *sorted(cuts), len(text)]
    for start, stop in pairwise(places):
        written += marks.push(text[start:stop])
        assert one_mark(text).startswith(written)
    assert written + marks.finish() == one_mark(text)
