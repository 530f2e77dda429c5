from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.results_directory import Diagonal, evaluated
from eval.sentences import CHINESE, GERMAN
from simulmt.cli import app
from simulmt.errors import ConfigError, DataError
from simulmt.eval.order import Anticipation, OracleScore, SortedSentence
from simulmt.eval.report import blocks, plots
from simulmt.eval.report.page import ReportOptions, build_report
from simulmt.eval.results import Result, read_results, write_records, write_results

WORSE = [line[2:] for line in GERMAN]
VOID = {"meta", "br", "link", "img"}


class Outline(HTMLParser):
    """Checks that every element is closed, and collects headings, marked words, table rows and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.marked: list[str] = []
        self.rows: list[list[str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        if self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        if "mark" in self.open:
            self.marked.append(data)
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation")
    facts: dict[str, Any] = {"commit": "abc123", "command": ("simulmt", "evaluate", "<x>"), "date": "2024-05-06T07:08"}
    for delay in (1, 3):
        evaluated(directory, "ctc", delay, WORSE, **facts)
        evaluated(directory, "a<b", delay, GERMAN)
    evaluated(directory, "teacher", None, GERMAN)
    return directory


@pytest.fixture
def results(evaluation: Path, tmp_path: Path) -> Path:
    """Write results of three systems, two of them at two delays."""
    return Path(shutil.copytree(evaluation, tmp_path / "results"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw figures, which is slow, in tests of the rest of the page."""
    monkeypatch.setattr(plots, "inline_svg", lambda _figure, _title: "<svg></svg>")


def report(*directories: Path, aligner: blocks.Aligner | None = None, **options: object) -> Outline:
    return Outline(build_report(directories, ReportOptions(**options), aligner).html)  # type: ignore[arg-type]


def test_the_page_is_self_contained(results: Path, tmp_path: Path) -> None:
    write_records(results, [SortedSentence("test", "asn", 1, 4, ("a",), ("老",), ((1.0,),))])
    made = build_report([results], ReportOptions(baseline="ctc"), Diagonal(), tmp_path / "alignments")
    outline = Outline(made.html)
    needed = {value for _, name, value in outline.attributes if name in ("src", "href", "xlink:href", "srcset", "data")}
    assert needed <= {f"#{value}" for _, name, value in outline.attributes if name == "id"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _, _ in outline.attributes}
    assert re.findall(r"url\((?!#)|@import", made.html) == []
    assert "prefers-color-scheme: dark" in made.html
    assert build_report([results], ReportOptions(baseline="ctc"), None, tmp_path / "alignments") == made


@pytest.mark.usefixtures("undrawn")
def test_the_page_begins_with_the_introduction_and_the_gains(results: Path) -> None:
    made = build_report([results], ReportOptions(about=("Why <sort>.",), baseline="ctc"), None)
    opening = made.markdown.split("## test")[0]
    assert "Why <sort>." in opening
    assert "<p>Why &lt;sort&gt;.</p>" in made.html
    scores = {result.name: result.BLEU for result in read_results(results)}
    for k in (1, 3):
        gain = scores[f"a<b-k{k}"] - scores[f"ctc-k{k}"]
        assert f"- test: ctc-k{k} scores {scores[f'ctc-k{k}']:.1f}; a<b-k{k} {gain:+.1f}*\n" in opening
    whole = build_report([results], ReportOptions(baseline="teacher"), None).markdown
    assert "- test: teacher-full scores 100.0; a<b-k3 +0.0, a<b-k1 +0.0, ctc-k" in whole
    assert "## Summary" not in build_report([results], ReportOptions(), None).markdown


def test_directories_with_analyses_alone_are_read_as_well(results: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    write_records(apart, [Anticipation("dev", "eflomal", "word", "char", 2, 3, (0.5, 0.25), 0.125)])
    assert "Anticipation" in report(results, apart).headings
    with pytest.raises(DataError, match="no such file"):
        report(results, tmp_path / "nothing")


@pytest.mark.usefixtures("undrawn")
def test_tables_hold_every_result_with_interval_and_signature(results: Path) -> None:
    made = build_report([results], ReportOptions(), None)
    rows = Outline(made.html).rows
    assert rows[0][:4] == ["system", "k", "BLEU", "chrF2"]
    names = [("ctc", "1"), ("a<b", "1"), ("ctc", "3"), ("a<b", "3"), ("teacher", "full")]
    assert [tuple(row[:2]) for row in rows[1:6]] == names
    assert re.fullmatch(r"100\.00 \[\d+\.\d, \d+\.\d\]", rows[2][2])
    for text in (made.html, made.markdown):
        assert "nrefs:1|bs:1000|seed:12345|case:lc|eff:no|tok:13a" in text
        assert "abc123" in text
    assert "| a<b | 1 | 100.00 [" in made.markdown
    assert "simulmt evaluate &lt;x&gt;" in made.html
    assert "Measured 2024-05-06." in made.html


@pytest.mark.usefixtures("undrawn")
def test_chapters_follow_what_is_on_disk(results: Path) -> None:
    plain = ["Simultaneous translation: quality and latency", "test", "Quality in detail", "Examples"]
    path, again = "Read/write path, line 1", "Reproducibility"
    assert report(results).headings == [*plain, path, again]
    write_records(results, [Anticipation("dev", "eflomal", "word", "char", 2, 3, (0.5, 0.25), 0.125)])
    write_records(results, [OracleScore("test", "asn", 3, 0, 9, 40, (39, 41), 1, 30, (29, 31), 1, "oracle signature")])
    write_records(results, [SortedSentence("test", "asn", 1, 4, ("a",), ("老",), ((1.0,),))])
    outline = report(results, baseline="ctc", aligner=Diagonal(), title="On <em>")
    assert outline.headings == [
        "On <em>",
        "Summary",
        "test",
        "Significance against ctc",
        "Quality in detail",
        "Hallucination and under-translation",
        "Examples",
        path,
        "Anticipation",
        "Oracle order",
        "test",
        "Sorting matrices Z",
        again,
    ]
    cells = [cell for row in outline.rows for cell in row]
    assert {"50.0", "25.0", "12.5", "+10.00"} <= set(cells)
    markdown = build_report([results], ReportOptions(), None).markdown
    assert "oracle signature" in markdown
    assert "| dev | eflomal | word → char | plain | 50.0 | 25.0 |" in markdown


@pytest.mark.usefixtures("undrawn")
def test_significance_is_against_the_baseline_at_each_delay(results: Path) -> None:
    rows = report(results, baseline="ctc").rows
    compared = [row[1:3] for row in rows if row[0] == "test"]
    assert compared == [["1", "ctc"], ["1", "a<b"], ["3", "ctc"], ["3", "a<b"]]


@pytest.mark.usefixtures("undrawn")
def test_only_hallucinated_words_are_marked(results: Path, tmp_path: Path) -> None:
    evaluated(tmp_path / "small", "odd", 1, ["eins <b> zwei drei", *GERMAN[1:]])

    def aligner(pairs: Sequence[object]) -> list[set[tuple[int, int]]]:
        alignments = [{(1, 1), (2, 2)} for _ in pairs]
        alignments[len(GERMAN)] = {(1, 1), (4, 4), (9, 4)}  # the first sentence of the system, after the references
        return alignments

    outline = report(tmp_path / "small", aligner=aligner, sentences=(1, 4))
    assert outline.marked == ["<b> zwei"]
    assert report(results).marked == []


@pytest.mark.usefixtures("undrawn")
def test_chinese_examples_are_written_without_spaces(tmp_path: Path) -> None:
    evaluated(tmp_path, "odd", 1, ["我用 Python 写。", *CHINESE[1:]], "char")
    html = build_report([tmp_path], ReportOptions(sentences=(1, 3)), None).html
    assert "<dd>我用Python写。</dd>" in html
    assert "<dd>牌子上写着小心，地图上写着New York大河。</dd>" in html
    assert "target units are characters" in html


@pytest.mark.usefixtures("undrawn")
def test_examples_are_side_by_side_in_markdown_too(results: Path) -> None:
    markdown = build_report([results], ReportOptions(sentences=(1,)), None).markdown
    table = markdown.partition("### Examples")[2].partition("\n## ")[0]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names == ["source, line 1", ":---", "reference", "ctc-k3", "a<b-k3", "teacher-full"]
    assert f"| reference | {' '.join(GERMAN[0].split())} |" in table


@pytest.mark.usefixtures("undrawn")
def test_examples_are_spread_evenly_or_chosen(results: Path) -> None:
    def lines(**options: object) -> list[str]:
        html = build_report([results], ReportOptions(**options), None).html  # type: ignore[arg-type]
        return re.findall(r"<dt>source, line (\d+)</dt>", html)

    assert lines(examples=2) == ["1", "3"]
    assert lines(sentences=(4, 2)) == ["4", "2"]
    assert lines(examples=0) == []
    with pytest.raises(DataError, match="--sentences 6: test has 5 sentences"):
        lines(sentences=(6,))
    with pytest.raises(ConfigError, match="sentences must be lines from 1"):
        lines(sentences=(0,))


@pytest.mark.usefixtures("undrawn")
def test_examples_are_of_one_delay_beside_whole_sentences(results: Path) -> None:
    def shown(**options: object) -> list[str]:
        html = build_report([results], ReportOptions(examples=1, **options), None).html  # type: ignore[arg-type]
        return re.findall(r"<dt>([^<]+)</dt>", html)[2:]

    assert shown() == ["ctc-k3", "a&lt;b-k3", "teacher-full"]
    assert shown(delay=1) == ["ctc-k1", "a&lt;b-k1", "teacher-full"]
    evaluated(results, "ctc", 9, WORSE)
    evaluated(results, "a<b", 9, WORSE)
    assert shown() == ["ctc-k3", "a&lt;b-k3", "teacher-full"]
    evaluated(results, "new", 9, WORSE)
    assert shown() == ["teacher-full", "ctc-k9", "a&lt;b-k9", "new-k9"]


@pytest.mark.usefixtures("undrawn")
def test_an_unknown_delay_or_baseline_is_refused(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 1, GERMAN)
    with pytest.raises(ConfigError, match="--baseline wait-k: no such system; there are ctc"):
        report(tmp_path, baseline="wait-k")
    with pytest.raises(ConfigError, match="--delay 7: no system on test"):
        report(tmp_path, delay=7)


@pytest.mark.usefixtures("undrawn")
def test_published_scores_are_shown_with_measured_ones(results: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    write_results(published, [Result("paper", 1, "test", "word", BLEU=24.17, AL=2.0)])
    write_results(tmp_path / "other", [Result("paper", 1, "other", "word", BLEU=20.0, AL=2.0)])
    outline = report(published, results, tmp_path / "other", baseline="ctc")
    assert ["paper", "1", "24.17"] in [row[:3] for row in outline.rows]
    assert outline.headings.count("Examples") == 1
    assert "Significance against ctc" in outline.headings
    assert "other" in outline.headings


@pytest.mark.usefixtures("undrawn")
def test_systems_of_one_test_set_may_lie_in_several_directories(results: Path, tmp_path: Path) -> None:
    evaluated(tmp_path / "more", "wait-k", 3, WORSE)
    outline = report(results, tmp_path / "more", aligner=Diagonal(), baseline="wait-k", examples=1)
    assert [row[0] for row in outline.rows].count("reference") == 1
    assert [row[0] for row in outline.rows][-1] == "wait-k-k3"
    assert [row[1:3] for row in outline.rows if row[0] == "test"] == [["3", "wait-k"], ["3", "ctc"], ["3", "a<b"]]
    assert outline.headings.count("test") == 1


@pytest.mark.usefixtures("undrawn")
def test_an_empty_translation_is_shown_as_such(tmp_path: Path) -> None:
    evaluated(tmp_path, "mute", 1, [""] * len(GERMAN))
    html = build_report([tmp_path], ReportOptions(), Diagonal()).html
    assert "<dd><em>nothing</em></dd>" in html


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_page_and_markdown(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = results.parent / "pages" / "report.html"
    arguments = ["report", str(results), "--output", str(page), "--examples", "1", "--title", "Ours"]
    diagonal = Diagonal()
    monkeypatch.setattr("simulmt.data.alignment.align_with_eflomal", diagonal)
    assert CliRunner().invoke(app, [*arguments, "--no-align"], catch_exceptions=False).exit_code == 0
    assert diagonal.asked == []
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert len(diagonal.asked) == 1
    assert "<h1>Ours</h1>" in page.read_text(encoding="utf-8")
    assert page.with_suffix(".md").read_text(encoding="utf-8").startswith("# Ours\n")


@pytest.mark.usefixtures("undrawn")
def test_progress_is_reported(results: Path) -> None:
    news: list[str] = []
    build_report([results], ReportOptions(baseline="ctc"), Diagonal(), progress=news.append)
    assert news == [
        f"{results}: aligning translations",
        "test: testing differences from ctc for significance",
        "drawing",
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_command_shows_progress_on_a_terminal_only(results: Path, tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    odd = results.rename(tmp_path / "[" / "bold]")  # looks like markup
    arguments = ["report", str(odd), "--output", str(tmp_path / "r.html"), "--examples", "0", "--no-align"]
    terminal = {"TTY_COMPATIBLE": "1", "TERM": "xterm"}
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, env=terminal).stderr
    assert "drawing" in shown
    plain = CliRunner().invoke(app, arguments, catch_exceptions=False).stderr
    assert plain == f"{tmp_path / 'r.html'} and {tmp_path / 'r.md'}\n"


@pytest.mark.usefixtures("undrawn")
def test_without_eflomal_the_report_is_made_and_the_extra_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.cli.evaluation.find_spec", lambda _: None)
    arguments = ["report", str(results), "--output", str(results / "r.html"), "--examples", "0"]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    assert "simulmt[align]" in found.stderr
    assert (results / "r.html").exists()
