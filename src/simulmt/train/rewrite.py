"""New training text from old: distilled, pseudo-referenced, reordered, as speech, weighed, or joined.

Each function takes text files and writes PREFIX.source and PREFIX.target, line by line, and PREFIX.json, the record of
what was made from what. Lines that nothing can be made of are left out of both files and listed in the record.
Run again after success, a function returns at once; run again after a kill, it goes on (see simulmt.train.shards).
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice, pairwise, repeat, zip_longest
from pathlib import Path
from typing import Any, Literal
from unicodedata import category, normalize

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulmt.alignment import Link, parse_pharaoh, read_alignments, reorder_target
from simulmt.config import as_table, require
from simulmt.corpus import Pair, ParallelFiles, file_sha256, read_lines
from simulmt.errors import CheckpointError, ConfigError, DataError
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.text import END, PAD, Tokenizer, split_words
from simulmt.train.batches import cut_by_length
from simulmt.train.loop import precision
from simulmt.train.settings import TrainingConfig
from simulmt.train.shards import Job, Left, Progress, Rewritten, finished, rewrite
from simulmt.train.systems import SystemConfig, check_vocabularies, load_model

EMPTY, TOO_LONG, NO_TRANSLATION = "empty", "too_long", "no_translation"
SHARD_LINES = {"cuda": 65_536, "cpu": 2_048}  # some seconds of translation
SHORTEST = 8  # tokens that a sentence counts for at least, or a batch of very short ones would have very many

# Vowel signs and accents are no \w, yet part of a word; all that Unicode has lie in these two ranges.
_MARKS = "".join(c for c in map(chr, chain(range(0x300, 0x20000), range(0xE0100, 0xE01F0))) if category(c)[0] == "M")
_IN_WORD = rf"[\w{_MARKS}]"
_NOT_SPOKEN = re.compile(
    rf"(?<!{_IN_WORD})['’-]|['’-](?!{_IN_WORD})|(?<!\d)[.,:]|[.,:](?!\d)|[^\w{_MARKS}\s%$€£+'’.,:-]|_"
)

Unit = Literal["word", "char"]
Report = Callable[[Progress], None]


@dataclass(frozen=True)
class TranslationConfig:
    """How a text is translated; the defaults distil. `delay` is the k of a wait-k model, None for a teacher."""

    search: BeamConfig = field(default_factory=lambda: BeamConfig(beam=5, length_penalty=1.5))
    delay: int | None = None
    batch_tokens: int = 65_536  # source tokens translated together
    max_length: int = 1024  # longest source, in tokens without END

    def __post_init__(self) -> None:
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
    """Pair each source sentence with its translation: by a teacher, Seq-KD; by a wait-k model, pseudo references."""
    weights = _weights(model)
    facts = {
        "rewrite": "distil" if config.delay is None else "pseudo",
        "settings": {**as_table(config), "device": device.type},
        "inputs": {
            "model": file_sha256(weights),
            **{f"{side} vocabulary": file_sha256(vocabularies / f"{side}.model") for side in ("source", "target")},
            "source": file_sha256(source),
        },
    }
    job = Job(prefix, facts, [source, weights, weights.with_name("model.json")], overwrite, SHARD_LINES[device.type])
    translator = cache(lambda: CorpusTranslator.load(model, vocabularies, config, device))
    if finished(job) is None:
        translator()  # before anything is overwritten, for the model may not fit
    return rewrite(job, lambda: read_lines(source), lambda lines: translator()(lines), report)


class CorpusTranslator:
    """A trained encoder-decoder that translates many lines at once."""

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
        """What becomes of each line; batches depend on the lines alone, so the same lines give the same text."""
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
        """The best hypothesis of each sentence of one batch; the last is the longest."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        source = np.full((len(sentences), lengths[-1]), PAD)
        source[np.arange(lengths[-1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(sentences), np.int64)
        tokens = torch.from_numpy(source).to(self.device, non_blocking=True)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(precision(TrainingConfig(), self.device))
            if self.device.type == "cuda":  # with so few queries a sentence, the other kernels are slower
                stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
            config = self.config
            found = beam_search(self.model, tokens, torch.from_numpy(lengths), config.search, config.delay, best=1)
        return [hypotheses[0].tokens for hypotheses in found]


def reorder_corpus(
    source: Path,
    target: Path,
    links: Path,
    prefix: Path,
    units: tuple[Unit, Unit] = ("word", "word"),
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Put the words of each target sentence into the order of the source words they translate.

    `links` holds alignments in Pharaoh format, counted from 0, of the units of source and target: "word", what is
    between spaces, or "char" for text written without, where each ideograph counts and other words are whole. A unit is
    never torn apart, so whoever wants Chinese words to stay whole gives Chinese cut into words.
    """
    inputs = {"source": source, "target": target, "links": links}
    job = _job(prefix, "reorder", {"units": list(units)}, inputs, overwrite)

    def reorder(pairs: Sequence[tuple[Pair, set[Link]]]) -> list[Rewritten]:
        return [_reorder(pair, aligned, links, units) for pair, aligned in pairs]

    return rewrite(job, lambda: _aligned_pairs(source, target, links), reorder, report)


@dataclass(frozen=True)
class SpeechConfig:
    """Which share of the pairs to write as speech; another seed chooses others."""

    share: float = 0.15
    seed: int = 1

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
    """Write a share of the pairs again with their source as a speech recogniser would give it, see `as_speech`.

    Joined with the pairs themselves, they teach a model to do without punctuation; the targets keep theirs.
    """
    job = _job(prefix, "speech", as_table(config), {"source": source, "target": target}, overwrite)

    def chosen() -> Iterator[Pair]:
        chance = random.Random(config.seed)
        return (pair for pair in ParallelFiles(source, target).pairs() if chance.random() < config.share)

    def speak(pairs: Sequence[Pair]) -> list[Rewritten]:
        spoken = (pair._replace(source=as_speech(pair.source)) for pair in pairs)
        return [
            (each.source, each.target) if each.source and each.target else Left(EMPTY, each.line) for each in spoken
        ]

    return rewrite(job, chosen, speak, report)


def as_speech(text: str) -> str:
    """Lower case, and no punctuation but what joins the parts of a word or number: don't, well-known, 3.5, 50%."""
    return " ".join(_NOT_SPOKEN.sub(" ", normalize("NFC", text).lower()).split())


@dataclass(frozen=True)
class WeighingConfig:
    """How often to take the pairs of each label: 2 for twice, 0.5 for a random half of them, 0 for none."""

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
    """Take pairs more or less often by their label, which line n of `labels` gives for pair n: its source, say."""
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
    """One of the texts that are joined: its first `limit` pairs (all, if 0), `repeat` times."""

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
    """Write several texts into one, set after set."""
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
    """The units in a new order, parted as the text would part them.

    There is no space between two ideographs and one between two other characters; between an ideograph and another
    character there is one if the text has one on that side of the other character's unit.
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
    """Whether the text has white space between each unit and the one before it; at the end, False."""
    spaces, end = [], 0
    for unit in units:
        start = text.index(unit, end)
        spaces.append(0 < end < start)
        end = start + len(unit)
    return [*spaces, False]


def _is_ideograph(character: str) -> bool:
    """Whether it counts as a word of its own even where a letter stands before it."""
    return len(split_words("a" + character)) > 1
