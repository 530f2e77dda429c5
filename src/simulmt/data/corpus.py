"""Read sentence pairs from files, plain, .gz or .xz, and process them in parallel.

Each format is a class with `paths` and `pairs()`: parallel and tab-separated lines, .sgm, TMX translation memories, and
WMT test sets (since 2021). XML is parsed incrementally. Entity declarations are refused and nothing outside the file is
read, which rules out entity expansion and external fetches.
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
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from simulmt.errors import DataError
from simulmt.files import sha256
from simulmt.text.words import collapse_spaces

_SGM_ELEMENT = re.compile(r"<doc\b([^>]*)>|<seg\b[^>]*>(.*?)(</seg>|(?=<seg\b)|\Z)", re.DOTALL | re.IGNORECASE)
_SGM_SYSTEM = re.compile(r"""\bsysid\s*=\s*["']([^"']*)["']""", re.IGNORECASE)
_SGM_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|#[0-9]+|#x[0-9a-fA-F]+);")  # anything else is plain text

T = TypeVar("T")
R = TypeVar("R")
BLOCK = 1 << 16
_NATIVE_CODES = {"bpt", "ept", "it", "ph", "ut"}  # TMX elements that hold editor mark-up, not text


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
    with wrap_read_errors(path), _open(path) as file:
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
                collapse_spaces(_SGM_ENTITY.sub(lambda each: html.unescape(each[0]), element[2]))
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


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a corpus file as stored on disk; raise DataError if it cannot be read."""
    with wrap_read_errors(path):
        return sha256(path)


def _open(path: Path) -> BinaryIO:
    """Open a file, decompressing .gz and .xz."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _is_sgm(path: Path) -> bool:
    return path.name.removesuffix(".gz").removesuffix(".xz").lower().endswith((".sgm", ".sgml"))


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Convert read and decompression errors to DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Convert write errors to DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class TranslationMemory:
    """A TMX file; the language en also matches en-GB, but not vice versa."""

    path: Path
    source_language: str
    target_language: str

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def pairs(self) -> Iterator[Pair]:
        found = False
        languages: set[str] = set()
        for line, unit in read_elements(self.path, "tu"):
            variants = _variants(unit)
            languages.update(variants)
            source, target = (_variant(variants, wanted) for wanted in (self.source_language, self.target_language))
            if source is not None and target is not None:
                found = True
                yield Pair(source, target, line)
        if not found:
            known = ", ".join(sorted(languages)) or "none"
            wanted = f"{self.source_language} and {self.target_language}"
            raise DataError(f"{self.path}: no translation unit has both {wanted}; languages found: {known}")


def _variants(unit: Element) -> dict[str, str]:
    """Return the segments of a translation unit by language, using the first of each."""
    variants: dict[str, str] = {}
    for variant in unit.iter("tuv"):
        language = variant.get("xml:lang", variant.get("lang", ""))
        for segment in variant.iter("seg"):
            variants.setdefault(language, collapse_spaces("".join(_texts(segment))))
    return variants


def _texts(element: Element) -> Iterator[str]:
    """Yield the text of an element without native codes."""
    yield element.text or ""
    for child in element:
        if child.tag not in _NATIVE_CODES:
            yield from _texts(child)
        yield child.tail or ""


def _variant(variants: dict[str, str], wanted: str) -> str | None:
    language = _normalise_tag(wanted)
    matching = (text for name, text in variants.items() if f"{_normalise_tag(name)}-".startswith(f"{language}-"))
    return next(matching, None)


def _normalise_tag(language: str) -> str:
    return language.lower().replace("_", "-")


class _Document(NamedTuple):
    line: int
    source: dict[str, str]  # by segment
    references: dict[str, dict[str, str]]  # by translator


@dataclass(frozen=True)
class WmtTestSet:
    """A WMT test set in XML, with one or more reference translators."""

    path: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def pairs(self) -> Iterator[Pair]:
        """Yield source and first reference; `line` counts segments."""
        sources = (text for document in self._documents for text in document.source.values())
        for number, (source, target) in enumerate(zip(sources, self.references()[0], strict=True), start=1):
            yield Pair(source, target, number)

    def references(self) -> list[list[str]]:
        """Return one reference set per translator who translated all documents."""
        documents = self._documents
        complete = list(documents[0].references)
        for document in documents:
            complete = [translator for translator in complete if translator in document.references]
            if not complete:
                where = f"{self.path}: line {document.line}"
                raise DataError(f"{where}: no translator has references for every document up to this one")
        return [
            [d.references[translator][segment] for d in documents for segment in d.source] for translator in complete
        ]

    @cached_property
    def _documents(self) -> list[_Document]:
        documents = [_read_document(self.path, *found) for found in read_elements(self.path, "doc")]
        if not documents:
            raise DataError(f"{self.path}: no <doc> with <src> and <ref>; expected a WMT test set")
        for document in documents:
            for translator, segments in document.references.items():
                if segments.keys() != document.source.keys():
                    raise DataError(
                        f"{self.path}: line {document.line}: reference {translator or 'without a name'} has "
                        f"{len(segments)} segments, the source {len(document.source)}, or their ids differ"
                    )
        return documents


def _read_document(path: Path, line: int, element: Element) -> _Document:
    document = _Document(line, {}, {})
    for part in element:
        if part.tag == "src":
            segments = document.source
        elif part.tag == "ref":
            segments = document.references.setdefault(part.get("translator", ""), {})
        else:
            continue  # translations by systems
        for segment in part.iter("seg"):
            number = segment.get("id", str(len(segments)))
            if number in segments:
                raise DataError(f"{path}: document at line {line}: <{part.tag}> has two segments with id {number}")
            segments[number] = collapse_spaces("".join(segment.itertext()))
    return document


def read_elements(path: Path, tag: str) -> Iterator[tuple[int, Element]]:
    """Yield the elements with this tag, each with its line; raise DataError with file and line if XML is invalid.

    `ElementTree.iterparse` does not report line numbers.
    """
    parser = _ElementParser(path, tag)
    with wrap_read_errors(path), _open(path) as file:
        try:
            while block := file.read(BLOCK):
                yield from parser.feed(block)
            yield from parser.feed(b"", final=True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise DataError(f"{path}: line {error.lineno}: not valid XML: {reason}") from None
        except (ValueError, LookupError) as error:
            raise DataError(f"{path}: unsupported encoding ({error}); convert it to UTF-8") from None


class _ElementParser:
    """Parses XML incrementally into the elements with one tag."""

    def __init__(self, path: Path, tag: str) -> None:
        self._path = path
        self._tag = tag
        self._line = 0
        self._builder: TreeBuilder | None = None  # inside an element with the tag
        self._finished: list[tuple[int, Element]] = []
        self._expat = expat.ParserCreate()
        self._expat.buffer_text = True
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.EntityDeclHandler = self._expat.SkippedEntityHandler = self._refuse_entity

    def feed(self, data: bytes, final: bool = False) -> Iterator[tuple[int, Element]]:
        """Parse data and yield the elements that end in it."""
        self._expat.Parse(data, final)
        yield from self._finished
        self._finished.clear()

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == self._tag:
            self._builder, self._line = TreeBuilder(), self._expat.CurrentLineNumber
            self._expat.CharacterDataHandler = self._builder.data
        if self._builder is not None:
            self._builder.start(tag, attributes)

    def _end(self, tag: str) -> None:
        if self._builder is not None:
            self._builder.end(tag)
            if tag == self._tag:
                self._finished.append((self._line, self._builder.close()))
                self._builder = self._expat.CharacterDataHandler = None

    def _refuse_entity(self, name: str, *_: Any) -> None:
        line = self._expat.CurrentLineNumber
        raise DataError(f"{self._path}: line {line}: entity '{name}' is not supported; replace it with its text")


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
