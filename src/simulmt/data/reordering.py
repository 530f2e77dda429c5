"""Reorder target words to follow the source words they translate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulmt.data import alignment
from simulmt.data.alignment import Link, UnitChoice, alignment_words, find_unit
from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines, writing
from simulmt.data.derived import (
    EMPTY,
    OUTPUT_SUFFIXES,
    Dropped,
    Job,
    Report,
    Rewritten,
    exclusive_lock,
    refuse_to_overwrite_inputs,
    write_once,
    write_pairs,
)
from simulmt.text.words import Unit, is_spaceless


def align_and_reorder(
    source: Path,
    target: Path,
    prefix: Path,
    *,
    links: Path | None = None,
    units: tuple[UnitChoice, UnitChoice] = ("auto", "auto"),
    cut_chinese: bool = False,
    overwrite: bool = False,
    report: Report = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Reorder a corpus, aligning it with eflomal first unless `links` are given.

    Links are saved as PREFIX.links, since eflomal is not deterministic. `cut_chinese` segments the target into words,
    saved as PREFIX.words.
    """
    refuse_to_overwrite_inputs(prefix, (source, target), (*OUTPUT_SUFFIXES, "words", "links"))
    with writing(prefix), exclusive_lock(prefix):
        if cut_chinese:
            target = _segment_target(target, prefix.with_name(f"{prefix.name}.words"), overwrite)
            units = units[0], "word"
        found = find_unit(source, units[0]), find_unit(target, units[1])
        aligned = links or _align(source, target, found, prefix.with_name(f"{prefix.name}.links"), overwrite, log)
    return reorder_corpus(source, target, aligned, prefix, found, overwrite, report)


def _segment_target(target: Path, words: Path, overwrite: bool) -> Path:
    metadata = {"target": file_sha256(target)}
    return write_once(words, metadata, overwrite, lambda: map(" ".join, alignment.cut_chinese(read_lines(target))))


def _align(
    source: Path, target: Path, units: tuple[Unit, Unit], links: Path, overwrite: bool, log: Callable[[str], None]
) -> Path:
    def align() -> Iterator[str]:
        log(f"{links}: aligning with eflomal ...")
        words = alignment.read_word_pairs(source, target, units)
        return map(alignment.format_pharaoh, alignment.align_with_eflomal(words))

    metadata = {"source": file_sha256(source), "target": file_sha256(target), "units": [*units]}
    return write_once(links, metadata, overwrite, align)


def reorder_corpus(
    source: Path,
    target: Path,
    links: Path,
    prefix: Path,
    units: tuple[Unit, Unit] = ("word", "word"),
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Reorder a corpus with the given alignments.

    `links` holds 0-based Pharaoh alignments of units: "word" for space-separated words, or "char" for text without
    spaces, where each ideograph is a unit. To keep Chinese words together, segment the text first.
    """
    inputs = {"source": source, "target": target, "links": links}
    job = Job.on_files(prefix, "reorder", {"units": list(units)}, inputs, overwrite)

    def reordered() -> Iterator[Rewritten]:
        alignments = alignment.read_alignments(links, alignment.parse_pharaoh)
        pairs = ParallelFiles(source, target).pairs_with(links, alignments)
        return (_reorder(pair, aligned, links, units) for pair, aligned in pairs)

    return write_pairs(job, reordered, report)


def _reorder(pair: Pair, links: set[Link], path: Path, units: tuple[Unit, Unit]) -> Rewritten:
    source, target = alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1])
    if not source or not target:
        return Dropped(EMPTY)
    alignment.check_links(path, pair.line, links, (source, target))
    order = alignment.reorder_target(range(len(target)), links)
    return pair.source, _write_units(target, order, pair.target)


def _write_units(units: Sequence[str], order: Sequence[int], text: str) -> str:
    """Join reordered units with spaces as in running text.

    Ideographs are joined without a space, other characters with one; between the two there is a space if the original
    text has one on that side.
    """
    spaces = _spaces(units, text)
    written = units[order[0]]
    for left, right in pairwise(order):
        ideographs = is_spaceless(units[left][-1]), is_spaceless(units[right][0])
        if ideographs[0] == ideographs[1]:
            spaced = not ideographs[0]
        else:
            spaced = spaces[right] if ideographs[0] else spaces[left + 1]
        written += f" {units[right]}" if spaced else units[right]
    return written


def _spaces(units: Sequence[str], text: str) -> list[bool]:
    """Return whether white space precedes each unit; ends with False."""
    spaces, end = [], 0
    for unit in units:
        start = text.index(unit, end)
        spaces.append(0 < end < start)
        end = start + len(unit)
    return [*spaces, False]
