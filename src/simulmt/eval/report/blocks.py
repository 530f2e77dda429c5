"""Blocks that the report is made of: paragraphs, tables of results, figures and examples, as HTML and Markdown.

HTML is rendered by one Jinja template, by the `kind` of each block. Figures are omitted in Markdown.

Translations shown as examples (`Outputs`) are aligned with their sources, to mark hallucinated words. Alignments can be
cached in a directory, in Pharaoh format; file names hold the hash of the aligned text, so that links of other text are
never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from simulmt.data.alignment import Link, WordPair, alignment_words, format_pharaoh, read_pharaoh
from simulmt.errors import DataError
from simulmt.eval.latency import Instance
from simulmt.eval.order import Anticipation, OracleScore
from simulmt.eval.quality import COMPARISON_HEADINGS, Comparison
from simulmt.eval.results import INSTANCES, Interval, Result, read_instances
from simulmt.files import write_atomic
from simulmt.text.words import Unit

Aligner = Callable[[Sequence[WordPair]], list[set[Link]]]
MISSING = "–"  # not measured

_Cell = Callable[[Result], str]
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Block:
    """A part of the report."""

    @property
    def kind(self) -> str:
        """The name of the block in the template."""
        return type(self).__name__.lower()

    def markdown(self) -> str:
        return ""


@dataclass(frozen=True)
class Heading(Block):
    text: str

    def markdown(self) -> str:
        return f"### {self.text}\n"


@dataclass(frozen=True)
class Paragraph(Block):
    text: str

    def markdown(self) -> str:
        return f"{self.text}\n"


@dataclass(frozen=True)
class Note(Paragraph):
    """A paragraph in small print."""


@dataclass(frozen=True)
class List(Block):
    lines: Sequence[str]

    def markdown(self) -> str:
        return "".join(f"- {line}\n" for line in self.lines)


@dataclass(frozen=True)
class Details(Block):
    """Lines of code, collapsed in HTML."""

    summary: str
    lines: Sequence[str]

    def markdown(self) -> str:
        return f"{self.summary}:\n\n" + "".join(f"- `{line}`\n" for line in self.lines)


@dataclass(frozen=True)
class Table(Block):
    """Headings and rows; all but the first `names` columns are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        ruler = [":---" if column < self.names else "---:" for column in range(len(self.headings))]
        rows = [self.headings, ruler, *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)


class Picture(NamedTuple):
    svg: str
    caption: str


@dataclass(frozen=True)
class Figures(Block):
    """Figures side by side, if there is room, under an optional heading and note."""

    figures: Sequence[Picture]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Example(Block):
    """Source, reference and translations of a sentence, each with its name."""

    lines: Sequence[tuple[str, Markup]]

    def markdown(self) -> str:
        return Table(self.lines[0], self.lines[1:], names=2).markdown()


Chapter = tuple[str, Sequence[Block]]  # with its title


def render_html(title: str, chapters: Iterable[Chapter], **context: Any) -> str:
    return _TEMPLATES.get_template("report.html.jinja").render(title=title, chapters=chapters, **context)


def render_markdown(title: str, chapters: Iterable[Chapter]) -> str:
    parts = [f"# {title}\n"]
    for name, blocks in chapters:
        if texts := [text for block in blocks if (text := block.markdown())]:
            parts += [f"## {name}\n", *texts]
    return "\n".join(parts)


def results_table(results: Iterable[Result]) -> Table:
    """Return the table of quality, latency and computation."""
    columns: dict[str, _Cell] = {
        "BLEU": lambda r: _with_interval(r.BLEU, r.BLEU_interval),
        "chrF2": lambda r: _with_interval(r.chrF2, r.chrF2_interval),
        "BP": lambda r: _number(r.BP, 3),
        "AL": lambda r: _number(r.AL, 2),
        "LAAL": lambda r: _number(r.LAAL, 2),
        "DAL": lambda r: _number(r.DAL, 2),
        "AP": lambda r: _number(r.AP, 3),
        "AL-CA ms": lambda r: _number(r.AL_CA, 1),
        "ms/token median": lambda r: _number(r.compute_ms_median, 2),
        "p99": lambda r: _number(r.compute_ms_p99, 2),
        "lag s": lambda r: _number(r.paced_lag, 2),
        "computing s": lambda r: _number(_sum(r.paced_computing, r.paced_queueing), 3),
    }
    return _table(results, columns)


def quality_table(results: Iterable[Result]) -> Table:
    """Return the table of BLEU components and cased scores."""
    columns: dict[str, _Cell] = {
        "BLEU cased": lambda r: _with_interval(r.BLEU_cased, r.BLEU_cased_interval),
        "chrF2 cased": lambda r: _with_interval(r.chrF2_cased, r.chrF2_cased_interval),
        **{f"{n + 1}-gram": lambda r, n=n: _precision(r, n) for n in range(4)},  # type: ignore[misc]
        "BP": lambda r: _number(r.BP, 3),
        "repeated words": lambda r: _number(r.repeated_words, 0),
        "repeated in reference": lambda r: _number(r.reference_repeated_words, 0),
        "unknown words": lambda r: _number(r.unknown_words, 0),
        "numbers kept, %": lambda r: _number(r.numbers_percent, 1),
        "negations kept, %": lambda r: _number(r.negations_percent, 1),
        "empty": lambda r: _number(r.empty_hypotheses, 0),
        "sentences": lambda r: _number(r.sentences, 0),
    }
    return _table(results, columns)


def comparison_table(comparisons: Iterable[Comparison]) -> Table:
    """Return the table of paired bootstrap tests."""
    return Table(COMPARISON_HEADINGS, [comparison.cells() for comparison in comparisons], names=3)


def indicator_table(outputs: Iterable[Outputs]) -> Table:
    """Return the table of hallucination and under-translation rates."""
    rows = [
        (each.name, _number(100 * each.hallucination_rate, 1), _number(100 * each.under_translation_rate, 1))
        for each in outputs
    ]
    return Table(("", "hallucinated target words, %", "untranslated source words, %"), rows)


def anticipation_table(records: Sequence[Anticipation]) -> Table:
    """Return the table of k-anticipation rates, plain and with scaled positions, and alignment error rates."""
    delays = [f"k={k}" for k in range(1, max((len(record.rates) for record in records), default=0) + 1)]
    headings = ("corpus", "aligner", "units", "positions", *delays, "AER %", "links", "sentences", "skipped")
    rows = [
        (
            record.corpus,
            record.aligner,
            f"{record.source_unit} → {record.target_unit}",
            positions,
            *(_number(100 * rate, 1) for rate in rates),
            _number(None if record.alignment_error_rate is None else 100 * record.alignment_error_rate, 1),
            str(record.links),
            str(record.sentences),
            str(record.skipped),
        )
        for record in records
        for positions, rates in (("plain", record.rates), ("scaled", record.scaled_rates))
        if rates
    ]
    return Table(headings, rows, names=4)


def oracle_table(records: Iterable[OracleScore]) -> Table:
    """Return the table of BLEU in default and oracle order, one row each, as in the paper."""
    precisions = [f"{n}-gram" for n in range(1, 5)]
    headings = ("model", "k", "blank penalty", "order", "BLEU", *precisions, "BP", "gain")
    rows: list[tuple[str, ...]] = []
    for r in records:
        labels = (r.model, str(r.delay), f"{r.blank_penalty:g}")
        default = _with_interval(r.default_BLEU, r.default_interval)
        rows.append((*labels, "default", default, *_precisions(r.default_precisions), _number(r.default_BP, 3), ""))
        oracle, gain = _with_interval(r.oracle_BLEU, r.oracle_interval), f"{r.oracle_BLEU - r.default_BLEU:+.2f}"
        rows.append((*labels, "oracle", oracle, *_precisions(r.oracle_precisions), _number(r.oracle_BP, 3), gain))
    return Table(headings, rows, names=4)


def sorting_table(records: Iterable[OracleScore]) -> Table:
    """Return the table of distances of Z from the identity, averaged over source pieces."""
    headings = ("model", "k", "mass on the diagonal", "mean displacement, pieces", "sentences")
    rows = [
        (r.model, str(r.delay), _number(r.diagonal, 4), _number(r.displacement, 3), str(r.sentences))
        for r in records
        if r.diagonal is not None
    ]
    return Table(list(headings), list(dict.fromkeys(rows)))


def signatures(results: Iterable[Result]) -> list[str]:
    """Return the distinct signatures, each with the name of its score."""
    named = []
    for result in results:
        named += [f"{name}: {signature}" for name, signature in result.signatures.items()]
        if result.signature and not result.signatures:
            named.append(f"BLEU: {result.signature}")
    return list(dict.fromkeys(named))


def _number(value: float | None, digits: int) -> str:
    """Format a number, or a dash if it was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def _with_interval(value: float | None, interval: Interval | None) -> str:
    """Format a score with its 95% interval."""
    ends = "" if interval is None else f" [{interval[0]:.1f}, {interval[1]:.1f}]"
    return _number(value, 2) + ends


def _table(results: Iterable[Result], columns: dict[str, _Cell]) -> Table:
    """Build a table with one row per result, omitting empty columns."""
    rows = [(r.system, r.delay_name, *(cell(r) for cell in columns.values())) for r in results]
    headings = ("system", "k", *columns)
    measured = [column for column in range(len(headings)) if any(row[column] != MISSING for row in rows)]
    return Table([headings[c] for c in measured], [[row[c] for c in measured] for row in rows])


def _precision(result: Result, n: int) -> str:
    return _precisions(result.precisions)[n]


def _precisions(values: Sequence[float]) -> list[str]:
    """Format the precisions of 1-grams to 4-grams."""
    return [_number(values[n] if n < len(values) else None, 1) for n in range(4)]


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True)
class Output:
    """One translation of a sentence; `links` is None if it was not aligned."""

    source: list[str]
    words: list[str]
    delays: list[int]  # source words read when each word was completed
    unit: Unit
    links: set[Link] | None = None

    @property
    def hallucinated(self) -> list[bool]:
        """Whether each target word is aligned to no source word read before it was written."""
        if self.links is None:
            return [False] * len(self.words)
        grounded = {j for i, j in self.links if i <= self.delays[j - 1]}
        return [j not in grounded for j in range(1, len(self.words) + 1)]

    @property
    def untranslated(self) -> list[bool]:
        """Whether each source word is aligned to no target word."""
        translated = {i for i, _ in self.links or ()}
        return [i not in translated for i in range(1, len(self.source) + 1)]


@dataclass(frozen=True)
class Outputs:
    """All translations of a system or, without a result, the references."""

    name: str
    result: Result | None
    sentences: list[Output]

    @property
    def is_aligned(self) -> bool:
        return all(output.links is not None for output in self.sentences)

    @property
    def hallucination_rate(self) -> float:
        """Share of hallucinated target words."""
        return _share(mark for output in self.sentences for mark in output.hallucinated)

    @property
    def under_translation_rate(self) -> float:
        """Share of untranslated source words."""
        return _share(mark for output in self.sentences for mark in output.untranslated)


def _share(marks: Iterable[bool]) -> float:
    marks = list(marks)
    return sum(marks) / len(marks) if marks else 0.0


def read_outputs(
    directory: Path, results: Sequence[Result], aligner: Aligner | None = None, cache: Path | None = None
) -> list[Outputs]:
    """Return the references and the systems of a results directory that have logs.

    All are aligned together, since aligners learn from the text. Without an aligner, only cached links are used.
    """
    logs = [(result, directory / result.name / INSTANCES) for result in results]
    logged = [(result, read_instances(log)) for result, log in logs if log.exists()]
    if not logged:
        return []
    first, instances = logged[0]
    everything = [Outputs("reference", None, [_reference(instance, first.unit) for instance in instances])]
    for result, instances in logged:
        everything.append(Outputs(result.name, result, [_output(instance, result.unit) for instance in instances]))
    return _aligned(everything, aligner, cache)


def _reference(instance: Instance, unit: Unit) -> Output:
    source, words = instance.source.split(), alignment_words(instance.reference, unit)
    return Output(source, words, [len(source)] * len(words), unit)


def _output(instance: Instance, unit: Unit) -> Output:
    words = alignment_words(instance.prediction, unit)
    delays = list(instance.delays) if unit == "word" else _word_delays(instance, words)
    return Output(instance.source.split(), words, delays, unit)


def _word_delays(instance: Instance, words: Sequence[str]) -> list[int]:
    """Convert character delays to word delays; a word is complete with its last character."""
    text = instance.prediction.replace(" ", "")
    delays, end = [], 0
    for word in words:
        end = text.index(word, end) + len(word)
        delays.append(instance.delays[end - 1])
    return delays


def _aligned(everything: Sequence[Outputs], aligner: Aligner | None, cache: Path | None) -> list[Outputs]:
    kept = {outputs.name: _read_links(cache, outputs) for outputs in everything}
    if aligner is not None and None in kept.values():
        found = iter(aligner([pair for outputs in everything for pair in _pairs(outputs)]))
        for outputs in everything:
            links = [next(found) for _ in outputs.sentences]
            if kept[outputs.name] is None:
                kept[outputs.name] = links
                _write_links(cache, outputs, links)
    return [_with_links(outputs, kept[outputs.name]) for outputs in everything]


def _pairs(outputs: Outputs) -> list[WordPair]:
    return [(output.source, output.words) for output in outputs.sentences]


def _with_links(outputs: Outputs, links: Sequence[set[Link]] | None) -> Outputs:
    if links is None:
        return outputs
    linked = [replace(output, links=each) for output, each in zip(outputs.sentences, links, strict=True)]
    return replace(outputs, sentences=linked)


def _links_path(cache: Path, outputs: Outputs) -> Path:
    text = json.dumps(_pairs(outputs), ensure_ascii=False).encode()
    return cache / f"{outputs.name}-{hashlib.sha256(text).hexdigest()[:16]}.links"


def _read_links(cache: Path | None, outputs: Outputs) -> list[set[Link]] | None:
    if cache is None or not (path := _links_path(cache, outputs)).exists():
        return None
    try:
        return read_pharaoh(path, _pairs(outputs))
    except DataError:
        return None  # damaged: recompute it


def _write_links(cache: Path | None, outputs: Outputs, links: Sequence[set[Link]]) -> None:
    if cache is not None:
        write_atomic(_links_path(cache, outputs), "".join(f"{format_pharaoh(each)}\n" for each in links))
