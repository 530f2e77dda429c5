"""Parallel text: files -> sentence pairs, streamed and checked, plain or packed.

A further format is one more class with `paths` and `pairs()`, beside ParallelFiles and TabSeparatedFile; those in XML
are in simulmt.formats.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from simulmt.errors import DataError

_SGM_ELEMENT = re.compile(r"<doc\b([^>]*)>|<seg\b[^>]*>(.*?)(</seg>|(?=<seg\b)|\Z)", re.DOTALL | re.IGNORECASE)
_SGM_SYSTEM = re.compile(r"""\bsysid\s*=\s*["']([^"']*)["']""", re.IGNORECASE)
_SGM_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#[0-9]+|#x[0-9a-fA-F]+);")  # others are taken for plain text


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
    """Two text files, plain, .gz or .xz, whose lines, or segments if they are .sgm, translate each other."""

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
    """Read the lines of a text file or, of an .sgm file, its segments by the first system."""
    return iter(read_references(path)[0]) if _is_sgm(path) else read_lines(path)


def read_references(path: Path) -> list[list[str]]:
    """All reference sets of a file: text holds one, an .sgm file of mteval one for each of its systems."""
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
                tidy(_SGM_ENTITY.sub(lambda each: html.unescape(each[0]), element[2]))
            )
    if not systems:
        raise DataError(f"{path}: no <seg> in it; expected an .sgm file with <seg id=...>...</seg>")
    return list(systems.values())


def tidy(text: str) -> str:
    """Text from inside mark-up on one line: every run of white space is one space."""
    return " ".join(text.split())


def file_sha256(path: Path) -> str:
    """The checksum of a file's bytes as they lie on disk."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_binary(path: Path) -> BinaryIO:
    """Open a file, plain, .gz or .xz, by its name."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _is_sgm(path: Path) -> bool:
    return path.name.removesuffix(".gz").removesuffix(".xz").lower().endswith((".sgm", ".sgml"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a file is opened, read or unpacked into a DataError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
