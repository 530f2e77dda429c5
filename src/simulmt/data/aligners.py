"""Word aligners: eflomal, awesome-align, alignment files.

Alignments link units: space-separated words or, in text written without spaces, single ideographs and whole Latin
words. Tokenised text keeps its tokenisation, which gold alignments refer to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from unicodedata import category

from simulmt.data.alignment import Link, parse_gold, parse_pharaoh, read_alignments
from simulmt.data.corpus import ParallelFiles, read_lines, read_sentences
from simulmt.errors import ConfigError, DataError, SimulmtError, needs_extra
from simulmt.text import split_words
from simulmt.text.words import Unit

Words = Sequence[str]
WordPair = tuple[Words, Words]
Gold = tuple[set[Link], set[Link]]  # sure and possible links
UnitChoice = Unit | Literal["auto"]

SAMPLE_LINES = 10_000  # lines read to detect text without spaces
MAX_MEAN_WORD_LENGTH = 4.0  # ideographs; a larger mean means that the text is not segmented


def alignment_words(text: str, unit: Unit) -> list[str]:
    """Split a line into the units of an alignment: words, or ideographs and whole Latin words."""
    return split_words(text) if unit == "char" else text.split()


def guess_unit(lines: Iterable[str]) -> Unit:
    """Guess the unit of a text: characters if its runs of ideographs are too long to be words."""
    sizes = (len(split_words(word)) for line in islice(lines, SAMPLE_LINES) for word in line.split())
    runs = [size for size in sizes if size > 1]
    return "char" if sum(runs) > MAX_MEAN_WORD_LENGTH * len(runs) else "word"


def find_unit(path: Path, choice: UnitChoice = "auto") -> Unit:
    """Return the unit that was chosen for a file, or guess it."""
    return guess_unit(read_sentences(path)) if choice == "auto" else choice


def read_word_pairs(source: Path, target: Path, units: Sequence[Unit]) -> list[WordPair]:
    """Read parallel files as pairs of words."""
    return [
        (alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1]))
        for pair in ParallelFiles(source, target).pairs()
    ]


def cut_chinese(lines: Iterable[str]) -> Iterator[list[str]]:
    """Segment Chinese lines into words with jieba, keeping existing spaces."""
    with needs_extra("Chinese word segmentation", "align"):
        import jieba  # type: ignore[import-untyped, unused-ignore]
    jieba.setLogLevel("ERROR")  # type: ignore[no-untyped-call]
    for line in lines:
        yield [word for word in jieba.cut(line) if word.strip()]  # type: ignore[no-untyped-call]


def align(
    choice: str, pairs: Sequence[WordPair], more: Iterable[WordPair] = (), priors: Path | None = None
) -> list[set[Link]]:
    """Align with `eflomal`, `awesome:MODEL` or the links in `pharaoh:FILE`; `more` and `priors` are for eflomal."""
    kind, _, where = choice.partition(":")
    if choice == "eflomal":
        return align_with_eflomal(pairs, more, priors)
    if kind == "pharaoh" and where:
        return read_pharaoh(Path(where), pairs)
    if kind == "awesome" and where:
        return align_with_awesome(pairs, Path(where))
    raise ConfigError(f"--aligner {choice}: expected eflomal, pharaoh:FILE, awesome:MODEL, asn:RUN or identity:RUN")


def align_with_eflomal(
    pairs: Sequence[WordPair], more: Iterable[WordPair] = (), priors: Path | None = None
) -> list[set[Link]]:
    """Align with eflomal and symmetrise; `more` text or `priors` improve the alignments of a small set.

    eflomal seeds its own sampler, so two runs differ in some links; write links to a file to reuse them.
    """
    with needs_extra("word alignment with eflomal", "align"):
        from eflomal import Aligner
    everything = [*pairs, *more]
    if not everything:
        return []
    sources, targets = ([" ".join(map(_strip_punctuation, pair[side])) for pair in everything] for side in (0, 1))
    with TemporaryDirectory() as directory:
        forward, reverse = Path(directory, "forward"), Path(directory, "reverse")
        try:
            Aligner().align(  # type: ignore[no-untyped-call]
                sources,
                targets,
                os.fspath(forward),
                os.fspath(reverse),
                priors_input=None if priors is None else list(read_lines(priors)),
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise SimulmtError(f"eflomal failed: {error}") from None
        both = (read_alignments(path, parse_pharaoh) for path in (forward, reverse))
        links = [symmetrise(*each) for each in zip(*both, strict=True)]
    return links[: len(pairs)]


def read_pharaoh(path: Path, pairs: Sequence[WordPair]) -> list[set[Link]]:
    """Read alignments in 0-based Pharaoh format and check that they fit the sentences."""
    alignments = list(read_alignments(path, parse_pharaoh))
    _check_fit(path, alignments, pairs)
    return alignments


def read_gold(path: Path, pairs: Sequence[WordPair], base: int = 1, target_first: bool = False) -> list[Gold]:
    """Read sure and possible gold links and check that they fit the sentences."""
    gold = list(read_alignments(path, partial(parse_gold, base=base, swapped=target_first)))
    _check_fit(path, [possible for _, possible in gold], pairs)
    return gold


def _check_fit(path: Path, alignments: Sequence[set[Link]], pairs: Sequence[WordPair]) -> None:
    if len(alignments) != len(pairs):
        raise DataError(f"{path}: {len(alignments)} lines of alignments for {len(pairs)} sentence pairs")
    for number, (links, (source, target)) in enumerate(zip(alignments, pairs, strict=True), start=1):
        for i, j in links:
            if i > len(source) or j > len(target):
                raise DataError(
                    f"{path}:{number}: links source unit {i} to target unit {j}, counted from 1, but the pair has "
                    f"{len(source)} and {len(target)}; is the tokenisation the one that was aligned?"
                )


def align_with_awesome(pairs: Sequence[WordPair], model: Path) -> list[set[Link]]:
    """Align with awesome-align and a local model; nothing is downloaded."""
    if find_spec("awesome_align") is None:
        raise SimulmtError("awesome-align is not installed: pip install awesome-align, or use --aligner eflomal")
    if not (model / "config.json").is_file():
        raise SimulmtError(f"{model}: not an awesome-align model; expected a directory with config.json and weights")
    with TemporaryDirectory() as directory:
        text, links = Path(directory, "text"), Path(directory, "links")
        # "|||" separates source and target, so it must not occur in a word.
        sides = ((" ".join(word.replace("|||", "||") for word in side) for side in pair) for pair in pairs)
        text.write_text("".join(" ||| ".join(pair) + "\n" for pair in sides), encoding="utf-8")
        options = {"model_name_or_path": model, "data_file": text, "output_file": links, "num_workers": 0}
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "awesome_align.run_align", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            reason = (finished.stderr.strip().splitlines() or ["no message"])[-1]
            raise SimulmtError(f"awesome-align failed: {reason}")
        return read_pharaoh(links, pairs)


def symmetrise(forward: set[Link], reverse: set[Link]) -> set[Link]:
    """Symmetrise with grow-diag-final-and.

    Starting from the intersection, add neighbouring links whose source or target word is unaligned; finally add links
    whose words are both unaligned.
    """
    links, union = forward & reverse, forward | reverse
    sources, targets = {i for i, _ in links}, {j for _, j in links}
    waiting = sorted(links)
    while waiting:
        for link in _neighbours(waiting.pop(0)):
            i, j = link
            if link in union and link not in links and (i not in sources or j not in targets):
                links.add(link)
                sources.add(i)
                targets.add(j)
                waiting.append(link)
    for i, j in (*sorted(forward), *sorted(reverse)):
        if i not in sources and j not in targets:
            links.add((i, j))
            sources.add(i)
            targets.add(j)
    return links


def _neighbours(link: Link) -> Iterator[Link]:
    for down, across in product((-1, 0, 1), repeat=2):
        yield link[0] + down, link[1] + across


def _strip_punctuation(word: str) -> str:
    """Strip punctuation from the ends of a word, unless nothing else is left."""
    inside = [number for number, letter in enumerate(word) if category(letter)[0] not in "PS"]
    return word[inside[0] : inside[-1] + 1] if inside else word
