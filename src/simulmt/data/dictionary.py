"""Turn a bilingual dictionary in the format of Ding into sentence pairs.

A line has senses and their forms in the same order on both sides; alternatives are separated by semicolons:

    Spülmaschine {f}; Geschirrspüler {m} | Spülmaschinen {pl} :: dishwasher | dishwashers

Corpora lack many everyday words. The Debian package trans-de-en has 200,000 such lines, German and English.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def dictionary_corpus(
    dictionary: Path, prefix: Path, overwrite: bool = False, report: Report = lambda _: None
) -> dict[str, Any]:
    """Write each word or phrase of the first language with its first translation; German nouns also with article."""
    job = Job.on_files(prefix, "dictionary", {}, {"dictionary": dictionary}, overwrite)

    def entries() -> Iterator[Rewritten]:
        for number, line in enumerate(read_lines(dictionary), start=1):
            if line.startswith(_COMMENT) or not line.strip():
                continue
            yield from read_entry(line, dictionary, number)

    return write_pairs(job, entries, report)


def read_entry(line: str, path: Path, number: int) -> list[Rewritten]:
    """Return the pairs of a line; raise DataError if it does not have two sides."""
    sides = line.split(_SIDES)
    if len(sides) != 2:
        raise DataError(f"{path}, line {number}: expected SOURCE :: TARGET, got {line[:60]!r}")
    sources, targets = (side.split(_SENSES) for side in sides)
    if len(sources) != len(targets):
        return [Dropped(_UNPARALLEL, number)]
    pairs = [pair for sense in zip(sources, targets, strict=True) for pair in _pairs(*sense)]
    return [*dict.fromkeys(pairs)] or [Dropped(EMPTY, number)]  # only remarks, or variants within a phrase


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
