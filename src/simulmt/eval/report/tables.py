"""Tables of the report, as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from simulmt.eval.compare import HEADINGS, Comparison
from simulmt.eval.report.blocks import Table
from simulmt.eval.report.examples import Outputs
from simulmt.eval.results import Anticipation, Interval, OracleScore, Result

NOTHING = "–"  # not measured

Cell = Callable[[Result], str]


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
        "numbers kept, %": lambda r: shown(r.numbers_percent, 1),
        "negations kept, %": lambda r: shown(r.negations_percent, 1),
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
    """k-anticipation rates in percent, plain and with scaled positions, and alignment error rates."""
    delays = [f"k={k}" for k in range(1, max((len(record.rates) for record in records), default=0) + 1)]
    headings = ("corpus", "aligner", "units", "positions", *delays, "AER %", "links", "sentences", "skipped")
    rows = [
        (
            record.corpus,
            record.aligner,
            f"{record.source_unit} → {record.target_unit}",
            positions,
            *(shown(100 * rate, 1) for rate in rates),
            shown(None if record.alignment_error_rate is None else 100 * record.alignment_error_rate, 1),
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
    """Default decoding and oracle order, a row each, as in the paper; and how far Z is from the identity."""
    precisions = [f"{n}-gram" for n in range(1, 5)]
    headings = ("model", "k", "blank penalty", "order", "BLEU", *precisions, "BP", "gain")
    rows: list[tuple[str, ...]] = []
    for r in records:
        facts = (r.model, str(r.delay), f"{r.blank_penalty:g}")
        default = with_interval(r.default_BLEU, r.default_interval)
        rows.append((*facts, "default", default, *_precisions(r.default_precisions), shown(r.default_BP, 3), ""))
        oracle, gain = with_interval(r.oracle_BLEU, r.oracle_interval), f"{r.oracle_BLEU - r.default_BLEU:+.2f}"
        rows.append((*facts, "oracle", oracle, *_precisions(r.oracle_precisions), shown(r.oracle_BP, 3), gain))
    return Table(headings, rows, names=4)


def sorting_table(records: Iterable[OracleScore]) -> Table:
    """How far Z is from the identity, averaged over the source pieces of a test set."""
    headings = ("model", "k", "mass on the diagonal", "mean displacement, pieces", "sentences")
    rows = [
        (r.model, str(r.delay), shown(r.diagonal, 4), shown(r.displacement, 3), str(r.sentences))
        for r in records
        if r.diagonal is not None
    ]
    return Table(list(headings), list(dict.fromkeys(rows)))


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
    return _precisions(result.precisions)[n]


def _precisions(values: Sequence[float]) -> list[str]:
    """The precisions of 1-grams to 4-grams."""
    return [shown(values[n] if n < len(values) else None, 1) for n in range(4)]


def _added(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
