"""Split text into words and sentences, and identify its language; no other module lists Unicode ranges.

Sentence boundaries are found without look-ahead, because a live translation must not wait for the next word. When in
doubt, the sentence continues: a missed boundary costs some delay, a wrong one splits a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, islice
from typing import Literal
from unicodedata import category, normalize

Unit = Literal["word", "char"]  # unit of text length: space-separated words, or characters

MAX_WORD_LENGTH = 128  # longer runs are cut, so that a stream without spaces stays bounded

# Character ranges for use inside the brackets of a regular expression.
HAN = "\u3400-\u4dbf\u4e00-\u9fff"
RARE_HAN = "\uf900-\ufaff\U00020000-\U0003ffff"  # compatibility ideographs and the supplementary planes
KANA = "\u3001-\u30ff"  # with the punctuation before it, and the ideographic full stop
FULL_WIDTH_PUNCTUATION = "\uff01-\uff0f\uff1a-\uff20"
SPACELESS = f"{KANA}{HAN}{RARE_HAN}{FULL_WIDTH_PUNCTUATION}"  # written without spaces: each character is a word
# Whitespace, and lone surrogates from broken input, which cannot be encoded.
_GAP = r"\s\ud800-\udfff"

_RUN = re.compile(rf"[^{_GAP}]+")
_WORD = re.compile(rf"[{SPACELESS}]|[^{_GAP}{SPACELESS}]{{1,{MAX_WORD_LENGTH}}}")
_OPEN_WORD = re.compile(rf"[^{_GAP}{SPACELESS}]\Z")
_IS_SPACELESS = re.compile(f"[{SPACELESS}]")

# Characters that vocabularies lack, and what they know instead.
_REPLACED = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2212\u207b", "-")  # hyphen, no-break hyphen, minus, superscript minus
    | {"\u2236": ":", "\u2044": "/", "\u2215": "/"}  # ratio, fraction slash, division slash
    | dict.fromkeys("\u00ad\u200d\u2060\ufe0e\ufe0f🏻🏼🏽🏾🏿")  # soft hyphen, joiners, variants of emoji
)
_POWER = re.compile("(?<=[0-9])(?=[\u207b⁰¹²³⁴-⁹])")
_DECIMAL_FRACTIONS = {"½": ".5", "¼": ".25", "¾": ".75"}
_FRACTION = re.compile("(?P<whole>[0-9]?)(?P<fraction>[¼-¾⅐-⅞↉])")

SENTENCE_ENDS = ".!?…。！？｡؟।॥۔"
CLOSING = "\"'”’»›)]}」』）】》〉"  # may follow the end of a sentence
_CLAUSE_ENDS = (*SENTENCE_ENDS, *",;:–—，、；：،؛")  # marks that may end a clause
_OPENING = "\"'“‘„«‹([{「『（【《〈¿¡"
_ENDING = re.compile(rf"([{SENTENCE_ENDS}]+)[{re.escape(CLOSING)}]*\Z")
_INITIALS = re.compile(r"(?:\w\.)*[^\W\d_]")  # J. or U.S. or z.B.

# fmt: off
_COMMON = {"dr", "prof", "st", "etc", "vs", "nr", "tel", "ca", "jan", "feb", "aug", "sept", "oct", "okt", "nov"}
_ABBREVIATIONS = {
    "en": _COMMON | {
        "mr", "mrs", "ms", "jr", "sr", "inc", "ltd", "corp", "gen", "sen", "rep", "gov", "capt", "lt", "col", "sgt",
        "rev", "approx", "dept", "apr", "dec", "incl", "excl", "fig",
    },
    "de": _COMMON | {
        "hr", "fr", "bzw", "usw", "inkl", "evtl", "ggf", "vgl", "bd", "str", "mio", "mrd", "geb", "gest", "abs", "sog",
        "bspw", "dez",
    },
}
# fmt: on
# Languages that write "the 3rd" as "3."
_ORDINAL_DOT = {"cs", "da", "de", "et", "fi", "hr", "hu", "is", "lv", "nb", "no", "pl", "sk", "sl", "sr", "tr"}

_SAMPLE = 1000  # lines
_MIN_COMMON_SHARE = 0.05  # of all words
_COMMON_WORDS = {
    "en": re.compile(r"\b(?:the|of|and|to|is|that|it|you|was|for|are|this|with|have|not|what)\b"),
    "de": re.compile(r"\b(?:der|die|das|und|ist|nicht|ein|eine|ich|sie|zu|den|mit|es|wir|auf|für)\b"),
}


class WordSplitter:
    """Splits a stream of text into words, independent of its chunks."""

    def __init__(self) -> None:
        self._open = ""

    def push(self, text: str) -> list[str]:
        """Return the words completed by `text`; keep an unfinished last word."""
        text = self._open + text
        words = _WORD.findall(text)
        is_open = _OPEN_WORD.search(text) and len(words[-1]) < MAX_WORD_LENGTH
        self._open = words.pop() if is_open else ""
        return words

    def flush(self) -> list[str]:
        """Return the unfinished word, if any."""
        words, self._open = [self._open] if self._open else [], ""
        return words


def split_words(text: str) -> list[str]:
    """Split text at whitespace, around ideographs, and after MAX_WORD_LENGTH characters."""
    return _WORD.findall(text)


def collapse_spaces(text: str) -> str:
    """Replace each run of whitespace with one space, and strip both ends."""
    return " ".join(_RUN.findall(text))


def canonicalize(word: str) -> str:
    """Write a word in characters that vocabularies know, without changing its numbers.

    Unicode normalisation alone would turn 2½ into 21/2, and 10⁶ into 106.
    """
    return _FRACTION.sub(_write_fraction, _POWER.sub("^", word)).translate(_REPLACED)


def _write_fraction(match: re.Match[str]) -> str:
    """Write 2½ as 2.5, 2⅓ as 2 1/3 and ½ as 1/2."""
    whole, fraction = match["whole"], match["fraction"]
    if whole and fraction in _DECIMAL_FRACTIONS:
        return whole + _DECIMAL_FRACTIONS[fraction]
    return f"{whole} {normalize('NFKC', fraction)}".lstrip()


def is_spaceless(character: str) -> bool:
    """Return whether a character belongs to a script written without spaces."""
    return _IS_SPACELESS.match(character) is not None


def combining_marks() -> str:
    """Return all combining marks, accents and vowel signs, for use inside the brackets of a regular expression."""
    ranges = (range(0x300, 0x20000), range(0xE0100, 0xE01F0))  # there are none elsewhere
    return "".join(character for character in map(chr, chain(*ranges)) if category(character).startswith("M"))


def ends_sentence(word: str, language: str, is_first: bool = False) -> bool:
    """Return whether `word` ends a sentence in `language`; `is_first` means that it also begins it."""
    ending = _ENDING.search(word)
    if ending is None:
        return False
    return ending[1] != "." or _is_full_stop(word[: ending.start()].lstrip(_OPENING), language, is_first)


def ends_clause(word: str) -> bool:
    """Return whether `word` ends with a mark that may end a clause or sentence, even that of an abbreviation."""
    return word.rstrip(CLOSING).endswith(_CLAUSE_ENDS)


def _is_full_stop(stem: str, language: str, is_first: bool) -> bool:
    """Return whether the full stop after `stem` ends a sentence, rather than marking an abbreviation or ordinal."""
    if stem.isdigit():
        return not is_first and not (language in _ORDINAL_DOT and len(stem) <= 2)
    if _INITIALS.fullmatch(stem):
        return False
    return stem.lower() not in _ABBREVIATIONS.get(language, _COMMON)


def script_unit(lines: Iterable[str]) -> Unit:
    """Return the unit of a text's script: characters if most of it is written without spaces, even if segmented."""
    words = [word for line in islice(lines, _SAMPLE) for word in split_words(line)]
    return "char" if sum(map(is_spaceless, words)) > len(words) / 2 else "word"


def guess_language(lines: Iterable[str]) -> str:
    """Return the language code of a text: en, de or zh, or an empty string for any other."""
    text = "\n".join(islice(lines, _SAMPLE)).lower()
    words = len(re.findall(r"[^\W\d_]+", text))
    ideographs = len(re.findall(f"[{HAN}]", text))
    if ideographs > words / 2 and len(re.findall("[ぁ-ヿ]", text)) < ideographs / 20:
        return "zh"
    counts = {language: len(common.findall(text)) for language, common in _COMMON_WORDS.items()}
    likeliest = max(counts, key=lambda language: counts[language])
    return likeliest if counts[likeliest] > _MIN_COMMON_SHARE * words else ""
