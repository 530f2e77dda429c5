"""Word splitting and Unicode ranges; no other module lists code points."""

from __future__ import annotations

import re
from itertools import chain
from typing import Literal
from unicodedata import category

Unit = Literal["word", "char"]  # unit of text length: space-separated words, or characters

LONGEST_WORD = 128  # longer runs are cut, so that a stream without spaces stays bounded

# Character ranges for use inside the brackets of a regular expression.
HAN = "\u3400-\u4dbf\u4e00-\u9fff"
RARE_HAN = "\uf900-\ufaff\U00020000-\U0003ffff"  # compatibility ideographs and the supplementary planes
KANA = "\u3001-\u30ff"  # with the punctuation before it, and the ideographic full stop
FULL_WIDTH_PUNCTUATION = "\uff01-\uff0f\uff1a-\uff20"
SPACELESS = f"{KANA}{HAN}{RARE_HAN}{FULL_WIDTH_PUNCTUATION}"  # written without spaces: each character is a word
SOUTH_EAST_ASIAN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer: no spaces either
HALF_WIDTH_KANA = "\uff66-\uff9f"
# Combining marks that Python does not count as letters.
COMBINING = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed"
    "\u0900-\u0963\u0966-\u0dff\u200c\u200d"
)
# White space, and lone surrogates from broken input, which cannot be encoded.
_GAP = r"\s\ud800-\udfff"

# A letter or digit of a script that puts spaces between words.
LETTER = f"[^\\W_{SOUTH_EAST_ASIAN}\u3001-\u9fff{RARE_HAN}{HALF_WIDTH_KANA}]"

_RUN = re.compile(rf"[^{_GAP}]+")
_WORD = re.compile(rf"[{SPACELESS}]|[^{_GAP}{SPACELESS}]{{1,{LONGEST_WORD}}}")
_OPEN_WORD = re.compile(rf"[^{_GAP}{SPACELESS}]\Z")
_IS_SPACELESS = re.compile(f"[{SPACELESS}]")


class WordSplitter:
    """Splits a stream of text into words, independent of its chunks."""

    def __init__(self) -> None:
        self._open = ""

    def push(self, text: str) -> list[str]:
        """Return the words completed by `text`; keep an unfinished last word."""
        text = self._open + text
        words = _WORD.findall(text)
        is_open = _OPEN_WORD.search(text) and len(words[-1]) < LONGEST_WORD
        self._open = words.pop() if is_open else ""
        return words

    def flush(self) -> list[str]:
        """Return the unfinished word, if any."""
        words, self._open = [self._open] if self._open else [], ""
        return words


def split_words(text: str) -> list[str]:
    """Split text at white space, around ideographs, and after LONGEST_WORD characters."""
    return _WORD.findall(text)


def split_runs(text: str) -> list[str]:
    """Split text at white space."""
    return _RUN.findall(text)


def is_spaceless(character: str) -> bool:
    """Return whether a character belongs to a script written without spaces."""
    return _IS_SPACELESS.match(character) is not None


def combining_marks() -> str:
    """Return all combining marks, accents and vowel signs, for use inside the brackets of a regular expression."""
    ranges = (range(0x300, 0x20000), range(0xE0100, 0xE01F0))  # there are none elsewhere
    return "".join(character for character in map(chr, chain(*ranges)) if category(character).startswith("M"))
