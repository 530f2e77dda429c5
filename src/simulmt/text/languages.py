"""Language identification for English, German and Chinese."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from simulmt.text.words import HAN

_SAMPLE = 1000  # lines
_MIN_COMMON_SHARE = 0.05  # of all words
_IDEOGRAPH = re.compile(f"[{HAN}]")
_WORD = re.compile(r"[^\W\d_]+")
_KANA = re.compile("[ぁ-ヿ]")
_COMMON_WORDS = {
    "en": re.compile(r"\b(?:the|of|and|to|is|that|it|you|was|for|are|this|with|have|not|what)\b"),
    "de": re.compile(r"\b(?:der|die|das|und|ist|nicht|ein|eine|ich|sie|zu|den|mit|es|wir|auf|für)\b"),
}


def guess_language(lines: Iterable[str]) -> str:
    """Return the language code of a text: en, de or zh, or an empty string for any other."""
    text = "\n".join(islice(lines, _SAMPLE)).lower()
    words = len(_WORD.findall(text))
    ideographs = len(_IDEOGRAPH.findall(text))
    if ideographs > words / 2 and len(_KANA.findall(text)) < ideographs / 20:
        return "zh"
    counts = {language: len(common.findall(text)) for language, common in _COMMON_WORDS.items()}
    likeliest = max(counts, key=lambda language: counts[language])
    return likeliest if counts[likeliest] > _MIN_COMMON_SHARE * words else ""
