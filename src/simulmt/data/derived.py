"""Write sentence pairs derived from other text, atomically.

A job writes three files, and is finished when all of them are there:

    PREFIX.source, PREFIX.target   the pairs, one sentence per line
    PREFIX.json                    the record: inputs, settings and dropped lines

A finished job is not repeated. Files of another job are replaced only on request.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from simulmt.data.corpus import file_sha256, writing
from simulmt.errors import ConfigError, DataError
from simulmt.files import lock, replacing, write_whole

SIDES = ("source", "target")
OUTPUT_SUFFIXES = (*SIDES, "json", "shards")  # suffixes of the files a job may replace
EMPTY = "empty"  # reason to drop a line
LINES_BETWEEN_REPORTS = SHARD_LINES = 65_536


class Dropped(NamedTuple):
    """Why a line was dropped, and its number if it differs from its index in the job."""

    reason: str
    line: int = 0


Rewritten = tuple[str, str] | Dropped  # result of a line


class Progress(NamedTuple):
    """Progress of a job: lines done by all processes, and the speed of this one."""

    lines: int
    sentences_per_second: float


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """A job: its output prefix, inputs and settings."""

    prefix: Path
    metadata: Mapping[str, Any]  # settings and checksums of the inputs
    inputs: Sequence[Path]  # never replaced, not even with `overwrite`
    overwrite: bool = False
    shard_lines: int = SHARD_LINES  # of a sharded job; part of the identity of every job

    def __post_init__(self) -> None:
        refuse_to_overwrite_inputs(self.prefix, self.inputs)

    @staticmethod
    def on_files(
        prefix: Path,
        name: str,
        settings: Any,
        inputs: Mapping[str, Path],
        overwrite: bool = False,
        shard_lines: int = SHARD_LINES,
    ) -> Job:
        """Return the job `name`, which depends on its settings and on the contents of its input files."""
        checksums = {each: file_sha256(path) for each, path in inputs.items()}
        metadata = {"rewrite": name, "settings": settings, "inputs": checksums}
        return Job(prefix, metadata, [*inputs.values()], overwrite, shard_lines)

    def path(self, suffix: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")

    @property
    def identity(self) -> str:
        metadata = {**self.metadata, "shard_lines": self.shard_lines}
        return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def refuse_to_overwrite_inputs(prefix: Path, inputs: Iterable[Path], written: Sequence[str] = OUTPUT_SUFFIXES) -> None:
    """Raise ConfigError if an output file is also an input, or a directory that contains one."""
    replaced = [prefix.with_name(f"{prefix.name}.{suffix}") for suffix in written]
    for path in inputs:
        if any(_is_same_file(place, own) for place in (path, *path.resolve().parents) for own in replaced):
            raise ConfigError(f"--output {prefix}: would replace its own input {path}; choose another prefix")


def _is_same_file(one: Path, other: Path) -> bool:
    with suppress(OSError):  # such as a missing file
        return one.samefile(other)
    return False


def write_pairs(
    job: Job, results: Callable[[], Iterable[Rewritten]], report: Report = lambda _: None
) -> dict[str, Any]:
    """Run a job line by line in constant memory, unless it is finished, and return its record."""
    with writing(job.prefix), exclusive_lock(job.prefix):
        record = finished(job)
        if record is None:
            remove_previous(job)
            with publishing(job) as (record, source, target):
                _stream(results(), record, source, target, report)
    return record


def _stream(
    results: Iterable[Rewritten], record: dict[str, Any], source: BinaryIO, target: BinaryIO, report: Report
) -> None:
    began, line = time.perf_counter(), 0
    for line, result in enumerate(results, start=1):
        if isinstance(result, Dropped):
            record["left"].setdefault(result.reason, []).append(result.line or line)
        else:
            source.write(f"{result[0]}\n".encode())
            target.write(f"{result[1]}\n".encode())
            record["kept"] += 1
        if line % LINES_BETWEEN_REPORTS == 0:
            report(Progress(line, line / (time.perf_counter() - began)))
    record["lines"] = line
    report(Progress(line, line / (time.perf_counter() - began)))


def finished(job: Job) -> dict[str, Any] | None:
    """Return the record if the result exists and is intact."""
    record = _read_table(job.path("json"))
    is_intact = record.get("identity") == job.identity and all(job.path(side).is_file() for side in SIDES)
    return record if is_intact else None


def remove_previous(job: Job) -> None:
    """Remove the files of other jobs if `overwrite` is set; otherwise raise DataError."""
    shards = job.path("shards")
    begun = list(shards.iterdir()) if shards.is_dir() else []
    foreign = [path for path in begun if path.name != job.identity]
    if not begun and _read_table(job.path("json")).get("identity") != job.identity:  # otherwise this job was killed
        foreign += [path for path in map(job.path, ("json", *SIDES)) if path.exists()]
    if foreign and not job.overwrite:
        raise _exists_error(foreign[0])
    for path in foreign:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def publishing(job: Job) -> Iterator[tuple[dict[str, Any], BinaryIO, BinaryIO]]:
    """Yield the record to fill in and two files; publish all three atomically if the block succeeds.

    Earlier files are removed and the record is written first, so that files next to a record belong to it.
    """
    record = {"identity": job.identity, **job.metadata, "lines": 0, "kept": 0, "left": {}}
    with replacing(job.path("source")) as source, replacing(job.path("target")) as target:
        yield record, source, target
        for side in SIDES:
            job.path(side).unlink(missing_ok=True)
        write_whole(job.path("json"), json.dumps(record, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def exclusive_lock(prefix: Path) -> Iterator[None]:
    """Hold an exclusive lock on a prefix; the lock file is removed afterwards."""
    path = prefix.with_name(f".{prefix.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            lock(file)
            if not _is_still_at(path, file):  # the previous holder removed the file while we waited
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_still_at(path: Path, file: TextIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def write_once(path: Path, metadata: Mapping[str, Any], overwrite: bool, make: Callable[[], Iterable[str]]) -> Path:
    """Write a file of lines once, holding `exclusive_lock`; replace it only with `overwrite`.

    PATH.json records its inputs and checksum, to recognise files of other origin.
    """
    record_path = path.with_name(f"{path.name}.json")
    if path.exists():
        if _read_table(record_path) == {**metadata, "sha256": file_sha256(path)}:
            return path
        if not overwrite:
            raise _exists_error(path)
    text = "".join(line + "\n" for line in make())
    path.unlink(missing_ok=True)  # so that it is never next to the record of another file
    write_whole(record_path, json.dumps({**metadata, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    write_whole(path, text)
    return path


def _exists_error(path: Path) -> DataError:
    return DataError(
        f"{path}: exists and was not made by this command from the same text and settings; "
        "choose another --output, or replace it with --overwrite"
    )


def _read_table(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, or an empty table if it cannot be read."""
    with suppress(OSError, ValueError):
        table = json.loads(path.read_bytes())
        return table if isinstance(table, dict) else {}
    return {}
