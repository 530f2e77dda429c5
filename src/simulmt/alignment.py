"""Word alignments: which source word each target word translates.

A link is a pair (source position, target position), both counted from 1. The links of a sentence are a set:
order and repetition mean nothing. In memory there is this one form; the spellings found in files (counted
from 0 or from 1, either side first, sure and possible links) end at the parsers below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from simulmt.errors import ConfigError, DataError

Link = tuple[int, int]
T = TypeVar("T")

_LINK = re.compile(r"([0-9]+)([-p?])([0-9]+)")


def anticipation_rate(links: Iterable[Link], k: int) -> float:
    """The k-anticipation rate: the share of links (i, j) with i - k + 1 > j, 0.0 if there are no links.

    Under a delay of k, target word j is due once source word j + k - 1 was read, so these are the links
    whose source word must be guessed.
    """
    return corpus_anticipation_rate([links], k)


def corpus_anticipation_rate(sentences: Iterable[Iterable[Link]], k: int) -> float:
    """The k-anticipation rate over all links of a corpus, every link weighing the same."""
    if k < 1:
        raise ConfigError(f"k = {k}: the delay of an anticipation rate counts source words, from 1")
    anticipated = [i - k + 1 > j for i, j in chain.from_iterable(map(set, sentences))]
    return sum(anticipated) / len(anticipated) if anticipated else 0.0


def reorder_target(words: Sequence[T], links: Iterable[Link]) -> list[T]:
    """The target words, stably sorted by the source position they translate.

    A word with several links goes by the last of them: it can be written only when all of its source words
    were read, so no other choice frees the result of anticipation. An unaligned word moves with the word
    before it; unaligned words at the very beginning stay there.
    """
    needed = [0] * len(words)
    for i, j in links:
        if i < 1 or not 1 <= j <= len(words):
            raise DataError(f"link ({i}, {j}) does not fit a target of {len(words)} words, counted from 1")
        needed[j - 1] = max(needed[j - 1], i)
    for j in range(1, len(words)):
        needed[j] = needed[j] or needed[j - 1]
    return [words[j] for j in sorted(range(len(words)), key=needed.__getitem__)]


def alignment_error_rate(predicted: Iterable[Link], sure: Iterable[Link], possible: Iterable[Link]) -> float:
    """AER: 1 - (|A & S| + |A & P|) / (|A| + |S|), sure links being possible too; 0.0 if A and S are empty."""
    return corpus_alignment_error_rate([predicted], [(sure, possible)])


def corpus_alignment_error_rate(
    predicted: Iterable[Iterable[Link]], gold: Iterable[tuple[Iterable[Link], Iterable[Link]]]
) -> float:
    """AER over a corpus, counts summed over its sentences; `gold` holds (sure, possible) for each sentence."""
    predicted, gold = list(predicted), list(gold)
    if len(predicted) != len(gold):
        raise DataError(f"{len(predicted)} predicted alignments cannot be held to {len(gold)} gold alignments")
    hits = total = 0
    for links, (sure, possible) in zip(predicted, gold, strict=True):
        A, S = set(links), set(sure)
        hits += len(A & S) + len(A & S.union(possible))
        total += len(A) + len(S)
    return 1 - hits / total if total else 0.0


def parse_pharaoh(line: str, base: int = 0) -> set[Link]:
    """The links of a line such as "0-0 1-2", whose positions count from `base`."""
    links = set()
    for token in line.split():
        link, kind = _parse_link(token, base)
        if kind != "-":
            raise DataError(f"alignment link '{token}': a possible link, but only sure links (i-j) fit here")
        links.add(link)
    return links


def format_pharaoh(links: Iterable[Link]) -> str:
    """The links as one line, counted from 0 and in order: what `parse_pharaoh` reads."""
    return " ".join(f"{i - 1}-{j - 1}" for i, j in sorted(set(links)))


def parse_gold(line: str, base: int = 1, swapped: bool = False) -> tuple[set[Link], set[Link]]:
    """The (sure, possible) links of a hand-aligned line: i-j is sure, ipj or i?j is possible only.

    Every sure link is among the possible ones. `swapped` is for files that name the target position first.
    """
    sure, possible = set(), set()
    for token in line.split():
        (i, j), kind = _parse_link(token, base)
        link = (j, i) if swapped else (i, j)
        possible.add(link)
        if kind == "-":
            sure.add(link)
    return sure, possible


def read_alignments(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """Parse a file line by line; an error names the file and the line."""
    try:
        # Bytes that are not text become a token that no parser accepts, so they are reported with their line.
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield parse(line)
                except DataError as error:
                    raise DataError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_link(token: str, base: int) -> tuple[Link, str]:
    match = _LINK.fullmatch(token)
    if match is None:
        raise DataError(f"alignment link '{token}': expected i-j (or ipj, i?j in gold files), as in 3-4")
    i, j = int(match[1]) - base + 1, int(match[3]) - base + 1
    if i < 1 or j < 1:
        raise DataError(f"alignment link '{token}': positions of this file count from {base}")
    return (i, j), match[2]
