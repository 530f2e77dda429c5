from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eflomal
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data.aligners import (
    align_with_awesome,
    align_with_eflomal,
    alignment_words,
    guess_unit,
    read_gold,
    read_pharaoh,
    symmetrise,
)
from simulmt.data.alignment import Link, alignment_error_rate
from simulmt.data.synthetic import SyntheticPair, generate
from simulmt.errors import DataError, MissingExtraError, SimulmtError

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
def test_the_unit_is_told_by_how_long_runs_of_ideographs_are(lines: list[str], unit: str) -> None:
    assert guess_unit(lines) == unit


# --- Symmetrisation -----------------------------------------------------------------------------------------


def test_symmetrisation_worked_by_hand() -> None:
    forward = {(1, 1), (2, 2), (2, 3), (5, 5), (6, 6)}
    reverse = {(1, 1), (2, 2), (3, 3), (4, 5), (7, 5)}
    # Both have 1-1 and 2-2. Beside 2-2 lies 2-3, since target 3 has no link yet; then 3-3, since source 3 has none.
    # 5-5, 6-6, 4-5 and 7-5 touch nothing that was chosen. At last 5-5 and 6-6 join, then 4-5 and 7-5 find 5 taken.
    assert symmetrise(forward, reverse) == {(1, 1), (2, 2), (2, 3), (3, 3), (5, 5), (6, 6)}


def test_growing_goes_on_from_what_has_grown() -> None:
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
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """eflomal with a tenth of its iterations."""
    real = eflomal.Aligner
    monkeypatch.setattr(eflomal, "Aligner", partial(real, rel_iterations=0.1))


def words_of(pair: SyntheticPair) -> tuple[list[str], list[str]]:
    return pair.source.split(), pair.target.split()


@pytest.mark.usefixtures("hasty")
def test_eflomal_finds_the_links_of_the_synthetic_languages() -> None:
    pairs = list(generate(100, 0.5, seed=1))
    found = align_with_eflomal([words_of(pair) for pair in pairs])
    assert alignment_error_rate(found, [(pair.links, pair.links) for pair in pairs]) < 0.2


@pytest.mark.usefixtures("hasty")
def test_more_text_makes_alignments_better_and_is_not_returned() -> None:
    first, *rest = generate(120, 0.5, seed=2)
    assert align_with_eflomal([]) == []
    empty = align_with_eflomal([words_of(first), ([], ["a"]), ([], [])], more=map(words_of, rest))
    assert empty[1:] == [set(), set()]
    assert alignment_error_rate(empty[:1], [(first.links, first.links)]) < 0.4


class Scribe:
    """An aligner that writes links of its own and remembers what it was given."""

    def __init__(self, forward: str, reverse: str) -> None:
        self.forward, self.reverse = forward, reverse
        self.priors: list[str] | None = None

    def __call__(self) -> Scribe:
        return self

    def align(self, source: list[str], target: list[str], forward: str, reverse: str, priors_input: Any) -> None:
        self.source, self.target, self.priors = source, target, priors_input
        Path(forward).write_text(self.forward, encoding="utf-8")
        Path(reverse).write_text(self.reverse, encoding="utf-8")


def test_both_directions_are_read_and_punctuation_does_not_hide_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scribe = Scribe("0-0 1-1\n\n", "0-0 2-1\n\n")
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
    with pytest.raises(DataError, match="links: 2 lines of alignments for 1 sentence pairs"):
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
def test_awesome_align_is_run_on_a_model_of_this_machine(model: Path) -> None:
    pairs: Sequence[tuple[list[str], list[str]]] = [PAIR, (["a", "|||"], ["b"]), ([], ["x"])]
    assert align_with_awesome(pairs, model) == [{(1, 1), (2, 2), (3, 3)}, {(1, 1)}, set()]
    with pytest.raises(SimulmtError, match="awesome-align failed: ValueError: asked to fail"):
        align_with_awesome([(["fail"], ["x"])], model)
    with pytest.raises(SimulmtError, match="not an awesome-align model"):
        align_with_awesome([PAIR], model / "packages")


def test_without_awesome_align_the_way_out_is_named(model: Path) -> None:
    with pytest.raises(SimulmtError, match="not installed: pip install awesome-align, or use --aligner eflomal"):
        align_with_awesome([PAIR], model)
