"""Word alignments: computed by eflomal or awesome-align, read from files, and scored.

A link is a pair (source position, target position), both 1-based; the links of a sentence are a set. The parsers below
convert all file formats (0- or 1-based, either side first, sure and possible links) to this form.

Alignments link units: space-separated words or, in text written without spaces, single ideographs and whole Latin
words. Tokenised text keeps its tokenisation, which gold alignments refer to.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice, product, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar
from unicodedata import category

from simulmt.data.corpus import ParallelFiles, read_lines, read_sentences, wrap_read_errors
from simulmt.errors import ConfigError, DataError, SimulmtError, needs_extra
from simulmt.text import split_words
from simulmt.text.words import Unit

Link = tuple[int, int]
Words = Sequence[str]
WordPair = tuple[Words, Words]
Gold = tuple[set[Link], set[Link]]  # sure and possible links
UnitChoice = Unit | Literal["auto"]
T = TypeVar("T")

SAMPLE_LINES = 10_000  # lines read to detect text without spaces
MAX_MEAN_WORD_LENGTH = 4.0  # ideographs; a larger mean means that the text is not segmented
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
        raise ConfigError(f"k must be at least 1, got {k}")
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
            raise DataError(f"alignment link '{token}': a possible link, but only sure links (i-j) are allowed here")
        links.add(link)
    return links


def format_pharaoh(links: Iterable[Link]) -> str:
    """Format links as one line, sorted and 0-based."""
    return " ".join(f"{i - 1}-{j - 1}" for i, j in sorted(set(links)))


def parse_gold(line: str, base: int = 1, swapped: bool = False) -> tuple[set[Link], set[Link]]:
    """Parse a gold line into (sure, possible) links: i-j is sure, ipj or i?j only possible.

    Sure links also count as possible. `swapped` is for files with the target position first.
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
    # Invalid bytes become a token that no parser accepts, so they are reported with their line.
    with wrap_read_errors(path), path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield parse(line)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None


def _parse_link(token: str, base: int) -> tuple[Link, str]:
    match = _LINK.fullmatch(token)
    if match is None:
        raise DataError(f"alignment link '{token}': expected i-j (or ipj, i?j in gold files), as in 3-4")
    i, j = int(match[1]) - base + 1, int(match[3]) - base + 1
    if i < 1 or j < 1:
        raise DataError(f"alignment link '{token}': positions of this file count from {base}")
    return (i, j), match[2]


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
        raise DataError(
            f"{path}: {len(alignments)} alignments for {len(pairs)} sentence pairs; line n must align pair n"
        )
    for line, (links, pair) in enumerate(zip(alignments, pairs, strict=True), start=1):
        check_links(path, line, links, pair)


def check_links(path: Path, line: int, links: Iterable[Link], pair: WordPair) -> None:
    """Raise DataError if the links in a line of a file do not fit its sentence pair."""
    source, target = map(len, pair)
    for i, j in links:
        if i > source or j > target:
            raise DataError(
                f"{path}:{line}: links source unit {i} to target unit {j}, counted from 1, but the pair has "
                f"{source} and {target}; give the text that was aligned, with the same tokenisation"
            )


def alignment_words(text: str, unit: Unit) -> list[str]:
    """Split a line into the units of an alignment: words, or ideographs and whole Latin words."""
    return split_words(text) if unit == "char" else text.split()


def guess_unit(lines: Iterable[str]) -> Unit:
    """Guess the unit of a text: characters if its runs of ideographs are too long to be words."""
    sizes = (len(split_words(word)) for line in islice(lines, SAMPLE_LINES) for word in line.split())
    runs = [size for size in sizes if size > 1]
    return "char" if sum(runs) > MAX_MEAN_WORD_LENGTH * len(runs) else "word"


def find_unit(path: Path, choice: UnitChoice = "auto") -> Unit:
    """Return `choice`, or guess the unit of a file if it is auto."""
    return guess_unit(read_sentences(path)) if choice == "auto" else choice


def read_word_pairs(source: Path, target: Path, units: Sequence[Unit]) -> list[WordPair]:
    """Read parallel files as pairs of words."""
    return [
        (alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1]))
        for pair in ParallelFiles(source, target).pairs()
    ]


def segment_chinese(lines: Iterable[str]) -> Iterator[list[str]]:
    """Segment Chinese lines into words with jieba, keeping existing spaces."""
    jieba = _jieba()
    for line in lines:
        yield [word for word in jieba.cut(line) if word.strip()]


def word_frequency(word: str) -> int:
    """Return how often a Chinese word occurs in the corpus of jieba's word list; 0 if it is not in the list."""
    frequency: int = _jieba().dt.FREQ.get(word, 0)
    return frequency


@cache
def _jieba() -> Any:
    with needs_extra("Chinese word segmentation", "align"):
        import jieba  # type: ignore[import-untyped, unused-ignore]
    jieba.setLogLevel("ERROR")  # type: ignore[no-untyped-call]
    jieba.initialize()  # type: ignore[no-untyped-call]
    return jieba


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
        i, j = waiting.pop(0)
        for link in product((i - 1, i, i + 1), (j - 1, j, j + 1)):
            if link in union and link not in links and (link[0] not in sources or link[1] not in targets):
                links.add(link)
                sources.add(link[0])
                targets.add(link[1])
                waiting.append(link)
    for i, j in (*sorted(forward), *sorted(reverse)):
        if i not in sources and j not in targets:
            links.add((i, j))
            sources.add(i)
            targets.add(j)
    return links


def _strip_punctuation(word: str) -> str:
    """Strip punctuation from the ends of a word, unless nothing else is left."""
    inside = [number for number, letter in enumerate(word) if category(letter)[0] not in "PS"]
    return word[inside[0] : inside[-1] + 1] if inside else word
