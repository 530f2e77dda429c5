"""Negation detection by word lists."""

from __future__ import annotations

import re
from typing import NamedTuple


class _Markers(NamedTuple):
    """Negation words, idioms that contain one but do not negate, and indirect negations (unable, 难以)."""

    plain: re.Pattern[str]
    apparent: re.Pattern[str]
    indirect: re.Pattern[str]


_MARKERS = {
    "en": _Markers(
        plain=re.compile(
            r"\b(?:not|never|no|none|nobody|nothing|nowhere|neither|nor|cannot|without|no-one)\b|n['’]t\b"
            r"|\b(?:dont|doesnt|didnt|isnt|arent|wasnt|werent|cant|wont|couldnt|shouldnt|wouldnt|havent|hasnt)\b"
        ),
        apparent=re.compile(
            r"\bnot (?:only|just|until|least)\b|\bor not\b|\bno (?:doubt|matter|later|longer than|less|fewer|sooner)\b"
            r"|\bnothing but\b|\bwhy (?:not|don['’]t (?:you|we))\b|\bnever ?mind\b|\bno\.(?= ?\d)|^no(?=[,.!])"
            r"|, \w+n['’]t (?:it|you|he|she|we|they|i|there)\?"
        ),
        indirect=re.compile(
            r"\b(?:unable|unlikely|unsafe|unclear|unknown|unnecessary|unsuitable|unaware|impossible|incapable|hardly|barely"
            r"|fail\w*|lack\w*|refus\w*|out of)\b"
        ),
    ),
    "de": _Markers(
        plain=re.compile(
            r"\b(?:nicht|nie|niemals|nichts|niemand\w{0,2}|kein\w{0,2}|keinesfalls|weder|nirgend\w*|ohne)\b"
        ),
        apparent=re.compile(
            r"\bnicht (?:nur|zuletzt)\b|\boder nicht\b|\bwarum nicht\b|\bohne(?:hin| weiteres)\b|, nicht wahr"
        ),
        indirect=re.compile(r"\b(?:un(?:möglich|fähig|klar|bekannt|nötig)|kaum|fehl\w*|verweiger\w*|weiger\w*)\b"),
    ),
    "zh": _Markers(
        plain=re.compile(
            r"[不没無无未莫勿]|非(?![洲常])|(?:^|[，。！？；、请你您们就也都可万])别(?![人的墅名])|别[忘再担着怕让把动碰哭走跑太管想急]"
        ),
        apparent=re.compile(
            r"(.)[不没]\1|有没有|不[同错久断过仅但只管论少禁单止免足]|不到(?=[\d一二三四五六七八九十半])|无论|无疑|不好意思|对不起|差不多|了不起|(?<!从)未来|未必不|说不定"
            r"|不得不|不由得|不客气|没关系|毫不|无非|不是吗|好不好|要不然|要不是"
        ),
        indirect=re.compile(r"难以|很难|禁止|拒绝|缺乏|缺少|以免|避免|否认"),
    ),
}


def is_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word; always False for languages other than en, de and zh."""
    if language not in _MARKERS:
        return False
    markers = _MARKERS[language]
    return markers.plain.search(markers.apparent.sub(" ", text.casefold())) is not None


def may_be_negated(text: str, language: str) -> bool:
    """Return whether a sentence contains a negation word or an indirect negation (unable, 难以)."""
    if language not in _MARKERS:
        return False
    return is_negated(text, language) or _MARKERS[language].indirect.search(text.casefold()) is not None
