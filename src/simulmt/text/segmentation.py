"""Sentence segmentation, word by word, independent of how the text was split into chunks.

The decision is made when a word is complete, without look-ahead, because a live translation must not wait for the next
word. In doubt the sentence continues: a missed boundary costs some delay, a wrong one splits a sentence.
"""

from __future__ import annotations

import re

SENTENCE_ENDS = ".!?…。！？｡؟।॥۔"
CLOSING = "\"'”’»›)]}」』）】》〉"  # may follow the end of a sentence
_OPENING = "\"'“‘„«‹([{「『（【《〈¿¡"
_ENDING = re.compile(rf"([{SENTENCE_ENDS}]+)[{re.escape(CLOSING)}]*\Z")
_INITIALS = re.compile(r"(?:\w\.)*[^\W\d_]")  # J. or U.S. or z.B.

# fmt: off
_COMMON = {"dr", "prof", "st", "etc", "vs", "nr", "tel", "ca", "jan", "feb", "aug", "sept", "oct", "okt", "nov"}
_ABBREVIATIONS = {
    "en": _COMMON | {
        "mr", "mrs", "ms", "jr", "sr", "inc", "ltd", "corp", "gen", "sen", "rep", "gov", "capt", "lt", "col", "sgt",
        "rev", "approx", "dept", "apr", "dec",
    },
    "de": _COMMON | {
        "hr", "fr", "bzw", "usw", "inkl", "evtl", "ggf", "vgl", "bd", "str", "mio", "mrd", "geb", "gest", "abs", "sog",
        "bspw", "dez",
    },
}
# fmt: on
# Languages that write "the 3rd" as "3."
_ORDINAL_DOT = {"cs", "da", "de", "et", "fi", "hr", "hu", "is", "lv", "nb", "no", "pl", "sk", "sl", "sr", "tr"}


def ends_sentence(word: str, language: str, is_first: bool = False) -> bool:
    """Return whether `word` ends a sentence in `language`; `is_first` means that it also begins it."""
    ending = _ENDING.search(word)
    if ending is None:
        return False
    return ending[1] != "." or _is_full_stop(word[: ending.start()].lstrip(_OPENING), language, is_first)


def _is_full_stop(stem: str, language: str, is_first: bool) -> bool:
    """Return whether the full stop after `stem` ends a sentence, rather than marking an abbreviation or ordinal."""
    if stem.isdigit():
        return not is_first and not (language in _ORDINAL_DOT and len(stem) <= 2)
    if _INITIALS.fullmatch(stem):
        return False
    return stem.lower() not in _ABBREVIATIONS.get(language, _COMMON)
