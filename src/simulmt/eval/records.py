"""What the analyses leave beside an evaluation's scores, one JSON object a line, for figures and the report to read.

DIR/anticipation.jsonl    `Anticipation`: a corpus aligned by an aligner
DIR/oracle.jsonl          `OracleScore`: a model at a delay, in the reference's order and in its own
DIR/sortings.jsonl        `SortedSentence`: what the sorting network made of a sentence
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from simulmt.alignment import Link, corpus_alignment_error_rate, corpus_anticipation_rate
from simulmt.config import as_table, build
from simulmt.errors import ConfigError, DataError
from simulmt.eval.aligners import Gold
from simulmt.eval.results import SCORES, Interval, Unit
from simulmt.files import write_whole

LONGEST_DELAY = 9  # k-anticipation rates are for k from 1 to this, as in the paper


@dataclass(frozen=True)
class Anticipation:
    """How much a corpus has to be anticipated, by one aligner; the rates are for k from 1 on."""

    FILE: ClassVar[str] = "anticipation.jsonl"

    corpus: str
    aligner: str
    source_unit: Unit
    target_unit: Unit
    sentences: int
    links: int
    rates: tuple[float, ...]
    alignment_error_rate: float | None = None  # against links made by hand
    skipped: int = 0  # sentences that the aligner could not align
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by path

    @property
    def key(self) -> tuple[object, ...]:
        return self.corpus, self.aligner


@dataclass(frozen=True)
class OracleScore:
    """Lower-cased BLEU of one model on one test set, with the order of the reference and without, decoded alike."""

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

    @property
    def key(self) -> tuple[object, ...]:
        return self.test_set, self.model, self.delay, self.blank_penalty


@dataclass(frozen=True)
class SortedSentence:
    """Z of a sentence with a source piece for each column and the target pieces of its frames for each row."""

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


class _Record(Protocol):
    FILE: ClassVar[str]

    @property
    def key(self) -> tuple[object, ...]: ...


Record = TypeVar("Record", bound=_Record)


def measure_anticipation(
    corpus: str,
    aligner: str,
    units: tuple[Unit, Unit],
    alignments: Sequence[set[Link] | None],
    gold: Sequence[Gold] | None = None,
    files: dict[str, str] | None = None,
) -> Anticipation:
    """The anticipation rates of a corpus from its alignments, and their error rate if there are links made by hand.

    A sentence that could not be aligned (None) has no links: the rates leave it out, the error rate counts it.
    """
    links = [alignment or set() for alignment in alignments]
    return Anticipation(
        corpus,
        aligner,
        *units,
        sentences=len(links),
        links=sum(map(len, links)),
        rates=tuple(corpus_anticipation_rate(links, k) for k in range(1, LONGEST_DELAY + 1)),
        alignment_error_rate=None if gold is None else corpus_alignment_error_rate(links, gold),
        skipped=sum(alignment is None for alignment in alignments),
        files=files or {},
    )


def with_scores(directories: Iterable[Path]) -> list[Path]:
    """The directories to read scores from: all but those in which there are analyses alone."""
    files = [kind.FILE for kind in (Anticipation, OracleScore, SortedSentence)]
    return [each for each in directories if (each / SCORES).exists() or not any((each / f).exists() for f in files)]


def read_records(kind: type[Record], directories: Iterable[Path]) -> list[Record]:
    """The records of a kind in some directories; most directories have none."""
    records: list[Record] = []
    for path in (directory / kind.FILE for directory in directories):
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            records += [_parse(kind, line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return records


def write_records(directory: Path, records: Sequence[Record]) -> Path:
    """Add records of one kind to a directory; those about the same thing are replaced."""
    kind = type(records[0])
    path = directory / kind.FILE
    new = {record.key for record in records}
    earlier: list[Record] = read_records(kind, [directory])
    kept = [record for record in earlier if record.key not in new]
    lines = (json.dumps(as_table(record), ensure_ascii=False) + "\n" for record in [*kept, *records])
    write_whole(path, "".join(lines))
    return path


def _parse(kind: type[Record], line: str, where: str) -> Record:
    try:
        return build(kind, json.loads(line), where)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: not a JSON object: {error}") from None
    except ConfigError as error:
        raise DataError(str(error)) from None
