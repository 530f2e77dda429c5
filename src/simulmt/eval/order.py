"""Analyses of word order: anticipation rates of a corpus, BLEU of a model in oracle order, sorting matrices.

The sorting network is part of training, so its results are passed as text and arrays (from simulmt.train.analysis).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from simulmt.data.alignment import (
    Gold,
    Link,
    UnitChoice,
    WordPair,
    alignment_error_rate,
    anticipation_rate,
    find_unit,
    format_pharaoh,
    read_gold,
    read_word_pairs,
)
from simulmt.errors import DataError
from simulmt.eval.quality import QualityScorer
from simulmt.eval.results import SCORES, Interval, file_name, write_records
from simulmt.files import sha256
from simulmt.text.words import Unit

if TYPE_CHECKING:
    from simulmt.eval.run import TestSet

MAX_DELAY = 9  # largest k of k-anticipation rates, as in the paper


@dataclass(frozen=True)
class Anticipation:
    """k-anticipation rates of a corpus, for k from 1, by one aligner."""

    FILE: ClassVar[str] = "anticipation.jsonl"

    corpus: str
    aligner: str
    source_unit: Unit
    target_unit: Unit
    sentences: int
    links: int
    rates: tuple[float, ...]
    alignment_error_rate: float | None = None  # against gold alignments
    skipped: int = 0  # sentences that the aligner could not align
    scaled_rates: tuple[float, ...] = ()  # with target positions scaled to the length of the source
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by path

    @property
    def key(self) -> tuple[object, ...]:
        return self.corpus, self.aligner


@dataclass(frozen=True)
class OracleScore:
    """Lower-cased BLEU of a model on a test set, in oracle and in default order."""

    FILE: ClassVar[str] = "oracle.jsonl"

    test_set: str
    model: str
    delay: int
    blank_penalty: float
    sentences: int
    oracle_BLEU: float  # noqa: N815
    oracle_interval: Interval
    oracle_BP: float  # noqa: N815
    default_BLEU: float  # noqa: N815
    default_interval: Interval
    default_BP: float  # noqa: N815
    signature: str
    oracle_precisions: tuple[float, ...] = ()  # of 1-grams to 4-grams, in percent
    default_precisions: tuple[float, ...] = ()
    diagonal: float | None = None  # mean mass on the diagonal of Z
    displacement: float | None = None  # mean distance that Z moves a state, in source pieces

    @property
    def key(self) -> tuple[object, ...]:
        return self.test_set, self.model, self.delay, self.blank_penalty


@dataclass(frozen=True)
class SortedSentence:
    """Z of a sentence, with source pieces as columns and target pieces as rows."""

    FILE: ClassVar[str] = "sortings.jsonl"

    test_set: str
    model: str
    delay: int
    number: int  # the line of the sentence, counted from 1
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    Z: tuple[tuple[float, ...], ...]

    @property
    def key(self) -> tuple[object, ...]:
        return self.test_set, self.model, self.delay, self.number


def directories_with_scores(directories: Iterable[Path]) -> list[Path]:
    """Return the directories that hold scores, not only analyses."""
    files = [kind.FILE for kind in (Anticipation, OracleScore, SortedSentence)]
    return [each for each in directories if (each / SCORES).exists() or not any((each / f).exists() for f in files)]


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs in words or characters, and their gold alignments, if any."""

    name: str
    units: tuple[Unit, Unit]
    pairs: Sequence[WordPair]
    gold: Sequence[Gold] | None
    files: dict[str, str]  # SHA-256 by path

    @staticmethod
    def read(
        source: Path,
        target: Path,
        units: tuple[UnitChoice, UnitChoice] = ("auto", "auto"),
        gold: Path | None = None,
        gold_base: int = 1,
        gold_target_first: bool = False,
        name: str = "",
    ) -> ParallelText:
        """Read two files of lines, and gold alignments as `read_gold` does; the default name is the source file's."""
        detected_units = find_unit(source, units[0]), find_unit(target, units[1])
        pairs = read_word_pairs(source, target, detected_units)
        gold_links = read_gold(gold, pairs, gold_base, gold_target_first) if gold else None
        files = {str(path): sha256(path) for path in (source, target, gold) if path}
        return ParallelText(name or source.name.partition(".")[0], detected_units, pairs, gold_links, files)

    def anticipation(self, alignments: Mapping[str, Sequence[set[Link] | None]]) -> list[Anticipation]:
        """Return the anticipation rates by each aligner and by the gold links."""
        records = [self.measure(aligner, links, self.gold) for aligner, links in alignments.items()]
        if self.gold:
            records.append(self.measure("gold", [sure for sure, _ in self.gold]))
        return records

    def measure(
        self, aligner: str, alignments: Sequence[set[Link] | None], gold: Sequence[Gold] | None = None
    ) -> Anticipation:
        """Compute the anticipation rates by an aligner and, given gold links, its AER.

        Sentences that could not be aligned (None) are left out of the rates, but count in the AER.
        """
        links = [alignment or set() for alignment in alignments]
        lengths = [(len(source), len(target)) for source, target in self.pairs]
        delays = range(1, MAX_DELAY + 1)
        return Anticipation(
            self.name,
            aligner,
            *self.units,
            sentences=len(links),
            links=sum(map(len, links)),
            rates=tuple(anticipation_rate(links, k) for k in delays),
            alignment_error_rate=None if gold is None else alignment_error_rate(links, gold),
            skipped=sum(alignment is None for alignment in alignments),
            scaled_rates=tuple(anticipation_rate(links, k, lengths) for k in delays),
            files=self.files,
        )


def write_anticipation(
    directory: Path, records: Sequence[Anticipation], alignments: Mapping[str, Sequence[set[Link] | None]]
) -> None:
    """Write anticipation rates, and the links of each aligner in Pharaoh format."""
    write_records(directory, records)
    for aligner, links in alignments.items():
        lines = (f"{format_pharaoh(each or ())}\n" for each in links)
        path = directory / f"{file_name(f'{records[0].corpus}-{aligner}')}.links"
        path.write_text("".join(lines), encoding="utf-8")


def score_oracle(
    texts: TestSet,
    in_oracle_order: Sequence[str],
    in_source_order: Sequence[str],
    *,
    model: str,
    delay: int,
    blank_penalty: float = 0.0,
    diagonal: float | None = None,
    displacement: float | None = None,
) -> OracleScore:
    """Score translations in oracle order against those in source order, with the same settings."""
    scorer = QualityScorer(texts.references)
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
