"""Parallel text: files -> sentence pairs, streamed and checked, plain or packed.

A further format is one more class with `paths` and `pairs()`, beside ParallelFiles and TabSeparatedFile.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from simulmt.errors import DataError


class Pair(NamedTuple):
    """A sentence and its translation, with the line they stand on, counted from 1."""

    source: str
    target: str
    line: int


class Corpus(Protocol):
    """Files that hold sentence pairs; support for another format is another class of this shape."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, the one with the source first and the one with the target last."""

    def pairs(self) -> Iterator[Pair]:
        """Read the pairs in order; whatever is wrong with the files is a DataError."""


@dataclass(frozen=True)
class ParallelFiles:
    """Two text files, plain, .gz or .xz, whose lines translate each other."""

    source: Path
    target: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.source, self.target

    def pairs(self) -> Iterator[Pair]:
        sources, targets = read_lines(self.source), read_lines(self.target)
        for line, (source, target) in enumerate(zip_longest(sources, targets), start=1):
            if source is None or target is None:
                longer = line + sum(1 for _ in chain(sources, targets))
                counts = (line - 1, longer) if source is None else (longer, line - 1)
                raise DataError(
                    f"{self.source} has {counts[0]} lines but {self.target} has {counts[1]}; "
                    "line n of one must translate line n of the other"
                )
            yield Pair(source, target, line)


@dataclass(frozen=True)
class TabSeparatedFile:
    """One text file, plain, .gz or .xz, with source and target parted by a tab on each line."""

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
    r"""Read the lines of a UTF-8 file, plain, .gz or .xz, without their line ends.

    Only "\n" ends a line: other characters that Unicode calls line breaks occur inside sentences, and
    splitting there would shift one file against the other.
    """
    line = 0
    with reading(path), _open_binary(path) as file:
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


def file_sha256(path: Path) -> str:
    """The checksum of a file's bytes as they lie on disk."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_binary(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a file is opened, read or unpacked into a DataError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
