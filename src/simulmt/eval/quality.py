"""Translation quality: BLEU and chrF2 with intervals, and tests for significance against a baseline.

Scores are sacrebleu's, lower-cased, as is customary for simultaneous translation, and cased. An empty line in one of
several reference files means a missing reference. Systems are compared by paired bootstrap, per delay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from simulmt.data.corpus import read_lines
from simulmt.errors import DataError
from simulmt.eval.results import Interval, Result, check_baseline, read_all, read_instances, read_results
from simulmt.text.words import Unit

_RESAMPLES = 1000  # of a bootstrap; sacrebleu draws them with seed 12345
_TOKENIZERS: Mapping[Unit, str] = {"word": "13a", "char": "zh"}
SIGNIFICANT = 0.05
HEADINGS = ("test set", "k", "system", "BLEU", "gain", "p", "chrF2", "gain", "p", "AL")


@dataclass(frozen=True)
class Score:
    """A score in 0..100, its 95% bootstrap interval, and its signature."""

    value: float
    interval: Interval
    signature: str


@dataclass(frozen=True)
class Quality:
    """BLEU, BLEU_cased, chrF2 and chrF2_cased, and the components of lower-cased BLEU."""

    scores: dict[str, Score]
    precisions: tuple[float, ...]  # of 1-grams to 4-grams, in percent
    brevity_penalty: float


@dataclass(frozen=True)
class Difference:
    """Difference from a baseline by paired bootstrap; `p` is two-sided."""

    system: float
    baseline: float
    p: float
    signature: str

    @property
    def gain(self) -> float:
        return self.system - self.baseline


class QualityScorer:
    """Scores systems against the same references, given as one sequence per reference file."""

    def __init__(self, references: Sequence[Sequence[str]], unit: Unit) -> None:
        self._sentences = len(references[0])
        present: Any = _mark_missing(references)
        tokenizer = _TOKENIZERS[unit]
        self._metrics: dict[str, Any] = {
            "BLEU": BLEU(lowercase=True, tokenize=tokenizer, references=present, force=True),
            "BLEU_cased": BLEU(tokenize=tokenizer, references=present, force=True),
            "chrF2": CHRF(lowercase=True, references=present),
            "chrF2_cased": CHRF(references=present),
        }

    def score(self, hypotheses: Sequence[str]) -> Quality:
        """Score one system."""
        self._check(hypotheses)
        scores = {name: _score(metric, hypotheses) for name, metric in self._metrics.items()}
        BLEU = self._metrics["BLEU"].corpus_score(hypotheses, None)
        return Quality(scores, tuple(BLEU.precisions), BLEU.bp)

    def compare(self, baseline: Sequence[str], system: Sequence[str]) -> dict[str, Difference]:
        """Compare a system with a baseline in lower-cased BLEU and chrF2."""
        self._check(baseline)
        self._check(system)
        return {name: _difference(self._metrics[name], baseline, system) for name in ("BLEU", "chrF2")}

    def _check(self, hypotheses: Sequence[str]) -> None:
        if len(hypotheses) != self._sentences:
            raise DataError(f"expected {self._sentences} hypotheses, one per reference, got {len(hypotheses)}")


def _mark_missing(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Replace missing references by None, as sacrebleu expects; keep one empty reference if all are missing."""
    lengths = {len(lines) for lines in references}
    if len(lengths) > 1:
        raise DataError(
            f"reference files have {' and '.join(map(str, sorted(lengths)))} lines; expected the same number in each"
        )
    rows = []
    for row in zip(*references, strict=True):
        present = [line if line.strip() else None for line in row]
        rows.append(present if any(present) else ["", *[None] * (len(row) - 1)])
    return [list(column) for column in zip(*rows, strict=True)]


def _score(metric: Any, hypotheses: Sequence[str]) -> Score:
    # Not `metric.corpus_score(..., n_bootstrap)`: that fails as soon as a resample has no match at all.
    (result,), signature = _bootstrap(metric, [hypotheses])
    # sacrebleu gives the interval as mean and width, which may exceed 0..100 on a few sentences.
    interval = (max(0.0, float(result.mean - result.ci)), min(100.0, float(result.mean + result.ci)))
    return Score(float(result.score), interval, signature)


def _difference(metric: Any, baseline: Sequence[str], system: Sequence[str]) -> Difference:
    (base, found), signature = _bootstrap(metric, [baseline, system])
    # For identical outputs sacrebleu reports a significant difference, since no resample differs.
    p = 1.0 if list(baseline) == list(system) else float(found.p_value)
    return Difference(float(found.score), float(base.score), p, signature)


def _bootstrap(metric: Any, systems: Sequence[Sequence[str]]) -> tuple[list[Any], str]:
    """Run sacrebleu's paired bootstrap; the first system is the baseline. Return results and signature."""
    named: list[Any] = [(str(number), list(hypotheses)) for number, hypotheses in enumerate(systems)]
    test: Any = PairedTest(named, {"metric": metric}, None, test_type="bs", n_samples=_RESAMPLES)
    (signature,), (_, results) = (found.values() for found in test())
    return results, str(signature)


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
