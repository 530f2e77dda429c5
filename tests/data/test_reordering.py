from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.reordering import reorder_corpus
from simulmt.errors import ConfigError, DataError

from .helpers import lines, unchanged_texts, write


class TestReordering:
    @pytest.mark.parametrize(
        ("source", "target", "links", "expected"),
        [
            # the verb at the end of the German clause comes where English has it
            ("I have seen the boat", "ich habe das Boot gesehen", "0-0 1-1 2-4 3-2 4-3", "ich habe gesehen das Boot"),
            # "not" has no link and stays behind its predecessor, which moves
            ("a b c", "C not A", "2-0 0-2", "A C not"),
            # unaligned at the beginning: stays there; a word with two links waits for the later one
            ("a b c", "oh BC A", "1-1 2-1 0-2", "oh A BC"),
            ("a b", "B A", "", "B A"),
        ],
    )
    def test_words_by_hand(self, tmp_path: Path, source: str, target: str, links: str, expected: str) -> None:
        assert reordered(tmp_path, source, target, links) == expected

    @pytest.mark.parametrize(
        ("target", "links", "unit", "expected"),
        [
            ("船我看见", "1-0 0-1 2-2", "char", "我船看见"),
            ("船 我 看见", "1-0 0-1 2-2", "word", "我船看见"),  # cut into words: those stay whole, spaces go
            ("用 Python 写程序", "2-0 0-1 1-2", "char", "Python 写程序用"),
            ("用Python写程序", "2-0 0-1 1-2", "char", "Python写程序用"),
            ("在 New York，等", "2-0 0-1 0-2 1-3", "char", "New York，等在"),
            ("New 等York", "2-0 0-1 1-2", "char", "等York New"),
        ],
    )
    def test_ideographs_by_hand(self, tmp_path: Path, target: str, links: str, unit: Any, expected: str) -> None:
        assert reordered(tmp_path, "one two three", target, links, unit) == expected

    @settings(deadline=None, max_examples=30)
    @given(
        corpus=st.lists(
            st.tuples(
                st.integers(1, 6),
                st.lists(st.text("abc,.", min_size=1, max_size=3), min_size=1, max_size=6),
                st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_no_word_is_lost_and_what_is_in_order_stays(
        self, corpus: list[tuple[int, list[str], set[tuple[int, int]]]], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("reorder")
        sources = [" ".join(["x"] * words) for words, _, _ in corpus]
        links = [[(i, j) for i, j in sorted(each) if i < words and j < len(target)] for words, target, each in corpus]
        paths = (
            write(folder / "text.source", sources),
            write(folder / "text.target", [" ".join(target) for _, target, _ in corpus]),
            write(folder / "text.links", [" ".join(f"{i}-{j}" for i, j in each) for each in links]),
        )
        reorder_corpus(*paths, folder / "out")
        assert lines(folder / "out.source") == sources
        for (_, target, _), each, line in zip(corpus, links, lines(folder / "out.target"), strict=True):
            assert Counter(line.split(" ")) == Counter(target)
            needed = {j: max(i for i, other in each if other == j) for _, j in each}
            if [needed[j] for j in sorted(needed)] == sorted(needed.values()):
                assert line == " ".join(target)  # nothing to do

    def test_empty_sides_are_left_out_of_both_files(self, tmp_path: Path) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "", "a"]),
            write(tmp_path / "text.target", ["B A", "X", " "]),
            write(tmp_path / "text.links", ["0-1 1-0", "", ""]),
        )
        made = reorder_corpus(*paths, tmp_path / "out")
        assert made["left"] == {"empty": [2, 3]}
        assert (lines(tmp_path / "out.source"), lines(tmp_path / "out.target")) == (["a b"], ["A B"])

    @pytest.mark.parametrize(
        ("links", "message"),
        [
            (
                ["0-0", "0-2"],
                r"text\.links:2: links source unit 1 to target unit 3, .* has 2 and 2; give the text that was aligned",
            ),
            (["2-0", "0-0"], r"text\.links:1: links source unit 3"),
            (["0-0"], r"text\.links: has fewer lines than .*text\.source"),
            (["0-0", "", ""], r"text\.links: has more lines than .*text\.source"),
            (["0-0", "x"], r"text\.links:2: alignment link 'x'"),
        ],
    )
    def test_links_that_do_not_fit_are_named_by_file_and_line(
        self, tmp_path: Path, links: list[str], message: str
    ) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "c d"]),
            write(tmp_path / "text.target", ["A B", "C D"]),
            write(tmp_path / "text.links", links),
        )
        with pytest.raises(DataError, match=message):
            reorder_corpus(*paths, tmp_path / "out")
        assert not (tmp_path / "out.target").exists()


def reordered(folder: Path, source: str, target: str, links: str, unit: Any = "word") -> str:
    paths = write(folder / "source", [source]), write(folder / "target", [target]), write(folder / "links", [links])
    reorder_corpus(*paths, folder / "out", ("word", unit))
    (line,) = lines(folder / "out.target")
    return line


@pytest.mark.parametrize("overwrite", [False, True])
class TestOwnInputs:
    """No rewriting replaces its own input, even with `overwrite`."""

    @pytest.fixture(autouse=True)
    def texts(self, tmp_path: Path) -> Iterator[None]:
        write(tmp_path / "other.links", [])
        with unchanged_texts(tmp_path, "mine.source", "mine.target", "other.source", "other.target"):
            yield

    @pytest.mark.parametrize("read", [0, 1, 2])
    def test_of_reordering(self, tmp_path: Path, read: int, overwrite: bool) -> None:
        paths = [tmp_path / f"other.{name}" for name in ("source", "target", "links")]
        paths[read] = tmp_path / "mine.target"
        source, target, links = paths
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.target"):
            reorder_corpus(source, target, links, tmp_path / "mine", overwrite=overwrite)
