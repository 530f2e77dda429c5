"""Significance tests against a baseline: paired bootstrap, per delay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simulmt.data.corpus import read_lines
from simulmt.errors import DataError
from simulmt.eval.quality import Difference, QualityScorer
from simulmt.eval.results import Result, check_baseline, read_all, read_instances, read_results

SIGNIFICANT = 0.05
HEADINGS = ("test set", "k", "system", "BLEU", "gain", "p", "chrF2", "gain", "p", "AL")


@dataclass(frozen=True)
class Comparison:
    """A system compared with the baseline at the same delay; the baseline itself has no difference."""

    result: Result
    BLEU: Difference | None = None
    chrF2: Difference | None = None  # noqa: N815

    def cells(self) -> list[str]:
        """Return the table cells for HEADINGS."""
        result = self.result
        BLEU, chrF2 = _cells(result.BLEU, self.BLEU), _cells(result.chrF2, self.chrF2)
        return [result.test_set, result.delay_name, result.system, *BLEU, *chrF2, f"{result.AL:.2f}"]


@dataclass(frozen=True)
class _Entry:
    """A result and its directory."""

    result: Result
    directory: Path

    @cached_property
    def hypotheses(self) -> list[str]:
        return list(read_lines(self.directory / f"{self.result.name}.hyp"))

    @cached_property
    def references(self) -> list[list[str]]:
        rows = [instance.references for instance in read_instances(self.directory / self.result.name)]
        return [list(column) for column in zip(*rows, strict=True)]


def compare(directories: Sequence[Path], baseline: str | None = None) -> list[Comparison]:
    """Compare every system with the baseline (default: the first system) at each shared delay.

    A full-sentence baseline is compared with systems at any delay.
    """
    systems = check_baseline(baseline, read_all(directories))
    entries = [_Entry(result, directory) for directory in directories for result in read_results(directory)]
    baseline = baseline or systems[0]
    comparisons = []
    for base in (entry for entry in entries if entry.result.system == baseline):
        same = [entry for entry in entries if entry.result.test_set == base.result.test_set]
        others = [entry for entry in same if entry.result.system != baseline]
        shared = [entry for entry in others if base.result.delay in (entry.result.delay, None)]
        comparisons += [Comparison(base.result), *_compare_with(shared, base)]
    if all(comparison.BLEU is None for comparison in comparisons):
        raise DataError(f"no other system shares a test set and a delay with the baseline {baseline}")
    return comparisons


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Format comparisons as a Markdown table with signatures."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(comparison.cells() for comparison in comparisons)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n" + "\n".join(f"- {line}" for line in signatures(comparisons)) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a JSON object."""
    result = comparison.result
    return {
        "test_set": result.test_set,
        "system": result.system,
        "delay": result.delay,
        "AL": result.AL,
        "BLEU": _difference_table(result.BLEU, comparison.BLEU),
        "chrF2": _difference_table(result.chrF2, comparison.chrF2),
    }


def signatures(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the distinct signatures of all scores."""
    found = [
        f"{name}: {difference.signature}"
        for comparison in comparisons
        for name, difference in (("BLEU", comparison.BLEU), ("chrF2", comparison.chrF2))
        if difference is not None
    ]
    return list(dict.fromkeys(found))


def _compare_with(systems: Sequence[_Entry], base: _Entry) -> Iterator[Comparison]:
    if not systems:
        return
    scorer = QualityScorer(base.references, base.result.unit)
    for system in systems:
        if (system.references, system.result.unit) != (base.references, base.result.unit):
            raise DataError(
                f"{system.directory / system.result.name} and {base.directory / base.result.name} "
                "were scored with different references or units; evaluate both again with the same"
            )
        yield Comparison(system.result, **scorer.compare(base.hypotheses, system.hypotheses))


def _cells(score: float | None, difference: Difference | None) -> tuple[str, str, str]:
    shown = "" if score is None else f"{score:.2f}"
    if difference is None:
        return shown, "", ""
    star = "*" if difference.p < SIGNIFICANT else ""
    return shown, f"{difference.gain:+.2f}", f"{difference.p:.3f}{star}"


def _difference_table(score: float | None, difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {"score": score}
    names = ("baseline", "gain", "p", "signature")
    return {"score": score, **{name: getattr(difference, name) for name in names}}
