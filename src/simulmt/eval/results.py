"""Result files.

    DIR/scores.jsonl                     one `Result` per line: a system at a delay on a test set
    DIR/<name>.hyp                       its translations, one per line; <name> is `Result.name`, such as en-zh-k3
    DIR/<name>/instances.log             its sentences with delays, in SimulEval's format
    DIR/anticipation.jsonl               one `order.Anticipation` per line: a corpus and an aligner
    DIR/oracle.jsonl                     one `order.OracleScore` per line: oracle and default order
    DIR/sortings.jsonl                   one `order.SortedSentence` per line: Z of a sentence

A directory holds one test set. Values that were not measured are null, such as timings of a system scored from a log.
Fields with defaults may be left out, so that published scores can be added for comparison.

Logs written here add `references` if there are several, which SimulEval ignores. `elapsed` is always 0, as in
SimulEval's own logs of text, which have no computation-aware latency.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from simulmt.config import as_table, build, require
from simulmt.data.corpus import read_lines
from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import Instance, end_offset
from simulmt.files import write_atomic
from simulmt.text.words import Unit

SCORES = "scores.jsonl"
INSTANCES = "instances.log"
WHOLE_SENTENCE = "full"  # replaces the delay in names

Interval = tuple[float, float]

# Fields of results written before 0.1.0.
_FORMER_NAMES = {
    "written_twice": "repeated_words",
    "reference_written_twice": "reference_repeated_words",
    "torn_words": "unknown_words",
}
_SYSTEM_NAME = re.compile(r"[^\s/\\.][^\s/\\]*")
# `simuleval --score-only --output DIRECTORY` needs config.yaml next to the log.
_SIMULEVAL_CONFIG = "source_type: text\ntarget_type: text\n"


@dataclass(frozen=True)
class Result:
    """Quality, latency, timing and provenance of a system at a delay on a test set.

    Intervals are sacrebleu's 95% bootstrap intervals. AL, LAAL, DAL and the offsets are in source words; the target is
    counted in `unit`.
    """

    FILE: ClassVar[str] = SCORES

    system: str
    delay: int | None  # k; None for a system that waits for the end of the sentence
    test_set: str
    unit: Unit

    # quality, lower-cased, as in published results, and cased
    BLEU: float
    AL: float
    BLEU_interval: Interval | None = None
    BP: float | None = None  # brevity penalty of BLEU
    precisions: tuple[float, ...] = ()  # of 1-grams to 4-grams, in percent
    chrF2: float | None = None  # noqa: N815
    chrF2_interval: Interval | None = None  # noqa: N815
    BLEU_cased: float | None = None
    BLEU_cased_interval: Interval | None = None
    chrF2_cased: float | None = None  # noqa: N815
    chrF2_cased_interval: Interval | None = None  # noqa: N815
    repeated_words: int | None = None  # words, or ideographs, that occur twice in a row
    reference_repeated_words: int | None = None  # in the first reference
    unknown_words: int | None = None  # neither in the lexicon nor in the source
    numbers: int | None = None  # in the source and, by value, in a reference
    numbers_kept: int | None = None  # in the translation
    negations: int | None = None  # sentences negated in the source and all references
    negations_kept: int | None = None  # in the translation
    signature: str = ""  # of BLEU
    signatures: dict[str, str] = field(default_factory=dict)  # of each of the four scores, by its field

    # latency
    LAAL: float | None = None
    DAL: float | None = None
    AP: float | None = None
    start_offset: float | None = None
    end_offset: float | None = None

    # computation, with one stream alone on the machine
    AL_CA: float | None = None  # milliseconds, with 1 ms per source word
    compute_ms_median: float | None = None  # of a source piece
    compute_ms_p95: float | None = None
    compute_ms_p99: float | None = None
    timed_sentences: int | None = None
    timed_runs: int | None = None
    threads: int | None = None
    segment: bool = False  # lines were split into sentences

    # seconds behind an ideal interpreter if the source were spoken at a steady rate: means over target units
    words_per_second: float | None = None
    paced_lag: float | None = None  # the sum of the three below
    paced_lag_p95: float | None = None
    paced_waiting: float | None = None
    paced_queueing: float | None = None
    paced_computing: float | None = None

    # provenance
    sentences: int | None = None
    empty_hypotheses: int | None = None
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of source, references and log, by path
    bundle_sha256: str | None = None  # of the bundle's manifest, which has the checksums of all its files
    commit: str | None = None
    command: tuple[str, ...] = ()
    date: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # versions, processor

    def __post_init__(self) -> None:
        check_system_name(self.system)
        require(self.delay is None or self.delay >= 1, f"delay must be 1 or more, or null, got {self.delay}")

    @property
    def name(self) -> str:
        """File name of this result."""
        return result_name(self.system, self.delay)

    @property
    def delay_name(self) -> str:
        """The delay k, or "full" for a full-sentence system."""
        return WHOLE_SENTENCE if self.delay is None else str(self.delay)

    @property
    def numbers_percent(self) -> float | None:
        """Percentage of numbers kept; None without numbers."""
        return _percent(self.numbers_kept, self.numbers)

    @property
    def negations_percent(self) -> float | None:
        """Percentage of negations kept; None without negations."""
        return _percent(self.negations_kept, self.negations)

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Test set, system and delay."""
        return self.test_set, self.system, self.delay


def _percent(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def result_name(system: str, delay: int | None) -> str:
    """Return the name of a system at a delay: en-zh-k3, or teacher-full for a full-sentence system."""
    return f"{system}-{WHOLE_SENTENCE if delay is None else f'k{delay}'}"


class _Record(Protocol):
    FILE: ClassVar[str]

    @property
    def key(self) -> tuple[object, ...]: ...


Record = TypeVar("Record", bound=_Record)


def read_results(path: Path) -> list[Result]:
    """Read the results of a directory or JSONL file, in order."""
    path = path / SCORES if path.is_dir() else path
    if not path.exists():
        raise DataError(f"{path}: no such file; create it with `simulmt evaluate`")
    results = _read(Result, path)
    if not results:
        raise DataError(f"{path}: contains no results; remove it and run `simulmt evaluate` again")
    return results


def read_all(paths: Iterable[Path]) -> list[Result]:
    """Read the results of several directories or files; duplicates are an error."""
    found: dict[tuple[str, str, int | None], Path] = {}
    results = []
    for path in paths:
        for result in read_results(path):
            if result.key in found:
                raise DataError(
                    f"{path}: {result.name} on {result.test_set} is in {found[result.key]} as well; "
                    "omit one of them or rename one of the systems"
                )
            found[result.key] = path
            results.append(result)
    return results


def check_baseline(baseline: str | None, results: Iterable[Result]) -> list[str]:
    """Return the names of the systems, in order; raise ConfigError if the baseline is none of them."""
    systems = list(dict.fromkeys(result.system for result in results))
    if baseline is not None and baseline not in systems:
        raise ConfigError(f"--baseline {baseline}: no such system; there are {', '.join(systems)}")
    return systems


def read_records(kind: type[Record], directories: Iterable[Path]) -> list[Record]:
    """Read the records of a kind in all directories."""
    paths = (directory / kind.FILE for directory in directories)
    return [record for path in paths if path.exists() for record in _read(kind, path)]


def write_results(directory: Path, results: Sequence[Result]) -> None:
    """Add results of a test set to a directory, replacing those of the same system and delay."""
    for test_set in {result.test_set for result in results}:
        prepare_directory(directory, test_set)
    write_records(directory, results)


def write_records(directory: Path, records: Sequence[Record]) -> Path:
    """Add records of one kind to a directory, replacing those with the same key."""
    kind = type(records[0])
    new = {record.key for record in records}
    kept = [record for record in read_records(kind, [directory]) if record.key not in new]
    lines = (json.dumps(as_table(each), ensure_ascii=False, allow_nan=False) + "\n" for each in [*kept, *records])
    write_atomic(directory / kind.FILE, "".join(lines))
    return directory / kind.FILE


def prepare_directory(directory: Path, test_set: str) -> None:
    """Create the directory; raise ConfigError if it holds another test set."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {directory}: cannot be created: {error.strerror}") from None
    earlier = read_results(directory) if (directory / SCORES).exists() else []
    others = sorted({result.test_set for result in earlier} - {test_set})
    if others:
        raise ConfigError(
            f"--output {directory}: contains results of the test set {others[0]}; use another directory for {test_set}"
        )


def check_system_name(name: str) -> str:
    """Return the name if it is a valid file name."""
    rule = "names must not contain spaces, slashes or a leading dot"
    require(_SYSTEM_NAME.fullmatch(name) is not None, f"system '{name}': invalid name; {rule}")
    return name


def file_name(text: str) -> str:
    """Return text as a safe file name."""
    return re.sub(r"[^\w.+=-]+", "-", text)


def _read(kind: type[Record], path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return [_parse_record(kind, line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_record(kind: type[Record], line: str, where: str) -> Record:
    table = _parse_object(line, where)
    try:
        return build(kind, {_FORMER_NAMES.get(name, name): value for name, value in table.items()}, where)
    except ConfigError as error:
        raise DataError(str(error)) from None


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        table = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{where}: expected one JSON object per line, found {type(table).__name__}")
    return table


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def write_instances(directory: Path, instances: Sequence[Instance]) -> None:
    """Write a log that `simuleval --score-only --output DIRECTORY` can score."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(_SIMULEVAL_CONFIG, encoding="utf-8")
    lines = (json.dumps(_log_entry(instance), ensure_ascii=False) + "\n" for instance in instances)
    (directory / INSTANCES).write_text("".join(lines), encoding="utf-8")


def read_instances(path: Path) -> list[Instance]:
    """Read a log, given as a file or its directory."""
    path = path / INSTANCES if path.is_dir() else path
    return [_parse_instance(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), start=1)]


def _log_entry(instance: Instance) -> dict[str, Any]:
    table = {
        "index": instance.index,
        "prediction": instance.prediction,
        "delays": instance.delays,
        "elapsed": [0] * len(instance.delays),
        "prediction_length": len(instance.delays),
        "reference": instance.reference,
        "source": instance.source,
        "source_length": instance.source_length,
    }
    return table if len(instance.references) == 1 else table | {"references": instance.references}


def _parse_instance(line: str, where: str) -> Instance:
    table = _parse_object(line, where)
    delays = _field(table, "delays", list, where)
    if not all(isinstance(delay, int) for delay in delays):
        raise DataError(f"{where}: delays: expected integer numbers of source words; speech logs are not supported")
    source_length = _field(table, "source_length", int, where)
    try:
        end_offset(delays, source_length)  # validates the delays
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    reference = _field(table, "reference", str | None, where) or ""
    references = _field(table, "references", list, where) if "references" in table else [reference.removesuffix("\n")]
    return Instance(
        index=_field(table, "index", int, where),
        source=_field(table, "source", str, where),
        references=tuple(references),
        prediction=_field(table, "prediction", str, where),
        delays=tuple(delays),
        source_length=source_length,
    )


def _field(table: dict[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in table:
        raise DataError(f"{where}: no '{key}'; expected a line of SimulEval's {INSTANCES}")
    if not isinstance(table[key], kind):
        raise DataError(f"{where}: {key}: expected {getattr(kind, '__name__', kind)}, got {table[key]!r}")
    return table[key]
