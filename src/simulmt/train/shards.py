"""Resumable processing of a text in shards, shared by any number of processes.

A job (see simulmt.data.derived) turns the lines of a text into sentence pairs. Shards have a fixed size, so the result
is the same bytes however often the work was interrupted and whichever processes took part. Finished shards are kept in
PREFIX.shards until the job is finished.

Processes coordinate by file locks, which are released when a process ends, so another one takes over its shard.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from simulmt.data.corpus import writing
from simulmt.data.derived import (
    Dropped,
    Job,
    Progress,
    Report,
    Rewritten,
    exclusive_lock,
    finished,
    publishing,
    remove_previous,
)
from simulmt.files import lock, write_whole

T = TypeVar("T")
LOCK_ATTEMPTS = 100  # another process may delete the folder before the lock file is opened


def rewrite(
    job: Job,
    lines: Callable[[], Iterable[T]],
    work: Callable[[Sequence[T]], Sequence[Rewritten]],
    progress: Report = lambda _: None,
) -> dict[str, Any]:
    """Run or resume a job, and return its record when the result is complete.

    `lines` reads the input; `work` maps the lines of a shard to as many results, in order.
    """
    with writing(job.prefix):
        if finished(job) is None:
            with exclusive_lock(job.prefix):
                if finished(job) is None:  # another process may have finished it while this one waited
                    remove_previous(job)
        folder = job.path("shards") / job.identity
        others = _make_shards(job, lines, work, progress, folder, wanted=None)
        if others:
            _make_shards(job, lines, work, progress, folder, wanted=others)
        return _merge(job, folder)


def _make_shards(
    job: Job,
    lines: Callable[[], Iterable[T]],
    work: Callable[[Sequence[T]], Sequence[Rewritten]],
    progress: Report,
    folder: Path,
    wanted: set[int] | None,
) -> set[int]:
    """Make all missing shards; return those that other processes are making.

    With `wanted`, wait for these shards and make those whose process was killed.
    """
    if finished(job) is not None:
        return set()
    began, made, others = time.perf_counter(), 0, set()
    for number, part in enumerate(_chunks(lines(), job.shard_lines)):
        path = folder / f"{number:06d}.json"
        if path.exists() or (wanted is not None and number not in wanted):
            continue
        with _locked(path.with_suffix(".lock"), wait=wanted is not None) as mine:
            if not mine:
                others.add(number)
            elif not path.exists() and finished(job) is None:
                write_whole(path, json.dumps(_shard_table(work(part), number * job.shard_lines), ensure_ascii=False))
                made += len(part)
                done = job.shard_lines * (len(list(folder.glob("[0-9]*.json"))) - 1) + len(part)
                progress(Progress(done, made / (time.perf_counter() - began)))
    return others


def _shard_table(results: Sequence[Rewritten], first: int) -> dict[str, Any]:
    """Return a shard as stored: its pairs, and the dropped lines, counted from 1, by reason."""
    left: dict[str, list[int]] = {}
    for line, result in enumerate(results, start=first + 1):
        if isinstance(result, Dropped):
            left.setdefault(result.reason, []).append(result.line or line)
    return {
        "lines": len(results),
        "left": left,
        "pairs": [result for result in results if not isinstance(result, Dropped)],
    }


def _merge(job: Job, folder: Path) -> dict[str, Any]:
    """Join the shards in order."""
    with exclusive_lock(job.prefix):
        record = finished(job)
        if record is None:
            with publishing(job) as (record, source, target):
                for path in sorted(folder.glob("[0-9]*.json")):
                    _append(json.loads(path.read_bytes()), record, source, target)
        shutil.rmtree(folder.parent, ignore_errors=True)
    return record


def _append(shard: dict[str, Any], record: dict[str, Any], source: BinaryIO, target: BinaryIO) -> None:
    record["lines"] += shard["lines"]
    record["kept"] += len(shard["pairs"])
    for reason, lines in shard["left"].items():
        record["left"].setdefault(reason, []).extend(lines)
    source.writelines(f"{pair[0]}\n".encode() for pair in shard["pairs"])
    target.writelines(f"{pair[1]}\n".encode() for pair in shard["pairs"])


def _chunks(lines: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(lines)
    while part := list(islice(remaining, size)):
        yield part


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Yield whether the lock was acquired; without `wait`, at once."""
    with _open_lock(path) as file:
        yield lock(file, wait=wait)


def _open_lock(path: Path, attempts: int = LOCK_ATTEMPTS) -> TextIO:
    """Open a lock file; retry if another process deletes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except (FileNotFoundError, FileExistsError):  # FileExistsError if the folder vanishes during mkdir
        if not attempts:
            raise
    return _open_lock(path, attempts - 1)
