"""Plots of results: quality against latency, anticipation, n-gram gains, heat maps of Z, read/write paths.

Colours are Okabe and Ito's, which are safe for colour-blind readers, and systems also differ in markers. Everything
else is drawn in INK, which becomes the page's text colour in inline SVG, for light and dark pages.

SVG keeps text as text, so it can be searched and browsers supply the glyphs. PNG needs a local font; `save_figures`
warns if there is none for Chinese.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import east_asian_width

import numpy as np

from simulmt.data.alignment import Link
from simulmt.errors import DataError, needs_extra
from simulmt.eval.order import Anticipation, SortedSentence, directories_with_scores
from simulmt.eval.report.blocks import Output, read_outputs
from simulmt.eval.results import Result, check_baseline, file_name, read_all, read_records, read_results
from simulmt.text.words import is_spaceless

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUALITY = ("BLEU", "chrF2")
LATENCY = {"AL": "AL (source words)", "AL_CA": "AL-CA (ms)"}
MIN_WEIGHT = 0.01  # cells of Z below this are not drawn
PANEL = (4.6, 3.4)  # inches
LINE = 0.22  # line height in inches
LONG_RANGE = 5.0  # latencies that differ by more than this factor are drawn on a logarithmic scale
NamedFigure = tuple[str, "Figure"]  # file name and plot

INK = "#1f2328"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7a7a7a")
MARKERS = ("o", "s", "D", "p", "h", "8", "^", "v")
PNG_DPI = 160

# Fonts with Chinese glyphs on Linux, macOS and Windows, best first.
CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Droid Sans Fallback",
    "Noto Sans CJK JP",
)
FONT_ADVICE = (
    "no font with Chinese glyphs was found, so {path} shows boxes; the SVG next to it displays correctly in a browser. "
    "Install a font (Debian and Ubuntu: apt install fonts-noto-cjk) and run the command again"
)

_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "simulmt",  # makes element ids deterministic
}
_POINT: Mapping[str, Any] = {"markersize": 11, "markeredgecolor": "white", "markeredgewidth": 0.5}


def draw_all(
    directories: Sequence[Path], baseline: str | None, sentences: Sequence[int], alignments: Path | None = None
) -> Iterator[NamedFigure]:
    """Return all plots; with a baseline also n-gram gains, and read/write paths of the given sentences.

    Raise an error before the first is drawn.
    """
    scored = directories_with_scores(directories)
    results = read_all(scored)
    check_baseline(baseline, results)
    paths = [path for each in scored for path in _paths(each, sentences, alignments)] if sentences else []
    anticipation, sortings = read_records(Anticipation, directories), read_records(SortedSentence, directories)
    return _figures(results, baseline, anticipation, sortings, paths)


def _figures(
    results: Sequence[Result],
    baseline: str | None,
    anticipation: Sequence[Anticipation],
    sortings: Sequence[SortedSentence],
    paths: Sequence[tuple[str, Output]],
) -> Iterator[NamedFigure]:
    for test_set in dict.fromkeys(result.test_set for result in results):
        of_set = [result for result in results if result.test_set == test_set]
        yield f"{test_set}-quality-latency", quality_latency_figure(of_set)
        yield from ngram_gain_figures(of_set, baseline)
    if anticipation:
        yield "anticipation", anticipation_figure(anticipation)
    yield from heat_map_figures(sortings)
    yield from ((name, path_figure(output)) for name, output in paths)


def _paths(directory: Path, sentences: Sequence[int], alignments: Path | None) -> Iterator[tuple[str, Output]]:
    """Yield the translations of sentences whose read/write paths to draw, with the names of the plots."""
    results = read_results(directory)
    for outputs in read_outputs(directory, results, cache=alignments)[1:]:
        if max(sentences) > len(outputs.sentences):
            raise DataError(f"--sentences {max(sentences)}: {directory} has {len(outputs.sentences)} sentences")
        for number in sentences:
            yield f"{results[0].test_set}-line{number}-{outputs.name}-path", outputs.sentences[number - 1]


class Style(NamedTuple):
    """Colour and marker of a system, the same in all plots."""

    colour: str
    marker: str


def assign_styles(names: Iterable[str]) -> dict[str, Style]:
    """Assign a style to each name; after eight, colours repeat with other markers."""
    distinct = list(dict.fromkeys(names))
    return {
        name: Style(PALETTE[number % len(PALETTE)], MARKERS[(number + number // len(PALETTE)) % len(MARKERS)])
        for number, name in enumerate(distinct)
    }


def quality_latency_figure(results: Sequence[Result]) -> Figure:
    """Plot BLEU and chrF2 against AL and AL-CA: one line per system, one point per delay, bands for 95% intervals.

    Full-sentence systems are dashed horizontal lines.
    """
    qualities = [name for name in QUALITY if any(getattr(result, name) is not None for result in results)]
    latencies = [name for name in LATENCY if any(_has_latency(result, name) for result in results)] or ["AL"]
    styles = assign_styles(result.system for result in results)
    with drawing(PANEL[0] * len(latencies), PANEL[1] * len(qualities) + 0.4) as figure:
        grid = figure.subplots(len(qualities), len(latencies), squeeze=False, sharex="col", sharey="row")
        for row, quality in enumerate(qualities):
            for column, latency in enumerate(latencies):
                _draw_lines(grid[row, column], results, styles, quality, latency)
                grid[row, 0].set_ylabel(quality)
                grid[-1, column].set_xlabel(LATENCY[latency])
        if "AL_CA" in latencies:
            _set_log_scale(
                grid[0, -1], [result.AL_CA for result in results if result.delay and result.AL_CA is not None]
            )
        _legend(figure, grid[0, 0])
        return figure


def anticipation_figure(records: Sequence[Anticipation]) -> Figure:
    """Plot the k-anticipation rate over k, plain and scaled, one line per corpus and aligner."""
    plain = {f"{record.corpus}, {record.aligner}": record.rates for record in records}
    scaled = {f"{record.corpus}, {record.aligner}, scaled": record.scaled_rates for record in records}
    rates = {name: values for name, values in {**plain, **scaled}.items() if values}
    styles = assign_styles(rates)
    with drawing(5.4, 3.6 + LINE * len(rates)) as figure:
        axes = figure.subplots()
        for name, values in rates.items():
            delays, percent = range(1, len(values) + 1), [100 * value for value in values]
            axes.plot(delays, percent, label=name, color=styles[name].colour, marker=styles[name].marker)
        axes.set_xticks(range(1, max(map(len, rates.values())) + 1))
        axes.set_xlabel("k (source units)")
        axes.set_ylabel("k-anticipation rate (%)")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        _legend(figure, axes)
        return figure


def ngram_gain_figures(results: Sequence[Result], baseline: str | None) -> Iterator[NamedFigure]:
    """Yield plots of n-gram precision gained over the baseline, for systems that share a delay with it."""
    for system in dict.fromkeys(result.system for result in results):
        gains = ngram_gains(results, system, baseline)
        if system != baseline and gains:
            name = f"{results[0].test_set}-gain-{system}-over-{baseline}"
            yield name, ngram_gain_figure(gains, f"{system} over {baseline}")


def ngram_gain_figure(gains: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Plot n-gram precision gained over a baseline: one group of bars per n, one bar per delay."""
    with drawing(5.4, 3.6) as figure:
        axes = figure.subplots()
        width = 0.8 / len(gains)
        shades = np.linspace(1.0, 0.35, len(gains))[::-1]
        for number, (delay, gain) in enumerate(gains.items()):
            positions = np.arange(1, len(gain) + 1) + (number - (len(gains) - 1) / 2) * width
            axes.bar(positions, gain, 0.92 * width, label=delay, color=PALETTE[0], alpha=shades[number])
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_title(title, parse_math=False)
        axes.set_xticks(range(1, max(map(len, gains.values())) + 1))
        axes.set_xlabel("n")
        axes.set_ylabel("n-gram precision gained (points)")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        _legend(figure, axes)
        return figure


def ngram_gains(results: Sequence[Result], system: str, baseline: str | None) -> dict[str, list[float]]:
    """Return differences of n-gram precision between two systems at each shared delay, n from 1."""
    before, after = (
        {result.delay: result.precisions for result in results if result.system == name and result.precisions}
        for name in (baseline, system)
    )
    return {
        "full sentence" if delay is None else f"k = {delay}": np.subtract(after[delay], before[delay]).tolist()
        for delay in sorted(before.keys() & after.keys(), key=lambda delay: delay or 0)
    }


def heat_map_figures(records: Iterable[SortedSentence]) -> Iterator[NamedFigure]:
    for record in records:
        name = f"{record.test_set}-line{record.number}-{record.model}-k{record.delay}-Z"
        yield name, heat_map_figure(record)


def heat_map_figure(record: SortedSentence) -> Figure:
    """Plot Z as a heat map: source pieces across, output positions down."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    Z = np.array(record.Z)
    with _matrix(record.columns, record.rows) as (figure, axes):
        cells = [(r, c) for r, c in np.ndindex(*Z.shape) if Z[r, c] >= MIN_WEIGHT]
        squares = [Rectangle((c - 0.5, r - 0.5), 1, 1) for r, c in cells]
        alphas = np.clip([Z[cell] for cell in cells], 0, 1)
        axes.add_collection(PatchCollection(squares, facecolor=PALETTE[0], alpha=alphas, edgecolor="none"))
        axes.tick_params(length=0)
        return figure


def path_figure(output: Output) -> Figure:
    """Plot the read/write path of a sentence; source words right of it had not been read.

    Dots are alignment links; those right of the path were anticipated.
    """
    links = output.links or set()
    with _matrix(output.source, output.words) as (figure, axes):
        edges = np.arange(len(output.words) + 1) - 0.5
        read = np.array([*output.delays, *output.delays[-1:]] or [0]) - 0.5
        axes.fill_betweenx(edges, -0.5, read, step="post", color=PALETTE[0], alpha=0.16, linewidth=0)
        corners = [
            (across, edge) for edge, across in zip(np.repeat(edges, 2)[1:-1], np.repeat(read[:-1], 2), strict=True)
        ]
        if corners:
            axes.plot(*zip((-0.5, -0.5), *corners, strict=True), color=PALETTE[0])
        ahead = {(i, j) for i, j in links if i > output.delays[j - 1]}
        _draw_links(axes, links - ahead, "o", INK, "link to a word that was read")
        _draw_links(axes, ahead, "X", PALETTE[1], "link to a word not yet read")
        if links:
            figure.legend(loc="outside lower center", ncols=1)
        return figure


def _draw_links(axes: Axes, links: Set[Link], marker: str, colour: str, label: str) -> None:
    if links:
        xs, ys = zip(*sorted(links), strict=True)
        axes.plot(np.subtract(xs, 1), np.subtract(ys, 1), marker, color=colour, markersize=6, label=label)


def _draw_lines(axes: Axes, results: Sequence[Result], styles: Mapping[str, Style], quality: str, latency: str) -> None:
    for system, style in styles.items():
        points = [r for r in results if r.system == system and getattr(r, quality) is not None]
        for result in points:
            if result.delay is None:
                axes.axhline(getattr(result, quality), color=style.colour, linestyle=(0, (5, 3)), label=system)
        points = sorted((r for r in points if _has_latency(r, latency)), key=lambda r: r.delay or 0)
        if points:
            _draw_line(axes, points, style, quality, latency)
    axes.grid()
    axes.margins(0.08)


def _draw_line(axes: Axes, points: Sequence[Result], style: Style, quality: str, latency: str) -> None:
    xs = [getattr(point, latency) for point in points]
    ys = [getattr(point, quality) for point in points]
    intervals = [getattr(point, f"{quality}_interval") for point in points]
    if all(intervals):
        low, high = zip(*intervals, strict=True)
        axes.fill_between(xs, low, high, color=style.colour, alpha=0.12, linewidth=0)
    axes.plot(xs, ys, color=style.colour)
    for order, (x, y, point) in enumerate(zip(xs, ys, points, strict=True), start=3):
        # Draw each marker together with its number, so that overlapping markers keep theirs.
        label = point.system if point is points[0] else None
        axes.plot(x, y, style.marker, color=style.colour, zorder=order, label=label, **_POINT)
        ink = contrasting_ink(style.colour)
        axes.annotate(
            str(point.delay), (x, y), ha="center", va="center_baseline", fontsize=7.5, color=ink, zorder=order
        )


def _has_latency(result: Result, latency: str) -> bool:
    return result.delay is not None and getattr(result, latency) is not None


def _legend(figure: Figure, axes: Axes) -> None:
    """Draw one legend above all panels, in rows that fit the width."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (_label_width(labels) + 0.6)))
    rows = math.ceil(len(labels) / columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=math.ceil(len(labels) / rows))


def _label_width(labels: Sequence[str]) -> float:
    """Estimate the length of the longest label in inches."""
    wide = [sum(2 if east_asian_width(letter) in "WF" else 1 for letter in label) for label in labels]
    return 0.09 * max(wide, default=0)


def _set_log_scale(axes: Axes, latencies: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    if latencies and min(latencies) > 0 and max(latencies) > LONG_RANGE * min(latencies):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


@contextmanager
def _matrix(columns: Sequence[str], rows: Sequence[str]) -> Iterator[tuple[Figure, Axes]]:
    """Yield a grid of cells of fixed size: columns labelled above, rows on the left, first row on top."""
    width, height = 0.26 * len(columns) + _label_width(rows), LINE * len(rows) + _label_width(columns)
    with drawing(width + 0.8, height + 0.8) as figure:
        axes = figure.subplots()
        axes.set_xlim(-0.5, max(1, len(columns)) - 0.5)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(columns)), columns, rotation=90, parse_math=False)  # labels may contain $
        axes.set_yticks(range(len(rows)), rows, parse_math=False)
        axes.spines[:].set_visible(True)
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor")
        axes.tick_params(which="minor", length=0)
        yield figure, axes


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure (size in inches) in the common style."""
    with needs_extra("plotting", "eval"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(_STYLE):
        yield Figure(figsize=(width, height))


def save_figures(figures: Iterable[NamedFigure], directory: Path, report: Callable[[str], None]) -> None:
    """Write plots as SVG and PNG, and report their paths; warn once if a font is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    advice = ""
    for name, figure in figures:
        stem = file_name(name)
        svg, png = directory / f"{stem}.svg", directory / f"{stem}.png"
        svg.write_text(svg_text(figure), encoding="utf-8")
        if not _draw(figure, png, dpi=PNG_DPI, facecolor="white"):
            advice = advice or FONT_ADVICE.format(path=png)
        report(f"{svg} {png}")
    if advice:
        report(f"simulmt: {advice}")


def svg_text(figure: Figure) -> str:
    """Return a figure as a deterministic SVG document."""
    buffer = io.StringIO()
    _draw(figure, buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _draw(figure: Figure, output: Path | io.StringIO, **options: Any) -> bool:
    """Save a figure, with ideographs in a font that has them; return False if there is none."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    texts: list[Any] = [text for text in figure.findobj(Text) if any(map(is_spaceless, text.get_text()))]
    font = chinese_font() if texts else None
    for text in texts:
        text.set_fontfamily(["DejaVu Sans", font or "sans-serif"])
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(output, **options)
    return not texts or font is not None


def inline_svg(figure: Figure, title: str) -> str:
    """Return a figure as inline SVG in the page's text colour; `title` is its text alternative."""
    svg = svg_text(figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # groups are never referenced, and ids must be unique in a page
    svg = svg.replace(INK, "currentColor")
    # Scale with the page, but scroll on small screens instead of becoming unreadable.
    size = r'\1 style="max-width:\2pt;min-width:min(\2pt,34rem)"'
    svg = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', size, svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def contrasting_ink(colour: str) -> str:
    """Return black or white, whichever contrasts more with a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"


def chinese_font() -> str | None:
    """Return an installed font with Chinese glyphs, if any."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    if not set(CHINESE_FONTS) & set(fontManager.get_font_names()):
        # Matplotlib caches its font list: add fonts installed since.
        for path in sorted(set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}):
            with suppress(OSError, RuntimeError, ValueError):  # skip files that are not valid fonts
                fontManager.addfont(path)
    installed = set(fontManager.get_font_names())
    return next((name for name in CHINESE_FONTS if name in installed), None)
