"""Word order: anticipation rates of a corpus, and BLEU of a model in oracle order.

The sorting network is part of training, so its results are passed as text and arrays (from simulmt.train.analysis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from simulmt.data.alignment import (
    Gold,
    Link,
    UnitChoice,
    WordPair,
    alignment_error_rate,
    anticipation_rate,
    find_unit,
    read_gold,
    read_word_pairs,
)
from simulmt.errors import DataError
from simulmt.eval.quality import QualityScorer
from simulmt.eval.results import Anticipation, OracleScore, SortedSentence
from simulmt.eval.run import TestSet
from simulmt.files import sha256
from simulmt.text.words import Unit

LONGEST_DELAY = 9  # largest k of k-anticipation rates, as in the paper


class GoldFile(NamedTuple):
    """A file of gold alignments; see `simulmt.data.alignment.read_gold`."""

    path: Path
    base: int = 1
    target_first: bool = False


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs in words or characters, and their gold alignments, if any."""

    name: str
    units: tuple[Unit, Unit]
    pairs: Sequence[WordPair]
    gold: Sequence[Gold] | None
    files: Mapping[str, str]  # SHA-256 by path

    @staticmethod
    def read(
        source: Path,
        target: Path,
        units: tuple[UnitChoice, UnitChoice] = ("auto", "auto"),
        gold: GoldFile | None = None,
        name: str = "",
    ) -> ParallelText:
        """Read two files of lines; the name defaults to that of the source file."""
        found = find_unit(source, units[0]), find_unit(target, units[1])
        pairs = read_word_pairs(source, target, found)
        gold_links = read_gold(gold.path, pairs, gold.base, gold.target_first) if gold else None
        read = (source, target, gold.path) if gold else (source, target)
        files = {str(path): sha256(path) for path in read}
        return ParallelText(name or source.name.partition(".")[0], found, pairs, gold_links, files)

    def anticipation(self, found: Mapping[str, Sequence[set[Link] | None]]) -> list[Anticipation]:
        """Return the anticipation rates by each aligner and by the gold links."""
        lengths = [(len(source), len(target)) for source, target in self.pairs]
        files = dict(self.files)
        records = [
            measure_anticipation(self.name, aligner, self.units, lengths, links, self.gold, files)
            for aligner, links in found.items()
        ]
        if self.gold:
            sure = [links for links, _ in self.gold]
            records.append(measure_anticipation(self.name, "gold", self.units, lengths, sure, None, files))
        return records


def measure_anticipation(
    corpus: str,
    aligner: str,
    units: tuple[Unit, Unit],
    lengths: Sequence[tuple[int, int]],
    alignments: Sequence[set[Link] | None],
    gold: Sequence[Gold] | None = None,
    files: dict[str, str] | None = None,
) -> Anticipation:
    """Compute the anticipation rates of a corpus and, given gold links, its AER.

    `lengths` are (source, target) lengths. Sentences that could not be aligned (None) are left out of the rates, but
    count in the AER.
    """
    links = [alignment or set() for alignment in alignments]
    delays = range(1, LONGEST_DELAY + 1)
    return Anticipation(
        corpus,
        aligner,
        *units,
        sentences=len(links),
        links=sum(map(len, links)),
        rates=tuple(anticipation_rate(links, k) for k in delays),
        alignment_error_rate=None if gold is None else alignment_error_rate(links, gold),
        skipped=sum(alignment is None for alignment in alignments),
        scaled_rates=tuple(anticipation_rate(links, k, lengths) for k in delays),
        files=files or {},
    )


def score_oracle(
    texts: TestSet,
    in_oracle_order: Sequence[str],
    in_source_order: Sequence[str],
    unit: Unit,
    *,
    model: str,
    delay: int,
    blank_penalty: float = 0.0,
    diagonal: float | None = None,
    displacement: float | None = None,
) -> OracleScore:
    """Score translations in oracle order against those in source order, with the same settings."""
    scorer = QualityScorer(texts.references, unit)
    oracle, default = scorer.score(in_oracle_order), scorer.score(in_source_order)
    return OracleScore(
        test_set=texts.name,
        model=model,
        delay=delay,
        blank_penalty=blank_penalty,
        sentences=len(texts.sources),
        oracle_BLEU=oracle.scores["BLEU"].value,
        oracle_interval=oracle.scores["BLEU"].interval,
        oracle_BP=oracle.brevity_penalty,
        default_BLEU=default.scores["BLEU"].value,
        default_interval=default.scores["BLEU"].interval,
        default_BP=default.brevity_penalty,
        signature=oracle.scores["BLEU"].signature,
        oracle_precisions=oracle.precisions,
        default_precisions=default.precisions,
        diagonal=diagonal,
        displacement=displacement,
    )


def numbered_pairs(texts: TestSet, numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Return sentences of a test set with their first references, by line number from 1."""
    if numbers and max(numbers) > len(texts.sources):
        raise DataError(f"--sentences {max(numbers)}: {texts.name} has {len(texts.sources)} sentences")
    return [(texts.sources[number - 1], texts.references[0][number - 1]) for number in numbers]


def sorted_sentence(
    test_set: str, model: str, delay: int, number: int, Z: NDArray[Any], columns: Sequence[str], rows: Sequence[str]
) -> SortedSentence:
    """Return the record of a heat map of Z."""
    rounded = tuple(tuple(round(float(cell), 4) for cell in row) for row in Z)
    return SortedSentence(test_set, model, delay, number, tuple(columns), tuple(rows), rounded)
