"""Word alignments: which source word each target word translates.

A link is a pair (source position, target position), both 1-based; the links of a sentence are a set. The parsers below
convert all file formats (0- or 1-based, either side first, sure and possible links) to this form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TypeVar

from simulmt.errors import ConfigError, DataError

Link = tuple[int, int]
T = TypeVar("T")

_LINK = re.compile(r"([0-9]+)([-p?])([0-9]+)")


def anticipation_rate(
    sentences: Iterable[Iterable[Link]], k: int, lengths: Iterable[tuple[int, int]] | None = None
) -> float:
    """Return the k-anticipation rate of a corpus: the share of links (i, j) with i - k + 1 > j; 0.0 without links.

    With delay k, target word j is due once source word j + k - 1 has been read, so these are the words that must be
    guessed. A target shorter than its source counts as anticipating even without reordering. Given the (source, target)
    `lengths` of every sentence, target positions are scaled to the source length, j to round(j * |x| / |y|), which
    leaves only reordering.
    """
    if k < 1:
        raise ConfigError(f"k = {k}: the delay of an anticipation rate counts source words, from 1")
    scales = repeat((1, 1)) if lengths is None else lengths
    anticipated = [
        i - k + 1 > round(j * source / target)
        for links, (source, target) in zip(sentences, scales, strict=False)
        for i, j in set(links)
    ]
    return sum(anticipated) / len(anticipated) if anticipated else 0.0


def reorder_target(words: Sequence[T], links: Iterable[Link]) -> list[T]:
    """Sort target words stably by the source position they translate.

    A word with several links is sorted by the last one, since it can be written only after all its source words have
    been read. An unaligned word moves with the word before it; unaligned words at the beginning stay there.
    """
    needed = [0] * len(words)
    for i, j in links:
        if i < 1 or not 1 <= j <= len(words):
            raise DataError(f"link ({i}, {j}) does not fit a target of {len(words)} words, counted from 1")
        needed[j - 1] = max(needed[j - 1], i)
    for j in range(1, len(words)):
        needed[j] = needed[j] or needed[j - 1]
    return [words[j] for j in sorted(range(len(words)), key=needed.__getitem__)]


def alignment_error_rate(
    predicted: Iterable[Iterable[Link]], gold: Iterable[tuple[Iterable[Link], Iterable[Link]]]
) -> float:
    """Return the AER, 1 - (|A & S| + |A & P|) / (|A| + |S|), with S a subset of P; 0.0 if A and S are empty.

    Counts are summed over the sentences of a corpus; `gold` holds the (sure, possible) links of each.
    """
    predicted, gold = list(predicted), list(gold)
    if len(predicted) != len(gold):
        raise DataError(f"expected {len(gold)} alignments, one per gold alignment, got {len(predicted)}")
    hits = total = 0
    for links, (sure, possible) in zip(predicted, gold, strict=True):
        A, S = set(links), set(sure)
        hits += len(A & S) + len(A & S.union(possible))
        total += len(A) + len(S)
    return 1 - hits / total if total else 0.0


def parse_pharaoh(line: str) -> set[Link]:
    """Parse a line such as "0-0 1-2", with 0-based positions."""
    links = set()
    for token in line.split():
        link, kind = _parse_link(token, base=0)
        if kind != "-":
            raise DataError(f"alignment link '{token}': a possible link, but only sure links (i-j) fit here")
        links.add(link)
    return links


def format_pharaoh(links: Iterable[Link]) -> str:
    """Format links as one line, sorted and 0-based."""
    return " ".join(f"{i - 1}-{j - 1}" for i, j in sorted(set(links)))


def parse_gold(line: str, base: int = 1, swapped: bool = False) -> tuple[set[Link], set[Link]]:
    """Parse a gold line into (sure, possible) links: i-j is sure, ipj or i?j only possible.

    Sure links are possible, too. `swapped` is for files with the target position first.
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
    """Parse a file line by line; errors name file and line."""
    try:
        # Invalid bytes become a token that no parser accepts, so they are reported with their line.
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
