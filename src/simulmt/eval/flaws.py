"""Count errors that need no reference: repeated words and unknown words.

Both are typical of models that predict frames independently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from simulmt.text.words import HAN, KANA, Unit

_REPEATED = re.compile(rf"(?=([{HAN}]{{1,2}})\1)")  # overlaps count, so three in a row count twice
_WORD = re.compile(rf"[^\W\d_{KANA}{HAN}]+(?:['’-][^\W\d_{KANA}{HAN}]+)*")


def repeated_words(text: str, unit: Unit) -> int:
    """Count words that occur twice in a row; in text counted in characters, one or two ideographs."""
    if unit == "char":
        return len(_REPEATED.findall(text))
    return sum(one == other and one.isalpha() for one, other in pairwise(text.lower().split()))


def words_of(text: str) -> list[str]:
    """Return the lower-cased alphabetic words, without numbers, punctuation and ideographs."""
    return _WORD.findall(text.lower())


class Lexicon:
    """A vocabulary of full words, to find words that subword models made up."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words = {word for line in lines for word in words_of(line)}

    def unknown(self, translation: str, source: str) -> list[str]:
        """Return the words of a translation that are neither in the lexicon nor in its source."""
        copied = words_of(source)
        return [word for word in words_of(translation) if word not in self._words and word not in copied]
