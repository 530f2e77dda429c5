"""XML formats: TMX translation memories and WMT test sets (since 2021).

Files are parsed incrementally, plain, .gz or .xz. Entity declarations are refused and nothing outside the file is
read, which rules out entity expansion and external fetches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from simulmt.data.corpus import Pair, collapse_whitespace, open_binary, reading
from simulmt.errors import DataError

BLOCK = 1 << 16
NATIVE_CODES = {"bpt", "ept", "it", "ph", "ut"}  # TMX elements that hold editor mark-up, not text


def read_elements(path: Path, tag: str) -> Iterator[tuple[int, Element]]:
    """Yield the elements with this tag, each with its line; raise DataError with file and line if XML is invalid.

    `ElementTree.iterparse` does not report line numbers.
    """
    parser = _ElementParser(path, tag)
    with reading(path), open_binary(path) as file:
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
            variants.setdefault(language, collapse_whitespace("".join(_texts(segment))))
    return variants


def _texts(element: Element) -> Iterator[str]:
    """Yield the text of an element without native codes."""
    yield element.text or ""
    for child in element:
        if child.tag not in NATIVE_CODES:
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
            segments[number] = collapse_whitespace("".join(segment.itertext()))
    return document
