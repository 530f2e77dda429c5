"""Derive training text line by line: speech noise, weighting, concatenation.

Each function writes PREFIX.source, PREFIX.target and PREFIX.json, the record of inputs, settings and dropped lines (see
simulmt.data.derived), and returns the record.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import Any

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.data.derived import Dropped, Job, Report, Rewritten, write_pairs
from simulmt.data.speech_noise import Language, SpeechNoise, learn_misheard, unpunctuated
from simulmt.errors import ConfigError, DataError

EMPTY = "empty"  # reason to drop a pair


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
    others: float = 1.0  # for labels without a weight of their own
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
        raise DataError(f"{labels}: every label has weight 0, so no pairs remain")
    inputs = {"source": source, "target": target, "labels": labels}
    job = Job.on_files(prefix, "weigh", as_table(config), inputs, overwrite)

    def weighed() -> Iterator[tuple[str, str]]:
        rng = random.Random(config.seed)
        for pair, label in zip_longest(ParallelFiles(source, target).pairs(), read_lines(labels)):
            if pair is None or label is None:
                more = "more" if pair is None else "fewer"
                raise DataError(f"{labels}: has {more} lines than {source}; line n must be the label of pair n")
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
