"""Write results directories as `simulmt evaluate` does, and align words on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.data.alignment import Link, WordPair
from simulmt.eval.latency import Instance, split_units
from simulmt.eval.quality import QualityScorer
from simulmt.eval.results import Result
from simulmt.eval.run import Evaluation
from simulmt.text.words import Unit

REFERENCES = {"word": GERMAN, "char": CHINESE}


def evaluated(
    directory: Path, system: str, delay: int | None, hypotheses: Sequence[str], unit: Unit = "word", **figures: Any
) -> Result:
    """Write a result in which unit n was written after n + delay - 1 source words."""
    instances = []
    for index, (source, reference, text) in enumerate(zip(ENGLISH, REFERENCES[unit], hypotheses, strict=True)):
        units, length = split_units(text, unit), len(source.split())
        delays = tuple(min(length, place + (delay or length)) for place in range(len(units)))
        prediction = (" " if unit == "word" else "").join(units)
        instances.append(Instance(index, source, (reference,), prediction, delays, length))
    quality = QualityScorer([REFERENCES[unit]]).score(hypotheses)
    table: dict[str, Any] = {name: score.value for name, score in quality.scores.items()}
    table |= {f"{name}_interval": score.interval for name, score in quality.scores.items()}
    signatures = {name: score.signature for name, score in quality.scores.items()}
    result = Result(
        system,
        delay,
        "test",
        unit,
        **table,
        AL=float(delay or 20),
        BP=quality.brevity_penalty,
        precisions=quality.precisions,
        signatures=signatures,
        sentences=len(instances),
        **figures,
    )
    Evaluation(result, list(hypotheses), instances).write(directory)
    return result


class Diagonal:
    """An aligner that links the n-th word to the n-th word, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, pairs: Sequence[WordPair]) -> list[set[Link]]:
        self.asked.append(len(pairs))
        return [{(n, n) for n in range(1, min(len(source), len(target)) + 1)} for source, target in pairs]
