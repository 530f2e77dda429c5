from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eflomal
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.alignment import (
    Link,
    align_with_awesome,
    align_with_eflomal,
    alignment_error_rate,
    alignment_words,
    anticipation_rate,
    format_pharaoh,
    guess_unit,
    parse_gold,
    parse_pharaoh,
    read_alignments,
    read_gold,
    read_pharaoh,
    reorder_target,
    symmetrise,
)
from simulmt.data.synthetic import SyntheticPair, generate
from simulmt.errors import ConfigError, DataError, MissingExtraError, SimulmtError

# "she has the book read" -> "she has read the book": the verb, source word 5, is written third.
VERB_FINAL = {(1, 1), (2, 2), (5, 3), (3, 4), (4, 5)}

link_sets = st.sets(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=15)


@st.composite
def targets_with_links(draw: st.DrawFn) -> tuple[list[int], set[Link]]:
    """Draw target words, named by position so that all differ, and links that fit them."""
    length = draw(st.integers(0, 7))
    link = st.tuples(st.integers(1, 9), st.integers(1, max(length, 1)))
    return list(range(length)), draw(st.sets(link, max_size=10 if length else 0))


@pytest.mark.parametrize(
    ("k", "rate"),
    [
        (1, 1 / 5),  # 5 > 3, and no other source position exceeds its target position
        (2, 1 / 5),  # 5 - 1 = 4 > 3
        (3, 0.0),  # 5 - 2 = 3: word 5 has just been read when target word 3 is due
    ],
)
def test_anticipation_rate_by_hand(k: int, rate: float) -> None:
    assert anticipation_rate([VERB_FINAL], k) == rate


def test_anticipation_rate_of_nothing_is_zero() -> None:
    assert anticipation_rate([[]], 1) == 0.0
    assert anticipation_rate([[], []], 1) == 0.0


def test_scaled_positions_ignore_that_the_target_is_shorter() -> None:
    # Six source words, three target words, each of which translates two: nothing is reordered.
    pairs = {(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)}
    assert anticipation_rate([pairs], 1) == 5 / 6
    assert anticipation_rate([pairs], 1, [(6, 3)]) == 0.0
    # The last two source words are written first: due at source positions 2 and 4 of 6, they come at 5 and 6.
    swapped = {(5, 1), (6, 1), (1, 2), (2, 2), (3, 3), (4, 3)}
    assert [anticipation_rate([swapped], k, [(6, 3)]) for k in (1, 3, 4, 5)] == [2 / 6, 2 / 6, 1 / 6, 0.0]


def test_links_scaled_to_the_same_position_stay_distinct() -> None:
    assert anticipation_rate([{(2, 1), (2, 2), (1, 4)}], 1, [(2, 8)]) == 2 / 3
    assert anticipation_rate([VERB_FINAL, set()], 1, [(5, 5), (3, 0)]) == anticipation_rate([VERB_FINAL], 1)


def test_corpus_anticipation_rate_weighs_links_not_sentences() -> None:
    assert anticipation_rate([VERB_FINAL, {(2, 1)}], 1) == 2 / 6
    assert anticipation_rate(iter([iter(VERB_FINAL), iter([(2, 1)])]), 2) == 1 / 6


def test_a_repeated_link_counts_once() -> None:
    assert anticipation_rate([[(2, 1), (2, 1), (1, 1)]], 1) == 1 / 2


@pytest.mark.parametrize("k", [0, -1])
def test_anticipation_rate_needs_a_positive_delay(k: int) -> None:
    with pytest.raises(ConfigError, match=f"k must be at least 1, got {k}"):
        anticipation_rate([VERB_FINAL], k)


@settings(deadline=None, max_examples=100)
@given(link_sets, st.integers(1, 9))
def test_a_longer_delay_never_anticipates_more(links: set[Link], k: int) -> None:
    assert anticipation_rate([links], k + 1) <= anticipation_rate([links], k)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({(1, 1), (2, 2), (3, 3), (4, 4)}, "a b c d"),
        ({(4, 1), (3, 2), (2, 3), (1, 4)}, "d c b a"),
        (set(), "a b c d"),
        ({(2, 1), (1, 3)}, "c d a b"),  # b follows a and d follows c, wherever they go
        ({(2, 3), (1, 4)}, "a b d c"),  # a and b have nothing to follow: they stay first
        ({(1, 1), (4, 1), (2, 2), (3, 3), (4, 4)}, "b c a d"),  # a waits for its last source word, 4
        ({(1, 2), (1, 1), (1, 4), (1, 3)}, "a b c d"),  # ties keep their order
    ],
)
def test_reorder_target_by_hand(links: set[Link], expected: str) -> None:
    assert reorder_target(["a", "b", "c", "d"], links) == expected.split()


@settings(deadline=None, max_examples=150)
@given(targets_with_links())
def test_reordering_permutes_words_into_source_order(case: tuple[list[int], set[Link]]) -> None:
    words, links = case
    reordered = reorder_target(words, links)
    assert sorted(reordered) == words
    last_source = {word: max((i for i, j in links if j == word + 1), default=None) for word in words}
    aligned = [position for word in reordered if (position := last_source[word]) is not None]
    assert aligned == sorted(aligned)
    for before, word in zip([None, *reordered], reordered, strict=False):
        if last_source[word] is None:
            assert before == (word - 1 if word else None)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_reordering_is_the_least_disturbing_sort(sources: list[int]) -> None:
    """Among all orders sorted by source position, it exchanges the fewest pairs."""
    words = list(range(len(sources)))
    in_source_order = [order for order in permutations(words) if [sources[w] for w in order] == sorted(sources)]

    def exchanged_pairs(order: tuple[int, ...]) -> int:
        return sum(a > b for n, a in enumerate(order) for b in order[n:])

    expected = min(in_source_order, key=exchanged_pairs)
    assert reorder_target(words, [(i, j) for j, i in enumerate(sources, start=1)]) == list(expected)


@pytest.mark.parametrize("link", [(1, 0), (0, 1), (1, 3)])
def test_reorder_target_names_a_link_that_does_not_fit(link: Link) -> None:
    with pytest.raises(DataError, match=rf"link \({link[0]}, {link[1]}\) does not fit a target of 2 words"):
        reorder_target(["a", "b"], [link])


def test_alignment_error_rate_by_hand() -> None:
    sure, possible = {(1, 1), (2, 2)}, {(3, 2)}
    assert alignment_error_rate([sure], [(sure, possible)]) == 0.0
    # Of A = {1-1, 3-2, 4-4}: one is sure, two are possible (1-1 by being sure); |A| + |S| = 5.
    assert alignment_error_rate([{(1, 1), (3, 2), (4, 4)}], [(sure, possible)]) == pytest.approx(1 - (1 + 2) / 5)
    assert alignment_error_rate([{(7, 7)}], [(sure, possible)]) == 1.0
    assert alignment_error_rate([[]], [([], possible)]) == 0.0


def test_alignment_error_rate_of_a_corpus_sums_counts() -> None:
    predicted = [{(1, 1)}, {(1, 2), (2, 2), (3, 3)}]
    gold: list[tuple[set[Link], set[Link]]] = [({(1, 1)}, set()), ({(2, 2)}, {(3, 3)})]
    # First sentence: 1 sure + 1 possible of 1 + 1. Second: 1 sure + 2 possible of 3 + 1.
    assert alignment_error_rate(iter(predicted), iter(gold)) == pytest.approx(1 - (2 + 3) / (2 + 4))


def test_alignment_error_rate_needs_parallel_corpora() -> None:
    with pytest.raises(DataError, match="expected 0 alignments, one per gold alignment, got 1"):
        alignment_error_rate([{(1, 1)}], [])


def test_parse_pharaoh() -> None:
    assert parse_pharaoh("0-0 1-2\n") == {(1, 1), (2, 3)}
    assert parse_pharaoh(" 0-0  1-2 ") == {(1, 1), (2, 3)}
    assert parse_pharaoh("\n") == set()


@settings(deadline=None, max_examples=50)
@given(link_sets)
def test_pharaoh_round_trip(links: set[Link]) -> None:
    assert parse_pharaoh(format_pharaoh(links)) == links


def test_format_pharaoh_is_sorted_and_counts_from_zero() -> None:
    assert format_pharaoh([(3, 1), (1, 2), (1, 1), (3, 1)]) == "0-0 0-1 2-0"


def test_parse_gold_separates_sure_from_possible() -> None:
    assert parse_gold("1-1 2p4 3?5\n") == ({(1, 1)}, {(1, 1), (2, 4), (3, 5)})
    assert parse_gold("1-1 2p4", swapped=True) == ({(1, 1)}, {(1, 1), (4, 2)})
    assert parse_gold("0-3", base=0, swapped=True) == ({(4, 1)}, {(4, 1)})


@pytest.mark.parametrize("token", ["1", "1-", "-1-2", "1-2-3", "a-b", "1:2", "1--2", "²-1"])
def test_parsers_name_a_malformed_token(token: str) -> None:
    for parse in (parse_pharaoh, parse_gold):
        with pytest.raises(DataError, match=f"'{token}'"):
            parse(f"1-1 {token} 2-2")


def test_gold_links_check_their_base() -> None:
    with pytest.raises(DataError, match="'0-1': positions of this file count from 1"):
        parse_gold("0-1")


def test_pharaoh_has_no_possible_links() -> None:
    with pytest.raises(DataError, match="'1p2': a possible link"):
        parse_pharaoh("0-0 1p2")


def test_read_alignments_parses_each_line(tmp_path: Path) -> None:
    path = tmp_path / "gold"
    path.write_text("1-1 2p1\n\n3-1\n")
    assert list(read_alignments(path, partial(parse_gold, swapped=True))) == [
        ({(1, 1)}, {(1, 1), (1, 2)}),
        (set(), set()),
        ({(1, 3)}, {(1, 3)}),
    ]


@pytest.mark.parametrize("second_line", [b"0-x", b"0-\xff"])
def test_read_alignments_names_file_and_line(tmp_path: Path, second_line: bytes) -> None:
    path = tmp_path / "train.links"
    path.write_bytes(b"0-0\n" + second_line + b"\n")
    with pytest.raises(DataError, match=r"train\.links:2: alignment link '0-"):
        list(read_alignments(path, parse_pharaoh))


def test_read_alignments_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.links: no such file"):
        list(read_alignments(tmp_path / "nowhere.links", parse_pharaoh))


PAIR = (["the", "old", "bridge"], ["die", "alte", "Brücke"])
LINKS = st.sets(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=10)


# --- Units --------------------------------------------------------------------------------------------------


def test_text_without_spaces_is_counted_in_characters_with_latin_words_whole() -> None:
    assert alignment_words("我用 Python 写程序。", "char") == ["我", "用", "Python", "写", "程", "序", "。"]
    assert alignment_words("我 用 Python 写 程序 。", "word") == ["我", "用", "Python", "写", "程序", "。"]


@pytest.mark.parametrize(
    ("lines", "unit"),
    [
        (["The old bridge.", "The sign says 小心 and nothing else."], "word"),
        (["河上的老桥冬天不开放。", "我用 Python 写程序。"], "char"),
        (["河 上 的 老桥 冬天 不 开放 。", "没有 人 知道 莫名其妙 的 答案 。"], "word"),
        ([], "word"),
    ],
)
def test_the_unit_is_guessed_from_the_length_of_ideograph_runs(lines: list[str], unit: str) -> None:
    assert guess_unit(lines) == unit


# --- Symmetrisation -----------------------------------------------------------------------------------------


def test_symmetrisation_worked_by_hand() -> None:
    forward = {(1, 1), (2, 2), (2, 3), (5, 5), (6, 6)}
    reverse = {(1, 1), (2, 2), (3, 3), (4, 5), (7, 5)}
    # Both have 1-1 and 2-2. Beside 2-2 lies 2-3, since target 3 has no link yet; then 3-3, since source 3 has none.
    # 5-5, 6-6, 4-5 and 7-5 touch nothing that was chosen. At last 5-5 and 6-6 join, then 4-5 and 7-5 find 5 taken.
    assert symmetrise(forward, reverse) == {(1, 1), (2, 2), (2, 3), (3, 3), (5, 5), (6, 6)}


def test_growing_continues_from_added_links() -> None:
    forward, reverse = {(1, 1), (2, 2), (3, 3)}, {(1, 1), (4, 3)}
    assert symmetrise(forward, reverse) == {(1, 1), (2, 2), (3, 3), (4, 3)}


@settings(deadline=None, max_examples=200)
@given(LINKS, LINKS)
def test_symmetrised_links_lie_between_intersection_and_union(forward: set[Link], reverse: set[Link]) -> None:
    links = symmetrise(forward, reverse)
    assert forward & reverse <= links <= forward | reverse
    sources, targets = {i for i, _ in links}, {j for _, j in links}
    assert all(i in sources or j in targets for i, j in forward | reverse)
    assert symmetrise(forward, forward) == forward


# --- eflomal ------------------------------------------------------------------------------------------------


@pytest.fixture
def fast_eflomal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run eflomal with a tenth of its iterations."""
    real = eflomal.Aligner
    monkeypatch.setattr(eflomal, "Aligner", partial(real, rel_iterations=0.1))


def words_of(pair: SyntheticPair) -> tuple[list[str], list[str]]:
    return pair.source.split(), pair.target.split()


@pytest.mark.usefixtures("fast_eflomal")
def test_eflomal_finds_the_links_of_the_synthetic_languages() -> None:
    pairs = list(generate(100, 0.5, seed=1))
    found = align_with_eflomal([words_of(pair) for pair in pairs])
    assert alignment_error_rate(found, [(pair.links, pair.links) for pair in pairs]) < 0.2


@pytest.mark.usefixtures("fast_eflomal")
def test_more_text_makes_alignments_better_and_is_not_returned() -> None:
    first, *rest = generate(120, 0.5, seed=2)
    assert align_with_eflomal([]) == []
    empty = align_with_eflomal([words_of(first), ([], ["a"]), ([], [])], more=map(words_of, rest))
    assert empty[1:] == [set(), set()]
    assert alignment_error_rate(empty[:1], [(first.links, first.links)]) < 0.4


class FakeAligner:
    """A fake aligner that writes fixed links and records its arguments."""

    def __init__(self, forward: str, reverse: str) -> None:
        self.forward, self.reverse = forward, reverse
        self.priors: list[str] | None = None

    def __call__(self) -> FakeAligner:
        return self

    def align(self, source: list[str], target: list[str], forward: str, reverse: str, priors_input: Any) -> None:
        self.source, self.target, self.priors = source, target, priors_input
        Path(forward).write_text(self.forward, encoding="utf-8")
        Path(reverse).write_text(self.reverse, encoding="utf-8")


def test_both_directions_are_read_and_punctuation_does_not_hide_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scribe = FakeAligner("0-0 1-1\n\n", "0-0 2-1\n\n")
    monkeypatch.setattr(eflomal, "Aligner", scribe)
    (tmp_path / "priors").write_text("LEX\ta\tb\t1\n", encoding="utf-8")
    pairs = [(["“Close", "it,", "now!”"], ["Mach", "zu", "..."]), (["x"], ["y"])]
    assert align_with_eflomal(pairs, priors=tmp_path / "priors") == [{(1, 1), (2, 2), (3, 2)}, set()]
    assert (scribe.source, scribe.target) == (["Close it now", "x"], ["Mach zu ...", "y"])
    assert scribe.priors == ["LEX\ta\tb\t1"]


def test_without_eflomal_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.raises(MissingExtraError, match=r"simulmt\[align\]"):
        align_with_eflomal([PAIR])


def test_a_failure_of_eflomal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(eflomal, "Aligner", lambda: SimpleNamespace(align=fail))
    with pytest.raises(SimulmtError, match="eflomal failed: no memory"):
        align_with_eflomal([PAIR])


# --- Files --------------------------------------------------------------------------------------------------


def written(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_alignments_are_read_from_files(tmp_path: Path) -> None:
    links = written(tmp_path / "links", ["0-0 2-2", ""])
    assert read_pharaoh(links, [PAIR, PAIR]) == [{(1, 1), (3, 3)}, set()]
    gold = written(tmp_path / "gold", ["1-1 2p3", "3?1"])
    assert read_gold(gold, [PAIR, PAIR]) == [({(1, 1)}, {(1, 1), (2, 3)}), (set(), {(3, 1)})]
    assert read_gold(gold, [PAIR, PAIR], target_first=True)[0][1] == {(1, 1), (3, 2)}


def test_alignments_that_do_not_fit_the_text_are_refused(tmp_path: Path) -> None:
    links = written(tmp_path / "links", ["0-0", "0-3"])
    with pytest.raises(DataError, match="links: 2 alignments for 1 sentence pairs; line n must align pair n"):
        read_pharaoh(links, [PAIR])
    with pytest.raises(DataError, match=r"links:2: links source unit 1 to target unit 4, .* the pair has 3 and 3"):
        read_pharaoh(links, [PAIR, PAIR])
    with pytest.raises(DataError, match="gold:1: links source unit 4"):
        read_gold(written(tmp_path / "gold", ["4?1"]), [PAIR])


# --- awesome-align ------------------------------------------------------------------------------------------

# Stands in for awesome-align: links every word to the word at its own place, and fails if a word says so.
STAND_IN = """
import argparse
parser = argparse.ArgumentParser()
for name in ("model_name_or_path", "data_file", "output_file", "num_workers"):
    parser.add_argument("--" + name, required=True)
options = parser.parse_args()
with open(options.data_file, encoding="utf-8") as lines, open(options.output_file, "w") as output:
    for line in lines:
        source, target = (side.split() for side in line.rstrip("\\n").split(" ||| "))
        if "fail" in source:
            raise ValueError("asked to fail")
        print(*(f"{n}-{n}" for n in range(min(len(source), len(target)))), file=output)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    written(tmp_path / "config.json", ["{}"])
    return tmp_path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "awesome_align"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "run_align.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.usefixtures("stand_in")
def test_awesome_align_runs_with_a_local_model(model: Path) -> None:
    pairs: Sequence[tuple[list[str], list[str]]] = [PAIR, (["a", "|||"], ["b"]), ([], ["x"])]
    assert align_with_awesome(pairs, model) == [{(1, 1), (2, 2), (3, 3)}, {(1, 1)}, set()]
    with pytest.raises(SimulmtError, match="awesome-align failed: ValueError: asked to fail"):
        align_with_awesome([(["fail"], ["x"])], model)
    with pytest.raises(SimulmtError, match="not an awesome-align model"):
        align_with_awesome([PAIR], model / "packages")


def test_without_awesome_align_the_error_says_what_to_do(model: Path) -> None:
    with pytest.raises(SimulmtError, match="not installed: pip install awesome-align, or use --aligner eflomal"):
        align_with_awesome([PAIR], model)
