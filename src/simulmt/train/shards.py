"""Resumable work on a text in shards, which any number of processes can share.

A job turns the lines of a text into sentence pairs. Shards have a fixed size, so the result is the same bytes however
often the work was interrupted and whichever processes took part. Besides PREFIX.source and PREFIX.target there are

    PREFIX.shards/   finished shards, written atomically, until the job is finished
    PREFIX.json      the record of the job; written last, so the result is complete if it exists

Processes coordinate by file locks, which are released when a process ends, so another one takes over its shard.
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
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar

from simulmt.data.corpus import file_sha256
from simulmt.errors import ConfigError, DataError
from simulmt.files import lock, replacing, write_whole

T = TypeVar("T")
SIDES = ("source", "target")
WRITTEN = (*SIDES, "json", "shards")  # endings of all that a job may replace
PATIENCE = 100  # times that a folder may vanish under a lock; each is another process that cleans up


class Left(NamedTuple):
    """Why a line is left out, and its number if it differs from its index in the job."""

    reason: str
    line: int = 0


Rewritten = tuple[str, str] | Left  # the sentence pair that a line becomes, or why there is none


class Progress(NamedTuple):
    """Progress of a job: lines done by all processes, and the speed of this one."""

    lines: int
    sentences_per_second: float


@dataclass(frozen=True)
class Job:
    """A job: where the result goes and what it depends on."""

    prefix: Path
    facts: Mapping[str, Any]  # settings and checksums of the inputs; work under other facts is never mixed in
    inputs: Sequence[Path]  # never replaced, not even with `overwrite`
    overwrite: bool = False
    shard_lines: int = 65_536  # what a kill can cost a process

    def __post_init__(self) -> None:
        refuse_own_inputs(self.prefix, self.inputs)

    def path(self, ending: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{ending}")

    @property
    def identity(self) -> str:
        facts = {**self.facts, "shard_lines": self.shard_lines}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def refuse_own_inputs(prefix: Path, inputs: Iterable[Path], written: Sequence[str] = WRITTEN) -> None:
    """Raise ConfigError if an output file is also an input, or a directory that contains one."""
    replaced = [prefix.with_name(f"{prefix.name}.{ending}") for ending in written]
    for path in inputs:
        if any(_same(place, own) for place in (path, *path.resolve().parents) for own in replaced):
            raise ConfigError(f"--output {prefix}: would replace its own input {path}; choose another")


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):  # mostly because one of them is not there
        return one.samefile(other)
    return False


def rewrite(
    job: Job,
    lines: Callable[[], Iterable[T]],
    work: Callable[[Sequence[T]], Sequence[Rewritten]],
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """Do the rest of a job, and return its record when the result is complete.

    `lines` reads the input; `work` maps the lines of a shard to as many results, in order.
    """
    with writing(job.prefix):
        if finished(job) is None:
            with alone(job.prefix):
                _refuse_to_mix(job)
        folder = job.path("shards") / job.identity
        others = _make_shards(job, lines, work, progress, folder, wanted=None)
        if others:
            _make_shards(job, lines, work, progress, folder, wanted=others)
        return _merge(job, folder)


def finished(job: Job) -> dict[str, Any] | None:
    """Return the record if the result exists and is intact."""
    record = _read_table(job.path("json"))
    whole = record.get("identity") == job.identity and all(job.path(side).is_file() for side in SIDES)
    return record if whole else None


def _refuse_to_mix(job: Job) -> None:
    """Refuse to replace files of other jobs unless `overwrite` is set."""
    if finished(job) is not None:
        return
    shards = job.path("shards")
    begun = list(shards.iterdir()) if shards.is_dir() else []
    strangers = [path for path in begun if path.name != job.identity]
    if not begun:  # or they may come from a merge of this job that was killed
        strangers += [path for path in map(job.path, ("json", *SIDES)) if path.exists()]
    if strangers and not job.overwrite:
        raise _stranger(strangers[0])
    for path in strangers:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _make_shards(
    job: Job,
    lines: Callable[[], Iterable[T]],
    work: Callable[[Sequence[T]], Sequence[Rewritten]],
    progress: Callable[[Progress], None],
    folder: Path,
    wanted: set[int] | None,
) -> set[int]:
    """Make all missing shards; return those that other processes are making.

    With `wanted`, wait for these shards and make those whose process was killed.
    """
    if finished(job) is not None:
        return set()
    began, made, others = time.perf_counter(), 0, set()
    for number, part in enumerate(_parts(lines(), job.shard_lines)):
        path = folder / f"{number:06d}.json"
        if path.exists() or (wanted is not None and number not in wanted):
            continue
        with _locked(path.with_suffix(".lock"), patient=wanted is not None) as mine:
            if not mine:
                others.add(number)
            elif not path.exists() and finished(job) is None:
                write_whole(path, json.dumps(_sort_out(work(part), number * job.shard_lines), ensure_ascii=False))
                made += len(part)
                done = job.shard_lines * (len(list(folder.glob("[0-9]*.json"))) - 1) + len(part)
                progress(Progress(done, made / (time.perf_counter() - began)))
    return others


def _sort_out(results: Sequence[Rewritten], first: int) -> dict[str, Any]:
    """Return a shard as stored: its pairs, and the 1-based lines left out by reason."""
    left: dict[str, list[int]] = {}
    for line, result in enumerate(results, start=first + 1):
        if isinstance(result, Left):
            left.setdefault(result.reason, []).append(result.line or line)
    return {
        "lines": len(results),
        "left": left,
        "pairs": [result for result in results if not isinstance(result, Left)],
    }


def _merge(job: Job, folder: Path) -> dict[str, Any]:
    """Join the shards in order; the record is written last."""
    with alone(job.prefix):
        record = finished(job)
        if record is None:
            record = {"identity": job.identity, **job.facts, "lines": 0, "kept": 0, "left": {}}
            with replacing(job.path("source")) as source, replacing(job.path("target")) as target:
                for path in sorted(folder.glob("[0-9]*.json")):
                    _append(json.loads(path.read_bytes()), record, source, target)
            write_whole(job.path("json"), json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        shutil.rmtree(folder.parent, ignore_errors=True)
    return record


def _append(shard: dict[str, Any], record: dict[str, Any], source: BinaryIO, target: BinaryIO) -> None:
    record["lines"] += shard["lines"]
    record["kept"] += len(shard["pairs"])
    for reason, lines in shard["left"].items():
        record["left"].setdefault(reason, []).extend(lines)
    source.writelines(f"{pair[0]}\n".encode() for pair in shard["pairs"])
    target.writelines(f"{pair[1]}\n".encode() for pair in shard["pairs"])


def _parts(lines: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(lines)
    while part := list(islice(remaining, size)):
        yield part


@contextmanager
def writing(prefix: Path) -> Iterator[None]:
    """Convert errors of writing to DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error}") from error


@contextmanager
def alone(prefix: Path) -> Iterator[None]:
    """Hold an exclusive lock on a prefix; the lock file is removed afterwards."""
    path = prefix.with_name(f".{prefix.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            lock(file)
            if not _is_at(path, file):  # the one before took it away while we waited, so the lock is worth nothing
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_at(path: Path, file: TextIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


@contextmanager
def _locked(path: Path, patient: bool) -> Iterator[bool]:
    """Yield whether the lock was acquired; `patient` waits for it."""
    with _open_lock(path) as file:
        yield lock(file, wait=patient)


def _open_lock(path: Path, patience: int = PATIENCE) -> TextIO:
    """Open a lock file, although another process may clean up at any moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except (FileNotFoundError, FileExistsError):  # the second, if mkdir finds the folder and then does not
        if not patience:
            raise
    return _open_lock(path, patience - 1)


def keep(path: Path, facts: Mapping[str, Any], overwrite: bool, make: Callable[[], Iterable[str]]) -> Path:
    """Make a file of lines once, under the lock `alone`; replace it only on request.

    PATH.json records its inputs and checksum, to recognise files of other origin.
    """
    beside = path.with_name(f"{path.name}.json")
    if path.exists():
        if _read_table(beside) == {**facts, "sha256": file_sha256(path)}:
            return path
        if not overwrite:
            raise _stranger(path)
    text = "".join(line + "\n" for line in make())
    path.unlink(missing_ok=True)  # never beside a record that is not its own, whenever this is killed
    write_whole(beside, json.dumps({**facts, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    write_whole(path, text)
    return path


def _stranger(path: Path) -> DataError:
    return DataError(
        f"{path}: is there already, not made by this command from this text with these settings; "
        "choose another --output, or replace it with --overwrite"
    )


def _read_table(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, or an empty table if it cannot be read."""
    with suppress(OSError, ValueError):
        table = json.loads(path.read_bytes())
        return table if isinstance(table, dict) else {}
    return {}
