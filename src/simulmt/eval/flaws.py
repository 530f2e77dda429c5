"""Count flaws that need no reference: repeated words and unknown (torn) words.

Both are typical of models that predict frames independently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from simulmt.text.words import HAN, KANA, Unit

_TWICE = re.compile(rf"(?=([{HAN}]{{1,2}})\1)")  # overlaps count, so three in a row count twice
_WORD = re.compile(rf"[^\W\d_{KANA}{HAN}]+(?:['’-][^\W\d_{KANA}{HAN}]+)*")


def written_twice(text: str, unit: Unit) -> int:
    """Count words, or in text counted in characters one or two ideographs, that occur twice in a row."""
    if unit == "char":
        return len(_TWICE.findall(text))
    return sum(one == other and one.isalpha() for one, other in pairwise(text.lower().split()))


def words_of(text: str) -> list[str]:
    """Return the lower-cased alphabetic words, without numbers, punctuation and ideographs."""
    return _WORD.findall(text.lower())


class Lexicon:
    """A set of known words; words of a translation that are neither known nor in its source are torn."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words = {word for line in lines for word in words_of(line)}

    def torn(self, translation: str, source: str) -> list[str]:
        """Return the torn words of a translation."""
        given = words_of(source)
        return [word for word in words_of(translation) if word not in self._words and word not in given]
