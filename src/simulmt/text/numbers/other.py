"""Normalise digits in other languages, whose number words and decimal separators are unknown."""

from __future__ import annotations

import re

from simulmt.text.numbers.composing import Ambiguous

AMBIGUOUS: Ambiguous = {}
AMBIGUOUS_WORD = re.compile(r"(?!)")


def to_digits(text: str) -> str:
    """Convert 3,000 and 3.000 to 3000, and 1,5 to 1.5."""
    text = re.sub(r"(?<=\d)[.,](?=\d{3}(?!\d))", "", text)
    return re.sub(r"(?<=\d),(?=\d)", ".", text)
