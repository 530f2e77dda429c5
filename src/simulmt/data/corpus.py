"""Read sentence pairs from files, plain or compressed, and process them in parallel.

Each format is a class with `paths` and `pairs()`; XML formats are in simulmt.data.formats.
"""

from __future__ import annotations

import gzip
import html
import lzma
import multiprocessing
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from simulmt.errors import DataError
from simulmt.files import sha256

_SGM_ELEMENT = re.compile(r"<doc\b([^>]*)>|<seg\b[^>]*>(.*?)(</seg>|(?=<seg\b)|\Z)", re.DOTALL | re.IGNORECASE)
_SGM_SYSTEM = re.compile(r"""\bsysid\s*=\s*["']([^"']*)["']""", re.IGNORECASE)
_SGM_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#[0-9]+|#x[0-9a-fA-F]+);")  # anything else is plain text

T = TypeVar("T")
R = TypeVar("R")


class Pair(NamedTuple):
    """A sentence, its translation, and their line number, starting at 1."""

    source: str
    target: str
    line: int


class Corpus(Protocol):
    """A parallel corpus, in any format."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, source first, target last."""

    def pairs(self) -> Iterator[Pair]:
        """Yield pairs in order; raise DataError if a file is invalid."""


@dataclass(frozen=True)
class ParallelFiles:
    """Two parallel files of lines, or of segments if they are .sgm; plain, .gz or .xz."""

    source: Path
    target: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.source, self.target

    def pairs(self) -> Iterator[Pair]:
        sources, targets = read_sentences(self.source), read_sentences(self.target)
        for line, (source, target) in enumerate(zip_longest(sources, targets), start=1):
            if source is None or target is None:
                longer = line + sum(1 for _ in chain(sources, targets))
                counts = (line - 1, longer) if source is None else (longer, line - 1)
                raise DataError(
                    f"{self.source} has {counts[0]} lines but {self.target} has {counts[1]}; "
                    "line n of one must translate line n of the other"
                )
            yield Pair(source, target, line)

    def pairs_with(self, path: Path, items: Iterable[T]) -> Iterator[tuple[Pair, T]]:
        """Yield each pair with the item from its line in another file; raise DataError if a line is missing."""
        for pair, item in zip_longest(self.pairs(), items):
            if pair is None or item is None:
                more = "more" if pair is None else "fewer"
                raise DataError(f"{path}: has {more} lines than {self.source}; line n must belong to pair n")
            yield pair, item


@dataclass(frozen=True)
class TabSeparatedFile:
    """A file of tab-separated source and target; plain, .gz or .xz."""

    path: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def pairs(self) -> Iterator[Pair]:
        for line, text in enumerate(read_lines(self.path), start=1):
            columns = text.split("\t")
            if len(columns) != 2:
                raise DataError(f"{self.path}: line {line}: expected 2 tab-separated columns, found {len(columns)}")
            yield Pair(columns[0], columns[1], line)


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file, plain, .gz or .xz, without line ends.

    Only "\n" ends a line: other Unicode line breaks occur inside sentences, and splitting there would misalign the
    files.
    """
    line = 0
    with reading(path), open_binary(path) as file:
        for line, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}: line {line}: not valid UTF-8 at byte {error.start + 1} of the line; "
                    "convert the file to UTF-8"
                ) from None
            if line == 1:
                text = text.removeprefix("\ufeff")
            yield text.removesuffix("\n").removesuffix("\r")
    if line == 0:
        raise DataError(f"{path}: the file is empty")


def read_sentences(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, or the segments of the first system of an .sgm file."""
    return iter(read_references(path)[0]) if _is_sgm(path) else read_lines(path)


def read_references(path: Path) -> list[list[str]]:
    """Return all reference sets of a file: one for plain text, one per system for .sgm."""
    if not _is_sgm(path):
        return [list(read_lines(path))]
    systems: dict[str, list[str]] = {}
    text, system = "\n".join(read_lines(path)), ""
    for element in _SGM_ELEMENT.finditer(text):
        if element[2] is None:
            named = _SGM_SYSTEM.search(element[1])
            system = named[1] if named else ""
        elif not element[3]:
            line = text.count("\n", 0, element.start()) + 1
            raise DataError(f"{path}: line {line}: <seg> without </seg>")
        else:
            systems.setdefault(system, []).append(
                collapse_whitespace(_SGM_ENTITY.sub(lambda each: html.unescape(each[0]), element[2]))
            )
    if not systems:
        raise DataError(f"{path}: no <seg> found; expected an .sgm file with <seg id=...>...</seg>")
    return list(systems.values())


def read_development(source: Path, targets: Sequence[Path]) -> tuple[ParallelFiles, list[list[str]]]:
    """Return a development set with its first references, and all other reference sets; check their lengths."""
    sets = [(path, references) for path in targets for references in read_references(path)]
    first = len(sets[0][1])
    for path, references in sets:
        if len(references) != first:
            raise DataError(f"{path}: {len(references)} references, but the first set in {targets[0]} has {first}")
    return ParallelFiles(source, targets[0]), [references for _, references in sets[1:]]


def collapse_whitespace(text: str) -> str:
    """Replace each run of white space by one space, and strip both ends."""
    return " ".join(text.split())


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a corpus file as stored on disk; raise DataError if it cannot be read."""
    with reading(path):
        return sha256(path)


def open_binary(path: Path) -> BinaryIO:
    """Open a file, decompressing .gz and .xz."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _is_sgm(path: Path) -> bool:
    return path.name.removesuffix(".gz").removesuffix(".xz").lower().endswith((".sgm", ".sgml"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert read and decompression errors to DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert write errors to DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


def map_chunks(
    work: Callable[[list[T]], R], items: Iterable[T], size: int, processes: int
) -> Iterator[tuple[list[T], R]]:
    """Yield each chunk of items with the result of `work`, in order.

    A single chunk is processed in this process; several are distributed over `processes`, so `work` must be picklable.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, size)), [])
    head = list(islice(chunks, 2)) if processes > 1 else []
    if len(head) < 2:
        yield from ((chunk, work(chunk)) for chunk in chain(head, chunks))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), _init_worker, (work,)) as pool:
        pending: deque[tuple[list[T], Future[R]]] = deque()
        for chunk in chain(head, chunks):
            pending.append((chunk, pool.submit(_run_chunk, chunk)))
            if len(pending) > 2 * processes:  # bounds memory
                first, result = pending.popleft()
                yield first, result.result()
        yield from ((chunk, result.result()) for chunk, result in pending)


_worker_function: list[Callable[[Any], Any]] = []  # set once in each worker


def _init_worker(work: Callable[[Any], Any]) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_function[:] = [work]


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise this process would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_chunk(chunk: list[Any]) -> Any:
    return _worker_function[0](chunk)
