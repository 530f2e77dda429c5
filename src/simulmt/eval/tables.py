"""The tables of the report, each as rows of text, written out as Markdown or HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from simulmt.eval.compare import HEADINGS, Comparison
from simulmt.eval.examples import Outputs
from simulmt.eval.records import Anticipation, OracleScore
from simulmt.eval.results import Interval, Result

NOTHING = "–"  # not measured

Cell = Callable[[Result], str]


@dataclass(frozen=True)
class Table:
    """Headings and rows; all but the first `names` columns are figures."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        ruler = [":---" if column < self.names else "---:" for column in range(len(self.headings))]
        rows = [self.headings, ruler, *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)

    def html(self) -> str:
        head = "".join(
            f'<th scope="col"{self._kind(column)}>{escape(h)}</th>' for column, h in enumerate(self.headings)
        )
        body = "".join(f"<tr>{self._html_row(row)}</tr>\n" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'

    def _html_row(self, row: Sequence[str]) -> str:
        return "".join(f"<td{self._kind(column)}>{escape(cell)}</td>" for column, cell in enumerate(row))

    def _kind(self, column: int) -> str:
        return ' class="name"' if column < self.names else ""


def results_table(results: Iterable[Result]) -> Table:
    """Quality, latency and computation."""
    columns: dict[str, Cell] = {
        "BLEU": lambda r: with_interval(r.BLEU, r.BLEU_interval),
        "chrF2": lambda r: with_interval(r.chrF2, r.chrF2_interval),
        "BP": lambda r: shown(r.BP, 3),
        "AL": lambda r: shown(r.AL, 2),
        "LAAL": lambda r: shown(r.LAAL, 2),
        "DAL": lambda r: shown(r.DAL, 2),
        "AP": lambda r: shown(r.AP, 3),
        "AL-CA ms": lambda r: shown(r.AL_CA, 1),
        "ms/piece median": lambda r: shown(r.compute_ms_median, 2),
        "p99": lambda r: shown(r.compute_ms_p99, 2),
        "lag s": lambda r: shown(r.paced_lag, 2),
        "of it computing s": lambda r: shown(_added(r.paced_computing, r.paced_queueing), 3),
    }
    return _table(results, columns)


def quality_table(results: Iterable[Result]) -> Table:
    """What BLEU is made of, and the cased scores."""
    columns: dict[str, Cell] = {
        "BLEU cased": lambda r: with_interval(r.BLEU_cased, r.BLEU_cased_interval),
        "chrF2 cased": lambda r: with_interval(r.chrF2_cased, r.chrF2_cased_interval),
        **{f"{n + 1}-gram": lambda r, n=n: _precision(r, n) for n in range(4)},  # type: ignore[misc]
        "BP": lambda r: shown(r.BP, 3),
        "written twice": lambda r: shown(r.written_twice, 0),
        "in the reference": lambda r: shown(r.reference_written_twice, 0),
        "torn words": lambda r: shown(r.torn_words, 0),
        "empty": lambda r: shown(r.empty_hypotheses, 0),
        "sentences": lambda r: shown(r.sentences, 0),
    }
    return _table(results, columns)


def comparison_table(comparisons: Iterable[Comparison]) -> Table:
    """The paired bootstrap tests."""
    return Table(HEADINGS, [comparison.cells() for comparison in comparisons], names=3)


def indicator_table(outputs: Iterable[Outputs]) -> Table:
    """What alignments say of hallucination and under-translation."""
    rows = [
        (each.name, shown(100 * each.hallucination_rate, 1), shown(100 * each.under_translation_rate, 1))
        for each in outputs
    ]
    return Table(("", "target words without ground in what was read, %", "source words never translated, %"), rows)


def anticipation_table(records: Sequence[Anticipation]) -> Table:
    """k-anticipation rates in percent, and alignment error rates."""
    delays = [f"k={k}" for k in range(1, max((len(record.rates) for record in records), default=0) + 1)]
    headings = ("corpus", "aligner", "units", *delays, "AER %", "links", "sentences", "skipped")
    rows = [
        (
            record.corpus,
            record.aligner,
            f"{record.source_unit} → {record.target_unit}",
            *(shown(100 * rate, 1) for rate in record.rates),
            shown(None if record.alignment_error_rate is None else 100 * record.alignment_error_rate, 1),
            str(record.links),
            str(record.sentences),
            str(record.skipped),
        )
        for record in records
    ]
    return Table(headings, rows, names=3)


def oracle_table(records: Iterable[OracleScore]) -> Table:
    """Oracle order beside default decoding."""
    headings = ("model", "k", "blank penalty", "BLEU, oracle order", "BP", "BLEU, default", "BP", "gain", "sentences")
    rows = [
        (
            record.model,
            str(record.delay),
            f"{record.blank_penalty:g}",
            with_interval(record.oracle_BLEU, record.oracle_interval),
            shown(record.oracle_BP, 3),
            with_interval(record.default_BLEU, record.default_interval),
            shown(record.default_BP, 3),
            f"{record.oracle_BLEU - record.default_BLEU:+.2f}",
            str(record.sentences),
        )
        for record in records
    ]
    return Table(headings, rows)


def signatures(results: Iterable[Result]) -> list[str]:
    """The signature of every score, each once, with the score it belongs to."""
    named = []
    for result in results:
        named += [f"{name}: {signature}" for name, signature in result.signatures.items()]
        if result.signature and not result.signatures:
            named.append(f"BLEU: {result.signature}")
    return list(dict.fromkeys(named))


def delay_name(delay: int | None) -> str:
    return "full" if delay is None else str(delay)


def shown(value: float | None, digits: int) -> str:
    """A figure, or a dash for what was not measured."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: Interval | None) -> str:
    """A score with the ends of its 95% interval."""
    ends = "" if interval is None else f" [{interval[0]:.1f}, {interval[1]:.1f}]"
    return shown(value, 2) + ends


def _table(results: Iterable[Result], columns: dict[str, Cell]) -> Table:
    """A row a result; a column in which nothing was measured is left out."""
    rows = [(r.system, delay_name(r.delay), *(cell(r) for cell in columns.values())) for r in results]
    headings = ("system", "k", *columns)
    measured = [column for column in range(len(headings)) if any(row[column] != NOTHING for row in rows)]
    return Table([headings[c] for c in measured], [[row[c] for c in measured] for row in rows])


def _precision(result: Result, n: int) -> str:
    return shown(result.precisions[n] if n < len(result.precisions) else None, 1)


def _added(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
