"""Leave out sentence pairs whose translation is wrong in a way that shows: other numbers, or words in a loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.text.languages import guess_language
from simulmt.text.numbers import find_numbers, unmatched
from simulmt.text.words import HAN
from simulmt.train.shards import Job, Left, Progress, Rewritten, rewrite

NUMBERS, REPEATS = "numbers", "repeats"  # why a pair is left out
LONGEST_PHRASE = 12  # words or ideographs of a phrase that is looked for in a row
LONG_PHRASE = 4  # of one that is never written twice in a row on purpose; shorter ones may be, as in "very, very"

_UNIT = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")
_ONE = frozenset({Fraction(1)})  # often an article of the other language


def filter_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    languages: tuple[str, str] | None = None,
    overwrite: bool = False,
    report: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """Keep the pairs whose numbers agree and whose target does not repeat itself; languages not given are guessed."""
    languages = languages or (guess_language(read_lines(source)), guess_language(read_lines(target)))
    inputs = {"source": file_sha256(source), "target": file_sha256(target)}
    facts = {"rewrite": "filter", "settings": {"languages": [*languages]}, "inputs": inputs}
    job = Job(prefix, facts, [source, target], overwrite)

    def judge(pairs: Sequence[Pair]) -> list[Rewritten]:
        return [_judge(pair, languages) for pair in pairs]

    return rewrite(job, ParallelFiles(source, target).pairs, judge, report)


def _judge(pair: Pair, languages: tuple[str, str]) -> Rewritten:
    if repeats_itself(pair.target, pair.source):
        return Left(REPEATS, pair.line)
    if numbers_disagree(pair.source, pair.target, languages):
        return Left(NUMBERS, pair.line)
    return pair.source, pair.target


def numbers_disagree(source: str, target: str, languages: tuple[str, str]) -> bool:
    """Whether one side has a number, by value, that the other does not have."""
    there, here = find_numbers(source, languages[0]), find_numbers(target, languages[1])
    return any(number.values != _ONE for number in (*unmatched(there, here), *unmatched(here, there)))


def repeats_itself(target: str, source: str) -> bool:
    """Whether a phrase of the target stands more often in a row than any of the source."""
    return most_in_a_row(_UNIT.findall(target.lower())) > most_in_a_row(_UNIT.findall(source.lower()))


def most_in_a_row(words: Sequence[str]) -> int:
    """How often a phrase is written in a row, at most; twice counts for a long phrase only."""
    most = 1
    for length in range(1, min(LONGEST_PHRASE, len(words) // 2) + 1):
        same = 0
        for word, later in zip(words, islice(words, length, None)):  # noqa: B905 (the second is shorter)
            same = same + 1 if word == later else 0
            times = same // length + 1
            if times > (1 if length >= LONG_PHRASE else 2):
                most = max(most, times)
    return most
