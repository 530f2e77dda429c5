"""Flaws of a translation that can be counted without knowing the right one: words written twice, and torn words.

Models whose words do not know of each other make both: neighbours write the same word, or each a part of another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from simulmt.eval.results import Unit

_TWICE = re.compile(r"(?=([\u3400-\u4dbf\u4e00-\u9fff]{1,2})\1)")  # overlaps count, so three in a row count twice
_WORD = re.compile(r"[^\W\d_\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+(?:['’-][^\W\d_\u3001-\u9fff]+)*")


def written_twice(text: str, unit: Unit) -> int:
    """How often a word stands twice in a row or, in text counted in characters, one ideograph or two of them."""
    if unit == "char":
        return len(_TWICE.findall(text))
    return sum(one == other and one.isalpha() for one, other in pairwise(text.lower().split()))


def words_of(text: str) -> list[str]:
    """Words in letters, lower-cased: no numbers, no punctuation, no ideographs, whose words cannot be torn visibly."""
    return _WORD.findall(text.lower())


class Lexicon:
    """Words that are known; words of a translation that are neither known nor in its source are torn."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._words = {word for line in lines for word in words_of(line)}

    def torn(self, translation: str, source: str) -> list[str]:
        """The torn words of a translation."""
        given = words_of(source)
        return [word for word in words_of(translation) if word not in self._words and word not in given]
