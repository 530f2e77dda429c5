"""Noisy-channel reranking: choose the translation from which a reverse model best reads the source back.

The candidates for a sentence are the hypotheses of a beam search and, if there is one, its given translation. The
chosen one maximises

    log p(candidate | source) / tokens of the candidate + weight * log p(source | candidate) / tokens of the source

The second term is low for a translation that omits or adds something, which the first alone may prefer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, read_lines
from simulmt.data.transforms import Dropped, Job, Report, Rewritten, finished_record, refuse_to_overwrite_inputs
from simulmt.errors import ConfigError, DataError
from simulmt.model.beam import BeamConfig
from simulmt.model.layers import Batch
from simulmt.text import END, Tokenizer
from simulmt.train.batches import cut_by_length, gather
from simulmt.train.rewrite import (
    MIN_LENGTH,
    NO_TRANSLATION,
    SHARD_LINES,
    CorpusTranslator,
    TranslationConfig,
    rewrite,
    weights_file,
)

UNLIKELY = "unlikely"  # reason to drop a pair

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class RerankConfig:
    """Reranking settings; the delay is for wait-k models only."""

    translation: TranslationConfig = field(default_factory=lambda: TranslationConfig(BeamConfig(beam=8), delay=40))
    weight: float = 1.0  # of the reverse score
    min_reverse: float | None = None  # in nats per token; pairs whose reverse score is lower are dropped

    def __post_init__(self) -> None:
        require(0 <= self.weight < math.inf, f"weight must be a number of at least 0, got {self.weight:g}")
        require(
            self.min_reverse is None or self.min_reverse <= 0,
            f"min_reverse is a log-probability per token, at most 0, got {self.min_reverse}",
        )


class Direction(NamedTuple):
    """A trained model, or bundle, and the directory with its vocabularies."""

    model: Path
    vocabularies: Path

    def inputs(self, prefix: str = "") -> dict[str, Path]:
        """Return the files that identify both, by name."""
        sides = {f"{prefix}{side} vocabulary": self.vocabularies / f"{side}.model" for side in ("source", "target")}
        return {f"{prefix}model": weights_file(self.model), **sides}


def rerank_corpus(
    forward: Direction,
    reverse: Direction,
    source: Path,
    target: Path | None,
    prefix: Path,
    config: RerankConfig,
    device: torch.device,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Translate source text, choosing among the hypotheses, and the lines of `target`, with a reverse model."""
    inputs = {**forward.inputs(), **reverse.inputs("reverse "), "source": source}
    if target is not None:
        inputs["target"] = target
    weights = [weights_file(each.model) for each in (forward, reverse)]
    refuse_to_overwrite_inputs(prefix, [path.with_name("model.json") for path in weights])
    settings = {**as_table(config), "device": device.type}
    job = Job.on_files(prefix, "rerank", settings, inputs, overwrite, SHARD_LINES[device.type])
    reranker = cache(lambda: Reranker.load(forward, reverse, config, device))
    if finished_record(job) is None:  # fail before anything is overwritten
        if target is not None:
            _check_line_counts(source, target)
        reranker()
    return rewrite(job, lambda: _pairs(source, target), lambda pairs: reranker()(pairs), report)


def _check_line_counts(source: Path, target: Path) -> None:
    ours, theirs = (sum(1 for _ in read_lines(path)) for path in (source, target))
    if ours != theirs:
        raise DataError(
            f"--target {target}: {theirs} lines, but {source} has {ours}; line n must translate line n of the source"
        )


def _pairs(source: Path, target: Path | None) -> Iterator[Pair]:
    """Yield every line with its given translation, which is empty if there is none."""
    if target is None:
        return (Pair(line, "", number) for number, line in enumerate(read_lines(source), start=1))
    lines = zip(read_lines(source), read_lines(target), strict=True)
    return (Pair(*pair, number) for number, pair in enumerate(lines, start=1))


@dataclass(frozen=True, eq=False)
class Reranker:
    """Chooses among translations with a forward and a reverse model."""

    forward: CorpusTranslator
    reverse: CorpusTranslator
    config: RerankConfig

    @staticmethod
    def load(forward: Direction, reverse: Direction, config: RerankConfig, device: torch.device) -> Reranker:
        settings = config.translation
        one = CorpusTranslator.of_system(
            {"teacher", "wait-k"}, "reranking needs a teacher or a wait-k model", *forward, settings, device
        )
        other = CorpusTranslator.of_system(
            {"teacher"}, "--reverse needs a teacher, trained from target to source", *reverse, settings, device
        )
        if one.source.model == other.source.model != one.target.model:
            raise ConfigError(
                f"--reverse {reverse.model}: translates from the source language; give a teacher trained from target "
                "to source"
            )
        return Reranker(one, other, config)

    def __call__(self, pairs: Sequence[Pair]) -> list[Rewritten]:
        """Return each line with its best translation, or why there is none."""
        lines = [pair.source for pair in pairs]
        found = self.forward.hypotheses(lines)
        candidates = [
            [] if isinstance(each, Dropped) else self._candidates(each, pair.target)
            for each, pair in zip(found, pairs, strict=True)
        ]
        counts, texts = [*map(len, candidates)], [*chain.from_iterable(candidates)]
        forward, reverse = self.scores(lines, texts, np.repeat(np.arange(len(lines)), counts))
        scores = forward + self.config.weight * reverse
        results: list[Rewritten] = [each if isinstance(each, Dropped) else Dropped(NO_TRANSLATION) for each in found]
        for number, (start, stop) in enumerate(pairwise(np.cumsum([0, *counts]))):
            if start < stop:
                best = start + int(scores[start:stop].argmax())
                likely = self.config.min_reverse is None or reverse[best] >= self.config.min_reverse
                results[number] = (lines[number], texts[best]) if likely else Dropped(UNLIKELY)
        return results

    def _candidates(self, hypotheses: Sequence[str], given: str) -> list[str]:
        """Return the distinct candidates; the given translation is one unless it is empty or too long."""
        fits = 0 < len(self.forward.target.encode(given)) <= self.config.translation.max_length
        return [*dict.fromkeys([*hypotheses, given] if fits else hypotheses)]

    def scores(self, lines: Sequence[str], texts: Sequence[str], line_of: Numbers) -> tuple[NDArray[np.float32], ...]:
        """Return the forward and the reverse score of each text as a translation of line `line_of[n]`."""
        each = np.arange(len(texts))
        return _score(self.forward, lines, texts, line_of, each), _score(self.reverse, texts, lines, each, line_of)


class _Sentences(NamedTuple):
    """Encoded sentences on the device, end to end; each ends in END."""

    tokens: Int[Tensor, " N"]
    offsets: Int[Tensor, " n"]
    lengths: Numbers

    @staticmethod
    def encode(tokenizer: Tokenizer, texts: Sequence[str], device: torch.device) -> _Sentences:
        ids = [[*tokenizer.encode(text), END] for text in texts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), np.int32, lengths.sum())
        offsets = np.cumsum([0, *lengths])
        return _Sentences(torch.from_numpy(tokens).to(device), torch.from_numpy(offsets).to(device), lengths)

    def batch(self, rows: Numbers) -> tuple[Int[Tensor, "B L"], Int[Tensor, " B"]]:
        """Return some sentences, padded, and their lengths, as a CPU tensor."""
        lengths = self.lengths[rows]
        on_device = torch.from_numpy(rows).to(self.tokens.device, non_blocking=True)
        return gather(self.tokens, self.offsets, on_device, int(lengths.max())), torch.from_numpy(lengths)


def _score(
    translator: CorpusTranslator, sources: Sequence[str], targets: Sequence[str], source_of: Numbers, target_of: Numbers
) -> NDArray[np.float32]:
    """Return the mean log-probability per token of target `target_of[n]` given source `source_of[n]`, for each n.

    Batches hold pairs of similar lengths, and a source with its targets, so that it is encoded only once.
    """
    device = translator.device
    ours, theirs = (
        _Sentences.encode(*side, device) for side in ((translator.source, sources), (translator.target, targets))
    )
    longest = np.zeros_like(ours.lengths)  # target of each source
    np.maximum.at(longest, source_of, theirs.lengths[target_of])
    size = np.maximum(np.maximum(ours.lengths, longest), MIN_LENGTH)[source_of]
    order = np.lexsort((source_of, longest[source_of], ours.lengths[source_of], size))
    scores = torch.empty(len(order), device=device)
    with translator.inference():
        for start, stop in pairwise(cut_by_length(np.bincount(size), translator.config.batch_tokens)):
            pairs = order[start:stop]
            rows, place = np.unique(source_of[pairs], return_inverse=True)
            batch = Batch(*ours.batch(rows), *theirs.batch(target_of[pairs]))
            shared = torch.from_numpy(place).to(device, non_blocking=True)
            scores[start:stop] = translator.model.scores(batch, shared, translator.config.delay)
    return scores.cpu().numpy()[np.argsort(order)]
