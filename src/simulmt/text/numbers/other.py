"""Figures in a language whose numbers are not known: neither its words nor what its point and comma mean."""

from __future__ import annotations

import re

from simulmt.text.numbers.composing import Vague

VAGUE: Vague = {}
VAGUE_WORD = re.compile(r"(?!)")


def in_figures(text: str) -> str:
    """The text with 3,000 and 3.000 as 3000, and 1,5 as 1.5."""
    text = re.sub(r"(?<=\d)[.,](?=\d{3}(?!\d))", "", text)
    return re.sub(r"(?<=\d),(?=\d)", ".", text)
