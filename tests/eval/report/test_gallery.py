from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eval.results_directory import Diagonal, evaluated
from eval.sentences import CHINESE, GERMAN
from simulmt.cli import figures
from simulmt.errors import ConfigError, DataError
from simulmt.eval.report import figure
from simulmt.eval.report.examples import read_outputs
from simulmt.eval.report.gallery import draw_gallery, ngram_gain_figures
from simulmt.eval.results import Anticipation, SortedSentence, read_results, write_records

WORSE = [line[2:] for line in GERMAN]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for delay in (1, 3):
        evaluated(tmp_path, "ctc", delay, WORSE)
        evaluated(tmp_path, "asn", delay, GERMAN)
    evaluated(tmp_path, "teacher", None, GERMAN)
    return tmp_path


def test_every_result_has_its_picture(results: Path) -> None:
    assert [name for name, _ in draw_gallery([results], None, ())] == ["test-quality-latency"]
    write_records(results, [Anticipation("dev", "eflomal", "word", "char", 2, 3, (0.5, 0.25))])
    write_records(results, [SortedSentence("test", "asn", 1, 4, ("a",), ("b",), ((1.0,),))])
    assert [name for name, _ in draw_gallery([results], "ctc", (2, 3))] == [
        "test-quality-latency",
        "test-gain-asn-over-ctc",
        "anticipation",
        "test-line4-asn-k1-Z",
        *(
            f"test-line{number}-{system}-path"
            for system in ("ctc-k1", "asn-k1", "ctc-k3", "asn-k3", "teacher-full")
            for number in (2, 3)
        ),
    ]


def test_paths_show_links_where_they_were_kept(results: Path, tmp_path: Path) -> None:
    cache = tmp_path / "alignments"

    def lines(name: str) -> int:
        drawn = dict(draw_gallery([results], None, (1,), cache))
        return len(drawn[f"test-line1-{name}-path"].axes[0].lines)

    assert lines("ctc-k3") == 1
    read_outputs(results, read_results(results), Diagonal(), cache)
    assert lines("ctc-k3") == 2


def test_gains_need_a_delay_in_common(results: Path) -> None:
    systems = read_results(results)
    assert [name for name, _ in ngram_gain_figures(systems, "teacher")] == []
    assert [name for name, _ in ngram_gain_figures(systems, None)] == []


def test_wrong_names_and_lines_are_refused(results: Path) -> None:
    with pytest.raises(ConfigError, match="--baseline best: no such system; there are ctc, asn, teacher"):
        list(draw_gallery([results], "best", ()))
    with pytest.raises(DataError, match=r"--sentences 6: .* has 5 sentences"):
        list(draw_gallery([results], None, (6,)))


def test_the_command_says_what_it_wrote_and_which_font_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure, "CHINESE_FONTS", ())
    evaluated(tmp_path / "results", "ctc:new", 1, CHINESE, "char")
    app = typer.Typer()
    figures.register(app)
    arguments = ["plot", str(tmp_path / "results"), "--output", str(tmp_path / "pictures"), "--sentences", "1,4"]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    stems = ("test-quality-latency", "test-line1-ctc-new-k1-path", "test-line4-ctc-new-k1-path")
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("svg", "png")}
    assert found.stderr.count("fonts-noto-cjk") == 1
    with pytest.raises(ConfigError, match="--sentences 0: expected comma-separated whole numbers from 1"):
        CliRunner().invoke(app, [*arguments[:-1], "0"], catch_exceptions=False)
