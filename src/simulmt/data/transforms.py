"""Derive training text line by line: filtering, speech noise, weighting, concatenation.

`filter_corpus`, `speech_corpus`, `weigh_corpus` and `join_corpora` write PREFIX.source, PREFIX.target and PREFIX.json,
the record of inputs, settings and dropped lines (see simulmt.data.derived), and return the record.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, map_chunks, read_lines
from simulmt.data.derived import EMPTY, Dropped, Job, Report, Rewritten, write_pairs
from simulmt.data.speech_noise import Language, SpeechNoise, learn_misheard, unpunctuated
from simulmt.errors import ConfigError, DataError
from simulmt.files import cores
from simulmt.text import BACK_TRANSLATED
from simulmt.text.numbers import find_numbers, unmatched
from simulmt.text.words import HAN, guess_language

NUMBERS, REPEATS, HELD_OUT = "numbers", "repeats", "held_out"  # reasons to drop a pair
CHUNK_PAIRS = 4096  # about a second of work
LONGEST_PHRASE = 12  # words or ideographs; longer repeated phrases are not searched for
LONG_PHRASE = 4  # repeating a phrase of this length twice is an error; shorter ones may be meant, as in "very, very"
SHARED_WORDS = 10  # length of the n-grams that count as overlap with a test set
SHORTEST_SENTENCE = 4  # words; shorter test sentences are too common to count as overlap

_UNIT = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")
_ONE = frozenset({Fraction(1)})  # often an article of the other language


def filter_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    languages: tuple[str, str] | None = None,
    overwrite: bool = False,
    report: Report = lambda _: None,
    held_out: Sequence[Path] = (),
) -> dict[str, Any]:
    """Keep pairs whose numbers agree and whose target has no repetition loop; languages not given are guessed.

    The source of a back-translation must have no repetition loop, either. Pairs that share a sentence of at least four
    words, or ten consecutive words, with a `held_out` file are dropped, too.
    """
    languages = languages or (guess_language(read_lines(source)), guess_language(read_lines(target)))
    inputs = {"source": file_sha256(source), "target": file_sha256(target)}
    if held_out:
        inputs["held out"] = " ".join(map(file_sha256, held_out))
    metadata = {"rewrite": "filter", "settings": {"languages": [*languages]}, "inputs": inputs}
    job = Job(prefix, metadata, [source, target, *held_out], overwrite)
    work = partial(_filter_pairs, languages, HeldOut(chain.from_iterable(map(read_lines, held_out))))

    def filtered() -> Iterator[Rewritten]:
        chunks = map_chunks(work, ParallelFiles(source, target).pairs(), CHUNK_PAIRS, cores())
        return chain.from_iterable(results for _, results in chunks)

    return write_pairs(job, filtered, report)


class HeldOut:
    """Sentences that must not be trained on."""

    def __init__(self, lines: Iterable[str]) -> None:
        sentences = [tuple(_words(line)) for line in lines]
        self._sentences = {sentence for sentence in sentences if len(sentence) >= SHORTEST_SENTENCE}
        self._passages = {passage for sentence in sentences for passage in _passages(sentence)}

    def __contains__(self, text: str) -> bool:
        """Return whether a text is one of the sentences, or shares SHARED_WORDS consecutive words with one."""
        words = tuple(_words(text))
        return words in self._sentences or not self._passages.isdisjoint(_passages(words))


def _words(text: str) -> list[str]:
    return _UNIT.findall(text.lower())


def _passages(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[start : start + SHARED_WORDS] for start in range(len(words) - SHARED_WORDS + 1))


def _filter_pairs(languages: tuple[str, str], held_out: HeldOut, pairs: Sequence[Pair]) -> list[Rewritten]:
    """Return each pair, or why it is dropped."""
    reasons = [(pair, _reason_to_drop(pair, languages, held_out)) for pair in pairs]
    return [Dropped(reason, pair.line) if reason else (pair.source, pair.target) for pair, reason in reasons]


def _reason_to_drop(pair: Pair, languages: tuple[str, str], held_out: HeldOut) -> str | None:
    if pair.source in held_out or pair.target in held_out:
        return HELD_OUT
    if has_repetition(pair.target, pair.source):
        return REPEATS
    if pair.source.startswith(BACK_TRANSLATED) and has_repetition(pair.source, pair.target):
        return REPEATS
    return NUMBERS if numbers_disagree(pair.source, pair.target, languages) else None


def numbers_disagree(source: str, target: str, languages: tuple[str, str]) -> bool:
    """Return whether one side has a number, by value, that the other does not have."""
    ours, theirs = find_numbers(source, languages[0]), find_numbers(target, languages[1])
    return any(number.values != _ONE for number in (*unmatched(ours, theirs), *unmatched(theirs, ours)))


def has_repetition(target: str, source: str) -> bool:
    """Return whether the target repeats a phrase more often in a row than the source does."""
    return max_repetitions(_words(target)) > max_repetitions(_words(source))


def max_repetitions(words: Sequence[str]) -> int:
    """Return how often a phrase is repeated in a row, at most; twice counts for long phrases only."""
    most = 1
    for length in range(1, min(LONGEST_PHRASE, len(words) // 2) + 1):
        same = 0
        for word, later in zip(words, islice(words, length, None)):  # noqa: B905 (the second is shorter)
            same = same + 1 if word == later else 0
            times = same // length + 1
            if times > (1 if length >= LONG_PHRASE else 2):
                most = max(most, times)
    return most


@dataclass(frozen=True)
class SpeechConfig:
    """Share of pairs to write as speech, noise and seed."""

    share: float = 0.15
    seed: int = 1
    noise: Language | None = None  # the source language, or None for text that only lacks punctuation and capitals

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")


def speech_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    config: SpeechConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
    examples: ParallelFiles | None = None,
) -> dict[str, Any]:
    """Copy a share of the pairs with sources like the output of a speech recogniser.

    Joined with the original pairs, they make a model robust to missing punctuation, disfluencies and misheard words.
    Misheard words are learnt from `examples`, pairs of reference and recognised text, if given.
    """
    inputs = {"source": source, "target": target}
    misheard = None
    if examples is not None:
        inputs |= {"said": examples.source, "heard": examples.target}
        misheard = learn_misheard((pair.source, pair.target) for pair in examples.pairs())
    job = Job.on_files(prefix, "speech", as_table(config), inputs, overwrite)
    noise = SpeechNoise(config.noise, misheard=misheard) if config.noise else None

    def add_noise(pair: Pair) -> Rewritten:
        """Add noise to the source, seeded by the line number, so independent of other lines."""
        if noise is None:
            heard = unpunctuated(pair.source)
        else:
            heard = noise.apply(pair.source, random.Random(f"{config.seed}:{pair.line}"))
        return (heard, pair.target) if heard and pair.target else Dropped(EMPTY, pair.line)

    return write_pairs(job, lambda: map(add_noise, sample_pairs(source, target, config.share, config.seed)), report)


def sample_pairs(source: Path, target: Path, share: float, seed: int) -> Iterator[Pair]:
    """Yield a random share of the pairs."""
    rng = random.Random(seed)
    return (pair for pair in ParallelFiles(source, target).pairs() if rng.random() < share)


@dataclass(frozen=True)
class WeighingConfig:
    """Weights of labels: 2 takes pairs twice, 0.5 a random half, 0 none."""

    weights: dict[str, float] = field(default_factory=dict)
    others: float = 1.0  # for labels that are not in `weights`
    seed: int = 1

    def __post_init__(self) -> None:
        for label, weight in (*self.weights.items(), ("others", self.others)):
            require(0 <= weight < math.inf, f"a weight must be 0 or more, got {weight:g} for {label}")


def weigh_corpus(
    source: Path,
    target: Path,
    labels: Path,
    prefix: Path,
    config: WeighingConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Repeat or sample pairs by label; line n of `labels` is the label of pair n, such as its corpus."""
    known = Counter(label.strip() for label in read_lines(labels))
    unknown = sorted(config.weights.keys() - known.keys())
    if unknown:
        found = ", ".join(f"{label} ({count:,})" for label, count in known.most_common(20))
        raise DataError(f"{labels}: no line has the label {', '.join(unknown)}; labels found: {found}")
    if not any(config.weights.get(label, config.others) for label in known):
        raise DataError(f"{labels}: every label has weight 0, so no pairs remain; give one a weight above 0")
    inputs = {"source": source, "target": target, "labels": labels}
    job = Job.on_files(prefix, "weigh", as_table(config), inputs, overwrite)

    def weighed() -> Iterator[tuple[str, str]]:
        rng = random.Random(config.seed)
        for pair, label in ParallelFiles(source, target).pairs_with(labels, read_lines(labels)):
            weight = config.weights.get(label.strip(), config.others)
            times = int(weight) + (rng.random() < weight % 1)
            yield from repeat((pair.source, pair.target), times)

    return write_pairs(job, weighed, report)


@dataclass(frozen=True)
class JoinedSet:
    """A set to join: its first `limit` pairs (0 for all), `repeat` times."""

    source: Path
    target: Path
    repeat: int = 1
    limit: int = 0

    def __post_init__(self) -> None:
        require(self.repeat >= 1, f"repeat must be at least 1, got {self.repeat} for {self.source}")
        require(self.limit >= 0, f"limit must not be negative, got {self.limit} for {self.source}")

    def pairs(self) -> Iterator[tuple[str, str]]:
        for _ in repeat(None, self.repeat):
            pairs = ParallelFiles(self.source, self.target).pairs()
            yield from ((pair.source, pair.target) for pair in islice(pairs, self.limit or None))


def join_corpora(
    sets: Sequence[JoinedSet], prefix: Path, overwrite: bool = False, report: Report = lambda _: None
) -> dict[str, Any]:
    """Concatenate several sets."""
    if not sets:
        raise ConfigError("nothing to join: give --source and --target")
    inputs = [[file_sha256(each.source), file_sha256(each.target)] for each in sets]
    settings = [{"repeat": each.repeat, "limit": each.limit} for each in sets]
    files = [path for each in sets for path in (each.source, each.target)]
    job = Job(prefix, {"rewrite": "join", "settings": settings, "inputs": inputs}, files, overwrite)
    return write_pairs(job, lambda: chain.from_iterable(each.pairs() for each in sets), report)
