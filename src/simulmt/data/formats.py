"""XML formats: TMX translation memories and WMT test sets (since 2021).

Files are parsed incrementally, plain, .gz or .xz. Entity declarations are refused and nothing outside the file is
read, which rules out entity expansion and external fetches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.parsers import expat

from simulmt.data.corpus import Pair, open_binary, reading, tidy
from simulmt.errors import DataError

BLOCK = 1 << 16
NATIVE_CODES = {"bpt", "ept", "it", "ph", "ut"}  # TMX elements that hold editor mark-up, not text


class Event(NamedTuple):
    """Start or end of an element, or text, with its line."""

    kind: Literal["start", "end", "text"]
    name: str  # or the text
    line: int
    attributes: dict[str, str]


def xml_events(path: Path) -> Iterator[Event]:
    """Yield the parse events of an XML file; raise DataError with file and line if it is invalid."""
    events: list[Event] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def note(kind: Literal["start", "end", "text"], name: str, attributes: dict[str, str] | None = None) -> None:
        events.append(Event(kind, name, parser.CurrentLineNumber, attributes or {}))

    def refuse(name: str, *_: Any) -> None:
        line = parser.CurrentLineNumber
        raise DataError(f"{path}: line {line}: entity '{name}' of the document's own; write what it stands for instead")

    parser.StartElementHandler = lambda name, attributes: note("start", name, attributes)
    parser.EndElementHandler = lambda name: note("end", name)
    parser.CharacterDataHandler = lambda text: note("text", text)
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    with reading(path), open_binary(path) as file:
        try:
            while block := file.read(BLOCK):
                parser.Parse(block, False)
                yield from events
                events.clear()
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise DataError(f"{path}: line {error.lineno}: not valid XML: {reason}") from None
        except (ValueError, LookupError) as error:
            raise DataError(f"{path}: not in an encoding that XML is read in ({error}); convert it to UTF-8") from None
    yield from events


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
        for line, variants in _translation_units(self.path):
            languages.update(variants)
            source, target = (_variant(variants, wanted) for wanted in (self.source_language, self.target_language))
            if source is not None and target is not None:
                found = True
                yield Pair(source, target, line)
        if not found:
            known = ", ".join(sorted(languages)) or "none"
            wanted = f"{self.source_language} and {self.target_language}"
            raise DataError(f"{self.path}: no translation unit has both {wanted}; languages found: {known}")


def _translation_units(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line and text by language of each translation unit; the first variant of a language counts."""
    variants: dict[str, str] = {}
    language, line, codes = "", 0, 0
    text: list[str] | None = None
    for event in xml_events(path):
        if event.kind == "text":
            if text is not None and codes == 0:
                text.append(event.name)
        elif event.name in NATIVE_CODES:
            codes += 1 if event.kind == "start" else -1
        elif event.kind == "start" and event.name == "tu":
            variants, line = {}, event.line
        elif event.kind == "start" and event.name == "tuv":
            language = event.attributes.get("xml:lang") or event.attributes.get("lang", "")
        elif event.kind == "start" and event.name == "seg":
            text = []
        elif event.name == "seg" and text is not None:
            variants.setdefault(language, tidy("".join(text)))
            text = None
        elif event.kind == "end" and event.name == "tu":
            yield line, variants


def _variant(variants: dict[str, str], wanted: str) -> str | None:
    language = _normal(wanted)
    matching = (text for name, text in variants.items() if f"{_normal(name)}-".startswith(f"{language}-"))
    return next(matching, None)


def _normal(language: str) -> str:
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
        documents = list(_documents(self.path))
        if not documents:
            raise DataError(f"{self.path}: no <doc> with <src> and <ref>; expected a test set as WMT publishes them")
        for document in documents:
            for translator, segments in document.references.items():
                if segments.keys() != document.source.keys():
                    raise DataError(
                        f"{self.path}: line {document.line}: reference {translator or 'without a name'} has "
                        f"{len(segments)} segments, the source {len(document.source)}, or their ids differ"
                    )
        return documents


def _documents(path: Path) -> Iterator[_Document]:
    document: _Document | None = None
    part: dict[str, str] | None = None
    segment, text = "", list[str]()
    for event in xml_events(path):
        if event.kind == "text":
            text.append(event.name)
        elif event.kind == "start" and event.name == "doc":
            document, part = _Document(event.line, {}, {}), None
        elif document is None:
            continue
        elif event.kind == "start":
            text.clear()
            if event.name == "src":
                part = document.source
            elif event.name == "ref":
                part = document.references.setdefault(event.attributes.get("translator", ""), {})
            elif event.name == "hyp":
                part = None
            elif event.name == "seg":
                segment = event.attributes.get("id", str(len(part or ())))
        elif event.name == "seg" and part is not None:
            if segment in part:
                raise DataError(f"{path}: line {event.line}: segment {segment} comes twice; give each an id of its own")
            part[segment] = tidy("".join(text))
        elif event.name == "doc":
            yield document
            document = None
