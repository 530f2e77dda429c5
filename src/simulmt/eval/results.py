"""What an evaluation leaves on disk, and how the figures and the report read it.

    DIR/scores.jsonl                     one `Result` a line: a system at a delay on a test set
    DIR/<name>.hyp                       its translations, one a line; <name> is `Result.name`, such as en-zh-k3
    DIR/<name>/instances.log             its sentences with their delays, as SimulEval writes them (`instances`)

The keys of a line are the fields of `Result`. A directory is about one test set; results of several are read
from several directories. What was not measured is null: there are no computation-aware figures for a system that was
scored from a log. A line may leave out every field that has a default, so that published figures can be
set beside one's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from simulmt.config import as_table, build, require
from simulmt.errors import ConfigError, DataError
from simulmt.files import write_whole

SCORES = "scores.jsonl"
INSTANCES = "instances.log"
WHOLE_SENTENCE = "full"  # stands where a delay would, in names

Unit = Literal["word", "char"]
Interval = tuple[float, float]

_SYSTEM_NAME = re.compile(r"[^\s/\\.][^\s/\\]*")


@dataclass(frozen=True)
class Result:
    """A system at a delay on a test set: quality, latency, computation, and what is needed to measure them again.

    An interval holds the ends of sacrebleu's 95% interval by bootstrap. AL, LAAL, DAL and the offsets count source
    words; the target is counted in `unit`.
    """

    system: str
    delay: int | None  # k; None for a system that waits for the end of the sentence
    test_set: str
    unit: Unit

    # quality, lower-cased as published figures are, and cased
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
    written_twice: int | None = None  # words, or ideographs, that stand twice in a row
    reference_written_twice: int | None = None  # in the first reference
    torn_words: int | None = None  # that neither the lexicon nor the source knows
    signature: str = ""  # of BLEU
    signatures: dict[str, str] = field(default_factory=dict)  # of each of the four scores, by its field

    # latency
    LAAL: float | None = None
    DAL: float | None = None
    AP: float | None = None
    start_offset: float | None = None
    end_offset: float | None = None

    # computation, with one stream alone on the machine
    AL_CA: float | None = None  # milliseconds, 1 ms a source word
    compute_ms_median: float | None = None  # of a source piece
    compute_ms_p95: float | None = None
    compute_ms_p99: float | None = None
    timed_sentences: int | None = None  # that these figures are of
    timed_runs: int | None = None
    threads: int | None = None

    # seconds behind an ideal interpreter if the source were spoken at a steady rate: means over target units
    words_per_second: float | None = None
    paced_lag: float | None = None  # the sum of the three below
    paced_lag_p95: float | None = None
    paced_waiting: float | None = None
    paced_queueing: float | None = None
    paced_computing: float | None = None

    # where it comes from
    sentences: int | None = None
    empty_hypotheses: int | None = None
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of source, references and log, by path
    bundle_sha256: str | None = None  # of the bundle's manifest, which has the checksums of all its files
    commit: str | None = None
    command: tuple[str, ...] = ()
    date: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # versions, processor

    def __post_init__(self) -> None:
        require(_SYSTEM_NAME.fullmatch(self.system) is not None, _name_rule(self.system))
        require(self.delay is None or self.delay >= 1, f"delay must be 1 or more, or null, got {self.delay}")

    @property
    def name(self) -> str:
        """What the files of this result are called."""
        return result_name(self.system, self.delay)

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What makes a result another one: test set, system and delay."""
        return self.test_set, self.system, self.delay


def result_name(system: str, delay: int | None) -> str:
    """The name of a system at a delay: en-zh-k3, or teacher-full for one that waits for the end."""
    return f"{system}-{WHOLE_SENTENCE if delay is None else f'k{delay}'}"


def read_results(path: Path) -> list[Result]:
    """The results in a directory, or in a file of such lines, in their order."""
    path = path / SCORES if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `simulmt evaluate` writes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    results = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not results:
        raise DataError(f"{path}: holds no results; remove it and run `simulmt evaluate` again")
    return results


def read_all(paths: Iterable[Path]) -> list[Result]:
    """The results of several directories or files; the same system, delay and test set twice is an error."""
    found: dict[tuple[str, str, int | None], Path] = {}
    results = []
    for path in paths:
        for result in read_results(path):
            if result.key in found:
                raise DataError(
                    f"{path}: {result.name} on {result.test_set} is in {found[result.key]} as well; "
                    "leave one out or name the systems apart"
                )
            found[result.key] = path
            results.append(result)
    return results


def write_results(directory: Path, results: Sequence[Result]) -> None:
    """Add results of one test set to a directory; those of the same system and delay are replaced."""
    for test_set in {result.test_set for result in results}:
        require_room(directory, test_set)
    path = directory / SCORES
    earlier = read_results(path) if path.exists() else []
    new = {result.key for result in results}
    kept = [*(result for result in earlier if result.key not in new), *results]
    write_whole(path, "".join(_lines(kept)))


def require_room(directory: Path, test_set: str) -> None:
    """Make the directory, and refuse one that is about another test set."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {directory}: cannot be made: {error.strerror}") from None
    earlier = read_results(directory) if (directory / SCORES).exists() else []
    others = sorted({result.test_set for result in earlier} - {test_set})
    if others:
        raise ConfigError(
            f"--output {directory}: holds results of the test set {others[0]}; take another directory for {test_set}"
        )


def check_system_name(name: str) -> str:
    """The name, if files can be called after it."""
    if _SYSTEM_NAME.fullmatch(name) is None:
        raise ConfigError(_name_rule(name))
    return name


def _lines(results: Iterable[Result]) -> Iterator[str]:
    for result in results:
        yield json.dumps(as_table(result), ensure_ascii=False, allow_nan=False) + "\n"


def _parse(line: str, where: str) -> Result:
    try:
        table = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{where}: expected one JSON object a line, found {type(table).__name__}")
    try:
        return build(Result, table, where)
    except ConfigError as error:
        raise DataError(str(error)) from None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no figure")


def _name_rule(name: str) -> str:
    return f"system '{name}': files are called after it, so it needs no spaces, no slashes and no leading dot"
