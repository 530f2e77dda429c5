"""Translation quality: BLEU and chrF2 with intervals and significance.

Scores are sacrebleu's, lower-cased, as is customary for simultaneous translation, and cased. An empty line in one of
several reference files means a missing reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from simulmt.errors import DataError
from simulmt.eval.results import Interval
from simulmt.text.words import Unit

RESAMPLES = 1000  # of a bootstrap; sacrebleu draws them with seed 12345
TOKENIZERS: Mapping[Unit, str] = {"word": "13a", "char": "zh"}


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
        tokenizer = TOKENIZERS[unit]
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
    test: Any = PairedTest(named, {"metric": metric}, None, test_type="bs", n_samples=RESAMPLES)
    (signature,), (_, results) = (found.values() for found in test())
    return results, str(signature)
