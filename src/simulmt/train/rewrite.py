"""Derive training text: distillation, pseudo references, back-translation, reordering, speech, weighting, joins.

Each function writes PREFIX.source, PREFIX.target and PREFIX.json, the record of inputs, settings and dropped lines. A
finished job returns at once, an interrupted one resumes (see simulmt.train.shards).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache, partial
from itertools import chain, islice, pairwise, repeat, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulmt.config import as_table, require
from simulmt.data.alignment import Link, parse_pharaoh, read_alignments, reorder_target
from simulmt.data.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.data.speech_noise import Language, SpeechNoise, unpunctuated
from simulmt.errors import CheckpointError, ConfigError, DataError
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.sampling import Sampler, SamplingConfig
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.speech.live import transcribe
from simulmt.speech.recogniser import open_recogniser
from simulmt.speech.synthesis import random_voice, synthesise
from simulmt.text import BACK_TRANSLATED, END, PAD, Tokenizer, split_words
from simulmt.train.batches import cut_by_length
from simulmt.train.loop import precision
from simulmt.train.settings import TrainingConfig
from simulmt.train.shards import Job, Left, Progress, Rewritten, finished, rewrite
from simulmt.train.systems import SystemConfig, check_vocabularies, load_model

EMPTY, TOO_LONG, NO_TRANSLATION, MISHEARD = "empty", "too_long", "no_translation", "misheard"
SPOKEN_LINES = 200  # of a shard that is spoken and recognised: some minutes
SHARD_LINES = {"cuda": 65_536, "cpu": 2_048}  # some seconds of translation
SHORTEST = 8  # tokens that a sentence counts for at least, or a batch of very short ones would have very many

Unit = Literal["word", "char"]
Report = Callable[[Progress], None]


@dataclass(frozen=True)
class TranslationConfig:
    """Translation settings; defaults are for distillation. `delay` is the k of wait-k, None for a teacher."""

    search: BeamConfig = field(default_factory=lambda: BeamConfig(beam=5, length_penalty=1.5))
    delay: int | None = None
    batch_tokens: int = 65_536  # source tokens translated together
    max_length: int = 1024  # longest source, in tokens without END
    sampling: SamplingConfig | None = None  # draw translations instead of searching for the best

    def __post_init__(self) -> None:
        require(self.sampling is None or self.search.beam == 1, f"sampling needs a beam of 1, got {self.search.beam}")
        require(self.delay is None or self.delay >= 1, f"delay k must be at least 1, got {self.delay}")
        require(self.batch_tokens >= 1, f"batch_tokens must be at least 1, got {self.batch_tokens}")
        require(self.max_length >= 1, f"max_length must be at least 1, got {self.max_length}")


def translate_corpus(
    model: Path,
    vocabularies: Path,
    source: Path,
    prefix: Path,
    config: TranslationConfig,
    device: torch.device,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Translate source text: by a teacher for distillation, by a wait-k model for pseudo references."""
    name = "distil" if config.delay is None else "pseudo"
    job = _translation_job(name, model, vocabularies, source, prefix, config, device, overwrite)
    translator = _translator(job, model, vocabularies, config, device)
    return rewrite(job, lambda: read_lines(source), lambda lines: translator()(lines), report)


def backtranslate_corpus(
    model: Path,
    vocabularies: Path,
    target: Path,
    prefix: Path,
    config: TranslationConfig,
    device: torch.device,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Translate target text with a teacher of the reverse direction into tagged sources (tagged back-translation)."""
    job = _translation_job("backtranslate", model, vocabularies, target, prefix, config, device, overwrite)
    translator = _translator(job, model, vocabularies, config, device)

    def turn(lines: Sequence[str]) -> list[Rewritten]:
        translated = translator()(lines)
        return [each if isinstance(each, Left) else (BACK_TRANSLATED + each[1], each[0]) for each in translated]

    return rewrite(job, lambda: read_lines(target), turn, report)


def _translation_job(
    name: str,
    model: Path,
    vocabularies: Path,
    text: Path,
    prefix: Path,
    config: TranslationConfig,
    device: torch.device,
    overwrite: bool,
) -> Job:
    weights = _weights(model)
    settings = {key: value for key, value in as_table(config).items() if (key, value) != ("sampling", None)}
    facts = {
        "rewrite": name,
        "settings": {**settings, "device": device.type},
        "inputs": {
            "model": file_sha256(weights),
            **{f"{side} vocabulary": file_sha256(vocabularies / f"{side}.model") for side in ("source", "target")},
            "source": file_sha256(text),
        },
    }
    return Job(prefix, facts, [text, weights, weights.with_name("model.json")], overwrite, SHARD_LINES[device.type])


def _translator(
    job: Job, model: Path, vocabularies: Path, config: TranslationConfig, device: torch.device
) -> Callable[[], CorpusTranslator]:
    translator = cache(lambda: CorpusTranslator.load(model, vocabularies, config, device))
    if finished(job) is None:
        translator()  # before anything is overwritten, for the model may not fit
    return translator


class CorpusTranslator:
    """Batched translation with a trained encoder-decoder."""

    def __init__(
        self,
        model: Seq2SeqModel,
        source: Tokenizer,
        target: Tokenizer,
        config: TranslationConfig,
        device: torch.device,
    ) -> None:
        self.model = model.to(device).eval()
        self.source, self.target = source, target
        self.config = config
        self.device = device

    @staticmethod
    def load(model: Path, vocabularies: Path, config: TranslationConfig, device: torch.device) -> CorpusTranslator:
        network, system = load_model(model)
        source, target = (Tokenizer.load(vocabularies / f"{side}.model") for side in ("source", "target"))
        _check_system(model, system, config.delay)
        check_vocabularies(model, system, vocabularies, source, target)
        assert isinstance(network, Seq2SeqModel)
        return CorpusTranslator(network, source, target, config, device)

    def __call__(self, lines: Sequence[str]) -> list[Rewritten]:
        """Translate lines; batches depend on the lines only, so results are reproducible."""
        sentences = [[*self.source.encode(line), END] for line in lines]
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        results: list[Rewritten] = [Left(EMPTY if length == 1 else TOO_LONG) for length in lengths]
        fit = np.flatnonzero((lengths > 1) & (lengths <= self.config.max_length + 1))
        by_length = fit[np.argsort(lengths[fit], kind="stable")]
        counts = np.bincount(np.maximum(lengths[fit], SHORTEST))
        cuts = cut_by_length(counts, self.config.batch_tokens)
        for start, stop in pairwise(cuts):
            numbers = by_length[start:stop]
            for number, ids in zip(numbers, self._translate([sentences[n] for n in numbers]), strict=True):
                text = self.target.decode(ids)
                results[number] = (lines[number], text) if text.strip() else Left(NO_TRANSLATION)
        return results

    def _translate(self, sentences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the best hypothesis of each sentence of a batch; the last is the longest."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        source = np.full((len(sentences), lengths[-1]), PAD)
        source[np.arange(lengths[-1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(sentences), np.int64)
        tokens = torch.from_numpy(source).to(self.device, non_blocking=True)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(precision(TrainingConfig(), self.device))
            if self.device.type == "cuda":  # with so few queries a sentence, the other kernels are slower
                stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
            search, delay, sampler = self.config.search, self.config.delay, self._sampler(source)
            found = beam_search(self.model, tokens, torch.from_numpy(lengths), search, delay, best=1, perturb=sampler)
        return [hypotheses[0].tokens for hypotheses in found]

    def _sampler(self, source: NDArray[np.int64]) -> Sampler | None:
        """Seed by the batch, so that a draw does not depend on which process makes it, or when."""
        config = self.config.sampling
        if config is None:
            return None
        digest = hashlib.blake2b(f"{config.seed}:".encode() + source.tobytes(), digest_size=8).digest()
        seed = int.from_bytes(digest) >> 1
        return Sampler(config, torch.Generator(self.device).manual_seed(seed))


def reorder_corpus(
    source: Path,
    target: Path,
    links: Path,
    prefix: Path,
    units: tuple[Unit, Unit] = ("word", "word"),
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Reorder target words to follow the source words they translate.

    `links` holds 0-based Pharaoh alignments of units: "word" for space-separated words, or "char" for text without
    spaces, where each ideograph is a unit. To keep Chinese words together, segment the text first.
    """
    inputs = {"source": source, "target": target, "links": links}
    job = _job(prefix, "reorder", {"units": list(units)}, inputs, overwrite)

    def reorder(pairs: Sequence[tuple[Pair, set[Link]]]) -> list[Rewritten]:
        return [_reorder(pair, aligned, links, units) for pair, aligned in pairs]

    return rewrite(job, lambda: _aligned_pairs(source, target, links), reorder, report)


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
) -> dict[str, Any]:
    """Copy a share of the pairs with sources like the output of a speech recogniser.

    Joined with the original pairs, they make a model robust to missing punctuation, disfluencies and misheard words.
    """
    job = _job(prefix, "speech", as_table(config), {"source": source, "target": target}, overwrite)

    noise = SpeechNoise(config.noise) if config.noise else None

    def hear(pair: Pair) -> str:
        """Return the source as recognised; random per line, so independent of sharding."""
        if noise is None:
            return unpunctuated(pair.source)
        return noise.apply(pair.source, random.Random(f"{config.seed}:{pair.line}"))

    def speak(pairs: Sequence[Pair]) -> list[Rewritten]:
        spoken = (pair._replace(source=hear(pair)) for pair in pairs)
        return [
            (each.source, each.target) if each.source and each.target else Left(EMPTY, each.line) for each in spoken
        ]

    return rewrite(job, lambda: _drawn(source, target, config.share, config.seed), speak, report)


@dataclass(frozen=True)
class RecognitionConfig:
    """Which share of the pairs to speak, and what recognises them; another seed chooses other pairs and voices."""

    share: float = 0.01
    recogniser: str = "moonshine"
    least_alike: float = 0.5  # of the words; pairs that are recognised worse are left out
    seed: int = 1

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")
        require(0 <= self.least_alike <= 1, f"least_alike must be in 0..1, got {self.least_alike}")


def recognised_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    config: RecognitionConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Speak a share of the pairs with espeak-ng, and write them with what a recogniser makes of their source."""
    inputs = {"source": source, "target": target}
    checksums = {each: file_sha256(path) for each, path in inputs.items()}
    facts = {"rewrite": "recognised", "settings": as_table(config), "inputs": checksums}
    job = Job(prefix, facts, [*inputs.values()], overwrite, SPOKEN_LINES)
    recogniser = cache(lambda: open_recogniser(config.recogniser))
    if finished(job) is None:
        recogniser()  # before anything is overwritten, for it may not be installed

    def hear(pair: Pair) -> Rewritten:
        heard = transcribe(recogniser(), synthesise(pair.source, random_voice(f"{config.seed}:{pair.line}")))
        said = unpunctuated(pair.source).split()
        alike = SequenceMatcher(None, said, unpunctuated(heard).split(), autojunk=False).ratio()
        if not heard or not pair.target or alike < config.least_alike:
            return Left(MISHEARD, pair.line)
        return heard, pair.target

    return rewrite(
        job, lambda: _drawn(source, target, config.share, config.seed), lambda pairs: [*map(hear, pairs)], report
    )


def _drawn(source: Path, target: Path, share: float, seed: int) -> Iterator[Pair]:
    """A random share of the pairs."""
    chance = random.Random(seed)
    return (pair for pair in ParallelFiles(source, target).pairs() if chance.random() < share)


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
        raise DataError(f"{labels}: no line says {', '.join(unknown)}; there are: {found}")
    if not any(config.weights.get(label, config.others) for label in known):
        raise DataError(f"{labels}: every label has weight 0, so nothing is left")
    inputs = {"source": source, "target": target, "labels": labels}
    job = _job(prefix, "weigh", as_table(config), inputs, overwrite)

    def weighed() -> Iterator[tuple[str, str]]:
        chance = random.Random(config.seed)
        for pair, label in zip_longest(ParallelFiles(source, target).pairs(), read_lines(labels)):
            if pair is None or label is None:
                more = "more" if pair is None else "fewer"
                raise DataError(f"{labels}: has {more} lines than {source}; line n must be the label of pair n")
            weight = config.weights.get(label.strip(), config.others)
            times = int(weight) + (chance.random() < weight % 1)
            yield from repeat((pair.source, pair.target), times)

    return rewrite(job, weighed, list, report)


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
    return rewrite(job, lambda: chain.from_iterable(each.pairs() for each in sets), list, report)


def _job(prefix: Path, name: str, settings: dict[str, Any], inputs: dict[str, Path], overwrite: bool) -> Job:
    checksums = {each: file_sha256(path) for each, path in inputs.items()}
    return Job(prefix, {"rewrite": name, "settings": settings, "inputs": checksums}, [*inputs.values()], overwrite)


def _weights(model: Path) -> Path:
    for path in (model / "model.safetensors", model / "final" / "model.safetensors"):
        if path.exists():
            return path
    raise CheckpointError(f"{model}: no trained model here; a finished run has one in final/")


def _check_system(model: Path, system: SystemConfig, delay: int | None) -> None:
    wanted: Literal["teacher", "wait-k"] = "teacher" if delay is None else "wait-k"
    if system.system != wanted:
        use = "distillation needs a teacher" if delay is None else "pseudo references need a wait-k model"
        raise ConfigError(f"{model}: a {system.system} model, but {use}")


def _aligned_pairs(source: Path, target: Path, links: Path) -> Iterator[tuple[Pair, set[Link]]]:
    alignments = read_alignments(links, partial(parse_pharaoh, base=0))
    for pair, aligned in zip_longest(ParallelFiles(source, target).pairs(), alignments):
        if pair is None or aligned is None:
            raise DataError(f"{links}: has {'more' if pair is None else 'fewer'} lines than {source} has sentences")
        yield pair, aligned


def _reorder(pair: Pair, links: set[Link], path: Path, units: tuple[Unit, Unit]) -> Rewritten:
    source, target = _split(pair.source, units[0]), _split(pair.target, units[1])
    if not source or not target:
        return Left(EMPTY)
    furthest = max((i for i, _ in links), default=0), max((j for _, j in links), default=0)
    if furthest[0] > len(source) or furthest[1] > len(target):
        raise DataError(
            f"{path}:{pair.line}: links source unit {furthest[0]} and target unit {furthest[1]}, counted from 1, but "
            f"the pair has {len(source)} and {len(target)}; is the text tokenised as it was when it was aligned?"
        )
    order = reorder_target(range(len(target)), links)
    return pair.source, _write_units(target, order, pair.target)


def _split(text: str, unit: Unit) -> list[str]:
    return split_words(text) if unit == "char" else text.split()


def _write_units(units: Sequence[str], order: Sequence[int], text: str) -> str:
    """Join reordered units with spaces as in running text.

    Ideographs are joined without a space, other characters with one; between the two there is a space if the original
    text has one on that side.
    """
    spaces = _spaces(units, text)
    written = units[order[0]]
    for left, right in pairwise(order):
        ideographs = _is_ideograph(units[left][-1]), _is_ideograph(units[right][0])
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


def _is_ideograph(character: str) -> bool:
    """Return whether a character is an ideograph, a word of its own."""
    return len(split_words("a" + character)) > 1
