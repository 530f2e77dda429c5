"""The command `simulmt anticipation`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from data.helpers import write
from simulmt.cli import app
from simulmt.data import alignment
from simulmt.errors import ConfigError
from simulmt.eval.order import Anticipation
from simulmt.eval.results import read_records


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["anticipation", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def text(tmp_path: Path) -> tuple[object, ...]:
    write(tmp_path / "toy.en", ["a b c d", "e f"])
    write(tmp_path / "toy.zh", ["四三二一好吧", "五六七八九"])
    return "--source", tmp_path / "toy.en", "--target", tmp_path / "toy.zh"


def test_anticipation_is_shown_and_written(text: tuple[object, ...], tmp_path: Path) -> None:
    links = write(tmp_path / "links", ["3-0 2-1 1-2 0-3", "0-0 1-1"])
    gold = write(tmp_path / "gold", ["1-4 1-3 2p2 4p1", "1-1 2-2"])  # the target first
    options = ("--gold", gold, "--gold-target-first", "--aligner", f"pharaoh:{links}")
    shown = invoke(*text, *options, "--output", tmp_path / "out")
    aligned, by_hand = read_records(Anticipation, [tmp_path / "out"])
    assert aligned.alignment_error_rate == pytest.approx(1 - 7 / 10)
    assert by_hand.aligner == "gold"
    assert "30.0" in shown
    assert (tmp_path / "out" / "toy-anticipation.svg").exists()
    (kept,) = (tmp_path / "out").glob("toy-pharaoh*.links")
    assert kept.read_text(encoding="utf-8") == "0-3 1-2 2-1 3-0\n0-0 1-1\n"


def test_wrong_options_are_refused(text: tuple[object, ...], tmp_path: Path) -> None:
    for aligner in ("giza", "pharaoh", "eflomal:x", "asn:"):
        with pytest.raises(ConfigError, match=f"--aligner {aligner}: expected eflomal, pharaoh:FILE"):
            invoke(*text, "--aligner", aligner)
    with pytest.raises(ConfigError, match="--more-source and --more-target go together"):
        invoke(*text, "--more-source", tmp_path / "toy.en")


def test_the_default_aligner_is_eflomal(
    text: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def diagonal(pairs: list[object], *more: object) -> list[set[tuple[int, int]]]:
        given.append((pairs, *more))
        return [{(4, 1)}, {(1, 1)}]

    monkeypatch.setattr(alignment, "align_with_eflomal", diagonal)
    more = "--more-source", write(tmp_path / "m.en", ["x y"]), "--more-target", write(tmp_path / "m.zh", ["零"])
    shown = invoke(*text, *more)
    assert "50.0" in shown
    assert "eflomal" in shown
    invoke(*text, "--target-unit", "word")
    split, whole = (
        [["四", "三", "二", "一", "好", "吧"], ["五", "六", "七", "八", "九"]],
        [["四三二一好吧"], ["五六七八九"]],
    )
    sources = [["a", "b", "c", "d"], ["e", "f"]]
    assert given == [
        (list(zip(sources, split, strict=True)), [(["x", "y"], ["零"])], None),
        (list(zip(sources, whole, strict=True)), [], None),
    ]
