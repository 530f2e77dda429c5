from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation
from typer.testing import CliRunner

from eval.results_directory import Diagonal, evaluated
from eval.sentences import CHINESE, GERMAN
from simulmt.cli import app
from simulmt.errors import ConfigError, DataError, MissingExtraError
from simulmt.eval.order import Anticipation, SortedSentence
from simulmt.eval.report import plots as module
from simulmt.eval.report.blocks import Output, read_outputs
from simulmt.eval.report.plots import (
    INK,
    MARKERS,
    MIN_WEIGHT,
    PALETTE,
    anticipation_figure,
    assign_styles,
    contrasting_ink,
    draw_all,
    drawing,
    heat_map_figure,
    inline_svg,
    ngram_gain_figure,
    ngram_gain_figures,
    ngram_gains,
    path_figure,
    quality_latency_figure,
    save_figures,
    svg_text,
)
from simulmt.eval.results import Result, read_results, write_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def result(system: str, delay: int | None, BLEU: float, AL: float, **more: Any) -> Result:
    return Result(system, delay, "test", "word", BLEU=BLEU, AL=AL, **more)


def anticipation(corpus: str, *rates: float) -> Anticipation:
    return Anticipation(corpus, "gold", "word", "word", 1, 1, rates)


def sorted_sentence(Z: tuple[tuple[float, ...], ...], columns: list[str], rows: list[str]) -> SortedSentence:
    return SortedSentence("test", "asn", 1, 1, tuple(columns), tuple(rows), Z)


RESULTS = [
    result("ctc", 3, 20.0, 4.0, chrF2=50.0, AL_CA=60.0, BLEU_interval=(19.0, 21.0)),
    result("ctc", 1, 18.0, 2.0, chrF2=48.0, AL_CA=50.0, BLEU_interval=(17.0, 19.0)),
    result("wait-k", 1, 15.0, 1.5, chrF2=45.0, AL_CA=900.0),
    result("teacher", None, 30.0, 20.0, chrF2=60.0),
]


def nodes(axes: Axes, look_of: str) -> list[tuple[float, float]]:
    """Return the positions of the markers of a colour."""
    lines = [line for line in axes.lines if line.get_marker() in MARKERS and to_hex(str(line.get_color())) == look_of]
    return [(x, y) for line in lines for x, y in np.asarray(line.get_xydata()).tolist()]


def labels(axes: Axes) -> list[tuple[str, tuple[float, float]]]:
    return [(text.get_text(), text.xy) for text in axes.texts if isinstance(text, Annotation)]


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_styles_differ_for_many_systems() -> None:
    names = [f"system {number}" for number in range(len(PALETTE) * len(MARKERS))]
    assert len(set(assign_styles(names).values())) == len(names)
    assert assign_styles(["a", "b", "a"]) == assign_styles(["a", "b"])


def test_quality_against_latency_has_a_line_per_system_and_a_labelled_point_per_delay() -> None:
    figure = quality_latency_figure(RESULTS)
    by_al, by_ca, chrf, _ = figure.axes
    styles = assign_styles(["ctc", "wait-k", "teacher"])
    assert nodes(by_al, styles["ctc"].colour) == [(2, 18), (4, 20)]
    assert nodes(by_al, styles["wait-k"].colour) == [(1.5, 15)]
    assert nodes(by_ca, styles["ctc"].colour) == [(50, 18), (60, 20)]
    assert nodes(chrf, styles["ctc"].colour) == [(2, 48), (4, 50)]
    assert labels(by_al) == [("1", (2, 18)), ("3", (4, 20)), ("1", (1.5, 15))]
    assert sorted(legend_of(figure)) == ["ctc", "teacher", "wait-k"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["BLEU", "", "chrF2", ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "AL (source words)", "AL-CA (ms)"]


def test_a_full_sentence_system_is_a_horizontal_line() -> None:
    for axes, height in zip(quality_latency_figure(RESULTS).axes, (30, 30, 60, 60), strict=True):
        (across,) = [line for line in axes.lines if line.get_label() == "teacher"]
        assert set(np.asarray(across.get_ydata()).tolist()) == {height}
        assert nodes(axes, assign_styles(["ctc", "wait-k", "teacher"])["teacher"].colour) == []


def test_a_wide_range_of_latencies_uses_a_logarithmic_scale() -> None:
    assert [axes.get_xscale() for axes in quality_latency_figure(RESULTS).axes] == ["linear", "log"] * 2
    assert [axes.get_xscale() for axes in quality_latency_figure(RESULTS[:2]).axes] == ["linear", "linear"] * 2


def test_intervals_are_bands_where_they_are_known() -> None:
    by_al, *_, by_chrf = quality_latency_figure(RESULTS).axes
    (band,) = by_al.collections
    ends = band.get_paths()[0].get_extents()
    assert (ends.ymin, ends.ymax) == (17, 21)
    assert len(by_chrf.collections) == 0


def test_unmeasured_latencies_have_no_panel() -> None:
    (axes,) = quality_latency_figure([result("published", 1, 20.0, 3.0)]).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("AL (source words)", "BLEU")


def test_anticipation_is_drawn_in_percent_over_k() -> None:
    figure = anticipation_figure([anticipation("En-Zh", 0.5, 0.25), anticipation("De-En", 0.1, 0.0)])
    (axes,) = figure.axes
    assert [np.asarray(line.get_xydata()).tolist() for line in axes.lines] == [[[1, 50], [2, 25]], [[1, 10], [2, 0]]]
    assert legend_of(figure) == ["En-Zh, gold", "De-En, gold"]
    assert axes.get_ylim()[0] == 0


def test_long_names_do_not_squeeze_the_picture() -> None:
    svg_text(anticipation_figure([anticipation("x" * 200, 0.5), anticipation("y" * 200, 0.4)]))
    svg_text(quality_latency_figure([result("z" * 200, 1, 20.0, 3.0)]))
    svg_text(heat_map_figure(sorted_sentence(((1.0,),), ["c" * 40], ["r" * 40])))


BASE = [
    result("base", 3, 0, 0, precisions=(50.0, 30.0, 20.0, 10.0)),
    result("base", 1, 0, 0, precisions=(40.0, 20.0, 10.0, 5.0)),
    result("base", 5, 0, 0, precisions=(40.0, 20.0, 10.0, 5.0)),
]
OTHER = [
    result("other", 1, 0, 0, precisions=(41.0, 22.0, 13.0, 9.0)),
    result("other", 3, 0, 0, precisions=(49.0, 30.5, 21.0, 12.0)),
    result("other", 9, 0, 0, precisions=(40.0, 20.0, 10.0, 5.0)),
]


def test_ngram_gains_are_differences_at_shared_delays() -> None:
    assert ngram_gains([*BASE, *OTHER], "other", "base") == {"k = 1": [1, 2, 3, 4], "k = 3": [-1, 0.5, 1, 2]}
    assert ngram_gains([*BASE[2:], *OTHER], "other", "base") == {}
    assert ngram_gains([result("base", 1, 0, 0), *OTHER], "other", "base") == {}


def test_one_group_of_bars_per_n_and_one_bar_per_delay() -> None:
    figure = ngram_gain_figure(ngram_gains([*BASE, *OTHER], "other", "base"), "other over base")
    (axes,) = figure.axes
    bars = [
        [(round(bar.get_x() + bar.get_width() / 2), bar.get_height()) for bar in group] for group in axes.containers
    ]
    assert bars == [[(1, 1), (2, 2), (3, 3), (4, 4)], [(1, -1), (2, 0.5), (3, 1), (4, 2)]]
    assert axes.get_title() == "other over base"
    assert legend_of(figure) == ["k = 1", "k = 3"]


def test_the_heat_map_shows_every_cell_by_its_weight() -> None:
    Z = (0.75, 0.25), (MIN_WEIGHT / 2, 1.0)
    (axes,) = heat_map_figure(sorted_sentence(Z, ["$5", "$6"], ["四 ·", "六 </s>"])).axes
    (cells,) = axes.collections
    middles = [path.get_extents() for path in cells.get_paths()]
    places = [((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2) for box in middles]
    alphas = np.asarray(cells.get_facecolor())[:, 3].tolist()
    assert dict(zip(places, alphas, strict=True)) == {(0, 0): 0.75, (1, 0): 0.25, (1, 1): 1.0}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$5", "$6"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["四 ·", "六 </s>"]
    assert axes.get_ylim() == (1.5, -0.5)


def test_tokens_are_text_and_not_formulas() -> None:
    svg = svg_text(heat_map_figure(sorted_sentence(((1, 0), (0, 1)), ["a$x^2$", "$\\nonsense$"], ["b", "c"])))
    assert "a$x^2$" in svg
    assert "$\\nonsense$" in svg


def test_the_path_is_a_staircase_with_anticipated_links_to_its_right() -> None:
    output = Output(["a", "b", "c"], ["x", "y", "z"], [1, 1, 3], "word", {(1, 1), (3, 2), (3, 3)})
    (axes,) = path_figure(output).axes
    stairs, read, ahead = axes.lines
    corners = [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 1.5), (2.5, 1.5), (2.5, 2.5)]
    assert list(map(tuple, np.asarray(stairs.get_xydata()).tolist())) == corners
    assert np.asarray(read.get_xydata()).tolist() == [[0, 0], [2, 2]]
    assert np.asarray(ahead.get_xydata()).tolist() == [[2, 1]]
    assert "not yet read" in str(ahead.get_label())


def test_a_path_without_links_or_words() -> None:
    figure = path_figure(Output(["a", "b"], ["x"], [2], "word"))
    assert len(figure.axes[0].lines) == 1
    assert figure.legends == []
    svg_text(path_figure(Output(["a"], [], [], "word")))


WORSE = [line[2:] for line in GERMAN]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for delay in (1, 3):
        evaluated(tmp_path, "ctc", delay, WORSE)
        evaluated(tmp_path, "asn", delay, GERMAN)
    evaluated(tmp_path, "teacher", None, GERMAN)
    return tmp_path


def test_every_result_has_its_picture(results: Path) -> None:
    assert [name for name, _ in draw_all([results], None, ())] == ["test-quality-latency"]
    write_records(results, [Anticipation("dev", "eflomal", "word", "char", 2, 3, (0.5, 0.25))])
    write_records(results, [SortedSentence("test", "asn", 1, 4, ("a",), ("b",), ((1.0,),))])
    assert [name for name, _ in draw_all([results], "ctc", (2, 3))] == [
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


def test_paths_show_cached_links(results: Path, tmp_path: Path) -> None:
    cache = tmp_path / "alignments"

    def lines(name: str) -> int:
        drawn = dict(draw_all([results], None, (1,), cache))
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
        list(draw_all([results], "best", ()))
    with pytest.raises(DataError, match=r"--sentences 6: .* has 5 sentences"):
        list(draw_all([results], None, (6,)))


def test_the_command_reports_its_files_and_a_missing_font(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHINESE_FONTS", ())
    evaluated(tmp_path / "results", "ctc:new", 1, CHINESE, "char")
    arguments = ["plot", str(tmp_path / "results"), "--output", str(tmp_path / "pictures"), "--sentences", "1,4"]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    stems = ("test-quality-latency", "test-line1-ctc-new-k1-path", "test-line4-ctc-new-k1-path")
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("svg", "png")}
    assert found.stderr.count("fonts-noto-cjk") == 1
    with pytest.raises(ConfigError, match="--sentences 0: expected comma-separated whole numbers from 1"):
        CliRunner().invoke(app, [*arguments[:-1], "0"], catch_exceptions=False)


def lettered(*texts: str) -> Figure:
    """Return a figure with a text."""
    with drawing(2, 2) as figure:
        axes = figure.subplots()
        axes.plot([1, 2], [1, 2], marker="o")
        for place, text in enumerate(texts):
            axes.text(1, 1 + place / 4, text)
        return figure


def save(figure: Figure, directory: Path, name: str = "picture") -> list[str]:
    """Save a figure; return the messages."""
    lines: list[str] = []
    save_figures([(name, figure)], directory, lines.append)
    return lines


def test_a_picture_is_saved_as_svg_and_png(tmp_path: Path) -> None:
    lines = save(lettered("plain"), tmp_path / "new", "ctc+asn.k3")
    svg, png = tmp_path / "new" / "ctc+asn.k3.svg", tmp_path / "new" / "ctc+asn.k3.png"
    assert lines == [f"{svg} {png}"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_same_picture_is_the_same_file() -> None:
    assert svg_text(lettered("a")) == svg_text(lettered("a"))


def test_text_stays_text() -> None:
    root = ElementTree.fromstring(svg_text(lettered("老桥", "bridge")))
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"老桥", "bridge"} <= texts


def test_without_a_chinese_font_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHINESE_FONTS", ())
    _, advice = save(lettered("老桥"), tmp_path)
    assert "apt install fonts-noto-cjk" in advice
    assert str(tmp_path / "picture.png") in advice
    assert "老桥" in (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert len(save(lettered("bridge"), tmp_path)) == 1


def test_a_chinese_font_is_used_for_chinese_text_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CHINESE_FONTS", ("No Such Font", "STIXGeneral"))  # as if it had Chinese glyphs
    figure = lettered("老桥", "bridge")
    assert len(save(figure, tmp_path)) == 1
    families = {text.get_text(): text.get_fontfamily() for text in figure.axes[0].texts}
    assert families == {"老桥": ["DejaVu Sans", "STIXGeneral"], "bridge": ["DejaVu Sans"]}


def test_fonts_installed_since_matplotlib_looked_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib import font_manager

    new, broken = tmp_path / "new.ttf", tmp_path / "broken.ttf"
    new.touch()
    broken.touch()
    added: list[str] = []

    def add(path: str) -> None:
        if path == str(broken):
            raise RuntimeError("not a font")
        added.append(path)

    monkeypatch.setattr(module, "CHINESE_FONTS", ("No Such Font",))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(broken), str(new)])
    monkeypatch.setattr(font_manager.fontManager, "addfont", add)
    assert module.chinese_font() is None
    assert added == [str(new)]


def test_an_inline_picture_takes_the_colour_of_the_page() -> None:
    inline = inline_svg(lettered("a"), 'what "k" < 3 & more does')
    root = ElementTree.fromstring(inline)
    assert root.attrib["aria-label"] == 'what "k" < 3 & more does'
    assert INK not in inline
    assert "currentColor" in inline
    assert "height" not in root.attrib
    assert not any(element.tag.endswith("metadata") for element in root.iter())


def test_inline_pictures_do_not_repeat_ids_and_refer_to_their_own() -> None:
    page = inline_svg(lettered("a"), "") + inline_svg(lettered("b"), "")
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    for (
        name,
        count,
    ) in ids.items():  # equal ids have equal content: a marker or a clip path
        assert count == 1 or len(set(re.findall(rf'<[^>]*id="{name}".*?/>', page, re.DOTALL))) == 1
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert reference in ids
    assert set(re.findall(r'"(https?://[^"]+)"', page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


@pytest.mark.parametrize(("colour", "ink"), [("#0072b2", "#ffffff"), ("#e69f00", "#000000"), ("#000000", "#ffffff")])
def test_letters_can_be_read_on_a_colour(colour: str, ink: str) -> None:
    assert contrasting_ink(colour) == ink


def test_matplotlib_is_loaded_only_to_draw_and_no_backend_is_chosen() -> None:
    program = """
import sys
import simulmt.eval.report.plots as plots
from simulmt.eval.order import Anticipation
assert not any(name.startswith("matplotlib") for name in sys.modules)
plots.anticipation_figure([Anticipation("a", "gold", "word", "word", 1, 1, (0.5,))])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"simulmt\[eval\]"), drawing(1, 1):
        pass
