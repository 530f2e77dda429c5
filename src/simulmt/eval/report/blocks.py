"""Blocks that the report is made of, and their rendering as HTML and Markdown.

HTML is rendered by one Jinja template, by the `kind` of each block. Figures are omitted in Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Block:
    """A part of the report."""

    @property
    def kind(self) -> str:
        """The name of the block in the template."""
        return type(self).__name__.lower()

    def markdown(self) -> str:
        return ""


@dataclass(frozen=True)
class Heading(Block):
    text: str

    def markdown(self) -> str:
        return f"### {self.text}\n"


@dataclass(frozen=True)
class Paragraph(Block):
    text: str

    def markdown(self) -> str:
        return f"{self.text}\n"


@dataclass(frozen=True)
class Note(Paragraph):
    """A paragraph in small print."""


@dataclass(frozen=True)
class List(Block):
    lines: Sequence[str]

    def markdown(self) -> str:
        return "".join(f"- {line}\n" for line in self.lines)


@dataclass(frozen=True)
class Details(Block):
    """Lines of code, collapsed in HTML."""

    summary: str
    lines: Sequence[str]

    def markdown(self) -> str:
        return f"{self.summary}:\n\n" + "".join(f"- `{line}`\n" for line in self.lines)


@dataclass(frozen=True)
class Table(Block):
    """Headings and rows; all but the first `names` columns are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        ruler = [":---" if column < self.names else "---:" for column in range(len(self.headings))]
        rows = [self.headings, ruler, *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)


class Picture(NamedTuple):
    svg: str
    caption: str


@dataclass(frozen=True)
class Figures(Block):
    """Figures side by side, if there is room, under an optional heading and note."""

    figures: Sequence[Picture]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Example(Block):
    """Source, reference and translations of a sentence, each with its name."""

    lines: Sequence[tuple[str, Markup]]

    def markdown(self) -> str:
        return Table(self.lines[0], self.lines[1:], names=2).markdown()


class Chapter(NamedTuple):
    title: str
    blocks: Sequence[Block]


def render_html(title: str, chapters: Iterable[Chapter], **context: Any) -> str:
    return _TEMPLATES.get_template("report.html.jinja").render(title=title, chapters=chapters, **context)


def render_markdown(title: str, chapters: Iterable[Chapter]) -> str:
    parts = [f"# {title}\n"]
    for chapter in chapters:
        if blocks := [text for block in chapter.blocks if (text := block.markdown())]:
            parts += [f"## {chapter.title}\n", *blocks]
    return "\n".join(parts)
