"""Translation of HTML: the text between the tags is translated, the tags stay."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser

UNTRANSLATED = {"script", "style", "code"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


async def translate_html(text: str, translate: Callable[[str], Awaitable[str]]) -> str:
    """Translate every run of text between two tags on its own.

    Text without letters, and in `translate="no"`, scripts, styles and code, is left alone.
    """
    splitter = _Splitter()
    splitter.feed(text)
    splitter.close()
    return "".join([await _translated(part, translate) if is_text else part for part, is_text in splitter.parts])


async def _translated(text: str, translate: Callable[[str], Awaitable[str]]) -> str:
    words = text.strip()
    start = text.index(words)
    translation = await translate(" ".join(words.split()))
    return f"{text[:start]}{html.escape(translation, quote=False)}{text[start + len(words) :]}"


class _Splitter(HTMLParser):
    """Splits HTML into markup and text to translate."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[tuple[str, bool]] = []  # and whether it is text
        self._skipped: list[str] = []  # open elements from the outermost untranslated one inwards

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._keep(self.get_starttag_text() or "")
        if tag not in VOID and (self._skipped or tag in UNTRANSLATED or ("translate", "no") in attrs):
            self._skipped.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._keep(f"</{tag}>")
        while tag in self._skipped and self._skipped.pop() != tag:
            pass  # elements whose end tag was left out

    def handle_data(self, data: str) -> None:
        if self._skipped or not any(map(str.isalnum, data)):
            is_raw = bool(self._skipped) and self._skipped[-1] in ("script", "style")
            self._keep(data if is_raw else html.escape(data, quote=False))
        else:
            self.parts.append((data, True))

    def handle_comment(self, data: str) -> None:
        self._keep(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._keep(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._keep(f"<![{data}]>")

    def _keep(self, markup: str) -> None:
        self.parts.append((markup, False))
