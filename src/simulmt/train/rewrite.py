"""Derive training text with models: distillation, pseudo references, back-translation, recognised speech.

Each function is a job as in simulmt.data.transforms, which has the fast transforms; those here are slow and resumable.

`rewrite` processes a text in shards, resumes an interrupted job and can be shared by any number of processes. Shards
have a fixed size, so the output is byte-identical regardless of interruptions and of the processes that took part.
Finished shards are kept in PREFIX.shards until the job is finished. Processes coordinate by file locks, which are
released when a process ends, so another one takes over its shard.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, read_lines, wrap_write_errors
from simulmt.data.speech_noise import unpunctuated
from simulmt.data.transforms import (
    EMPTY,
    Dropped,
    Job,
    Progress,
    Report,
    Rewritten,
    exclusive_lock,
    finished_record,
    open_output,
    refuse_to_overwrite_inputs,
    remove_previous,
    sample_pairs,
)
from simulmt.errors import ConfigError
from simulmt.files import lock, write_atomic
from simulmt.model.beam import BeamConfig, Sampler, SamplingConfig, beam_search
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.runtime.bundle import MANIFEST, find
from simulmt.speech.audio import random_voice, synthesise
from simulmt.speech.live import transcribe
from simulmt.speech.recogniser import open_recogniser
from simulmt.text import BACK_TRANSLATED, END, PAD, Tokenizer
from simulmt.train.batches import cut_by_length
from simulmt.train.loop import precision
from simulmt.train.restore import is_bundle, load_model_or_bundle
from simulmt.train.systems import System, TrainingConfig, check_vocabularies, find_model

TOO_LONG, NO_TRANSLATION, MISHEARD = "too_long", "no_translation", "misheard"
SPOKEN_LINES = 200  # lines per shard of recognised speech; a few minutes
SHARD_LINES = {"cuda": 16_384, "cpu": 2_048}  # lines per shard of translation; a few seconds
MIN_LENGTH = 8  # tokens; shorter sentences count as this long, to bound the number of sentences in a batch
LOCK_ATTEMPTS = 100  # another process may delete the folder before the lock file is opened

T = TypeVar("T")
Work = Callable[[Sequence[T]], Sequence[Rewritten]]


@dataclass(frozen=True)
class TranslationConfig:
    """Translation settings; defaults are for distillation. `delay` is the k of wait-k, None for a teacher."""

    search: BeamConfig = field(default_factory=lambda: BeamConfig(beam=5, length_penalty=1.5))
    delay: int | None = None
    batch_tokens: int = 65_536  # source tokens translated together
    max_length: int = 1024  # longest source, in tokens without END
    sampling: SamplingConfig | None = None  # sample translations instead of beam search

    def __post_init__(self) -> None:
        require(self.sampling is None or self.search.beam == 1, f"sampling needs a beam of 1, got {self.search.beam}")
        require(self.delay is None or self.delay >= 1, f"delay k must be at least 1, got {self.delay}")
        require(self.batch_tokens >= 1, f"batch_tokens must be at least 1, got {self.batch_tokens}")
        require(self.max_length >= 1, f"max_length must be at least 1, got {self.max_length}")


def translate_corpus(
    model: Path,
    vocabularies: Path,
    text: Path,
    prefix: Path,
    config: TranslationConfig,
    device: torch.device,
    overwrite: bool = False,
    report: Report = lambda _: None,
    back: bool = False,
) -> dict[str, Any]:
    """Translate source text: by a teacher for distillation, by a wait-k model for pseudo references.

    With `back`, translate target text with a target-to-source teacher into tagged sources (tagged back-translation).
    """
    name = "backtranslate" if back else "distil" if config.delay is None else "pseudo"
    weights = weights_file(model)
    refuse_to_overwrite_inputs(prefix, [weights, weights.with_name("model.json")])
    settings = {**as_table(config), "device": device.type}
    if config.sampling is None:
        del settings["sampling"]  # as in the records of older versions
    inputs = {
        "model": weights,
        "source vocabulary": vocabularies / "source.model",
        "target vocabulary": vocabularies / "target.model",
        "source": text,
    }
    job = Job.on_files(prefix, name, settings, inputs, overwrite, SHARD_LINES[device.type])
    translator = cache(lambda: CorpusTranslator.load(model, vocabularies, config, device))
    if finished_record(job) is None:
        translator()  # fail before anything is overwritten

    def translate(lines: Sequence[str]) -> list[Rewritten]:
        translated = translator()(lines)
        if not back:
            return translated
        return [each if isinstance(each, Dropped) else (BACK_TRANSLATED + each[1], each[0]) for each in translated]

    return rewrite(job, lambda: read_lines(text), translate, report)


def weights_file(model: Path) -> Path:
    """Return the file that identifies the weights: of a bundle its manifest, which has the checksums of all others."""
    return find(model) / MANIFEST if is_bundle(model) else find_model(model) / "model.safetensors"


@dataclass(frozen=True, eq=False)
class CorpusTranslator:
    """Batched translation with a trained encoder-decoder."""

    model: Seq2SeqModel
    source: Tokenizer
    target: Tokenizer
    config: TranslationConfig
    device: torch.device

    @staticmethod
    def load(path: Path, vocabularies: Path, config: TranslationConfig, device: torch.device) -> CorpusTranslator:
        needed = "distillation needs a teacher" if config.delay is None else "pseudo references need a wait-k model"
        system: System = "teacher" if config.delay is None else "wait-k"
        return CorpusTranslator.of_system({system}, needed, path, vocabularies, config, device)

    @staticmethod
    def of_system(
        systems: Set[System],
        needed: str,
        path: Path,
        vocabularies: Path,
        config: TranslationConfig,
        device: torch.device,
    ) -> CorpusTranslator:
        """Load a model of one of these systems; the delay is for wait-k models only."""
        model, system = load_model_or_bundle(path)
        if system.system not in systems:
            raise ConfigError(f"{path}: a {system.system} model, but {needed}")
        source, target = (Tokenizer.load(vocabularies / f"{side}.model") for side in ("source", "target"))
        check_vocabularies(path, system, vocabularies, source, target)
        assert isinstance(model, Seq2SeqModel)
        if system.system == "teacher":
            config = replace(config, delay=None)
        return CorpusTranslator(model.to(device).eval(), source, target, config, device)

    def __call__(self, lines: Sequence[str]) -> list[Rewritten]:
        """Translate lines."""
        return [
            each if isinstance(each, Dropped) else (line, each[0]) if each else Dropped(NO_TRANSLATION)
            for line, each in zip(lines, self.hypotheses(lines, best=1), strict=True)
        ]

    def hypotheses(self, lines: Sequence[str], best: int | None = None) -> list[list[str] | Dropped]:
        """Return the texts of the `best` hypotheses of each line (default: all), without empty ones.

        Batches depend on the lines only, so results are reproducible.
        """
        sentences = [[*self.source.encode(line), END] for line in lines]
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        results: list[list[str] | Dropped] = [Dropped(EMPTY if length == 1 else TOO_LONG) for length in lengths]
        fit = np.flatnonzero((lengths > 1) & (lengths <= self.config.max_length + 1))
        by_length = fit[np.argsort(lengths[fit], kind="stable")]
        counts = np.bincount(np.maximum(lengths[fit], MIN_LENGTH))
        cuts = cut_by_length(counts, self.config.batch_tokens)
        for start, stop in pairwise(cuts):
            numbers = by_length[start:stop]
            for number, found in zip(numbers, self._translate([sentences[n] for n in numbers], best), strict=True):
                results[number] = [text for ids in found if (text := self.target.decode(ids)).strip()]
        return results

    def _translate(self, sentences: Sequence[Sequence[int]], best: int | None) -> list[list[list[int]]]:
        """Return the best hypotheses of each sentence of a batch; the last sentence is the longest."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        source = np.full((len(sentences), lengths[-1]), PAD)
        source[np.arange(lengths[-1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(sentences), np.int64)
        tokens = torch.from_numpy(source).to(self.device, non_blocking=True)
        with self.inference():
            search, delay, sampler = self.config.search, self.config.delay, self._sampler(source)
            found = beam_search(self.model, tokens, torch.from_numpy(lengths), search, delay, best, sampler)
        return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Run the model without gradients, in the precision and with the attention kernels that suit the device."""
        kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # others are slower with few queries per sentence
        with (
            torch.inference_mode(),
            precision(TrainingConfig(), self.device),
            sdpa_kernel(kernels) if self.device.type == "cuda" else nullcontext(),
        ):
            yield

    def _sampler(self, source: NDArray[np.int64]) -> Sampler | None:
        """Return a sampler seeded by the batch, so that samples do not depend on process or order."""
        config = self.config.sampling
        if config is None:
            return None
        digest = hashlib.blake2b(f"{config.seed}:".encode() + source.tobytes(), digest_size=8).digest()
        seed = int.from_bytes(digest) >> 1
        return Sampler(config, torch.Generator(self.device).manual_seed(seed))


@dataclass(frozen=True)
class RecognitionConfig:
    """Share of pairs to synthesise, recogniser and seed, which selects pairs and voices."""

    share: float = 0.01
    recogniser: str = "moonshine"
    min_similarity: float = 0.5  # of the words of transcript and source; less similar pairs are dropped
    seed: int = 1

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"share must be above 0 and at most 1, got {self.share}")
        require(0 <= self.min_similarity <= 1, f"min_similarity must be in 0..1, got {self.min_similarity}")


def recognised_corpus(
    source: Path,
    target: Path,
    prefix: Path,
    config: RecognitionConfig,
    overwrite: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Replace the sources of a share of the pairs with transcripts of their synthesised speech (espeak-ng)."""
    inputs = {"source": source, "target": target}
    job = Job.on_files(prefix, "recognised", as_table(config), inputs, overwrite, SPOKEN_LINES)
    recogniser = cache(lambda: open_recogniser(config.recogniser))
    if finished_record(job) is None:
        recogniser()  # fail before anything is overwritten

    def recognise(pair: Pair) -> Rewritten:
        transcript = transcribe(recogniser(), synthesise(pair.source, random_voice(f"{config.seed}:{pair.line}")))
        words, recognised = unpunctuated(pair.source).split(), unpunctuated(transcript).split()
        similarity = SequenceMatcher(None, words, recognised, autojunk=False).ratio()
        if not transcript or not pair.target or similarity < config.min_similarity:
            return Dropped(MISHEARD, pair.line)
        return transcript, pair.target

    lines = partial(sample_pairs, source, target, config.share, config.seed)
    return rewrite(job, lines, lambda pairs: [*map(recognise, pairs)], report)


def rewrite(
    job: Job, lines: Callable[[], Iterable[T]], work: Work[T], progress: Report = lambda _: None
) -> dict[str, Any]:
    """Run or resume a job, and return its record when the result is complete.

    `lines` reads the input; `work` maps the lines of a shard to as many results, in order.
    """
    with wrap_write_errors(job.prefix):
        if finished_record(job) is None:
            with exclusive_lock(job.prefix):
                if finished_record(job) is None:  # another process may have finished it while this one waited
                    remove_previous(job)
        folder = job.path("shards") / job.identity
        others = _make_shards(job, lines, work, progress, folder, wanted=None)
        if others:
            _make_shards(job, lines, work, progress, folder, wanted=others)
        return _merge(job, folder)


def _make_shards(
    job: Job, lines: Callable[[], Iterable[T]], work: Work[T], progress: Report, folder: Path, wanted: set[int] | None
) -> set[int]:
    """Make all missing shards; return those that other processes are making.

    With `wanted`, wait for these shards and make those whose process was killed.
    """
    if finished_record(job) is not None:
        return set()
    started, made, others = time.perf_counter(), 0, set()
    for number, part in enumerate(_chunks(lines(), job.shard_lines)):
        path = folder / f"{number:06d}.json"
        if path.exists() or (wanted is not None and number not in wanted):
            continue
        with _open_lock(path.with_suffix(".lock")) as file:
            if not lock(file, wait=wanted is not None):
                others.add(number)
            elif not path.exists() and finished_record(job) is None:
                write_atomic(path, json.dumps(_shard_table(work(part), number * job.shard_lines), ensure_ascii=False))
                made += len(part)
                done = job.shard_lines * (len(list(folder.glob("[0-9]*.json"))) - 1) + len(part)
                progress(Progress(done, made / (time.perf_counter() - started)))
    return others


def _shard_table(results: Sequence[Rewritten], first: int) -> dict[str, Any]:
    """Return a shard as stored: its pairs, and the dropped lines, counted from 1, by reason."""
    left: dict[str, list[int]] = {}
    for line, result in enumerate(results, start=first + 1):
        if isinstance(result, Dropped):
            left.setdefault(result.reason, []).append(result.line or line)
    pairs = [result for result in results if not isinstance(result, Dropped)]
    return {"lines": len(results), "left": left, "pairs": pairs}


def _merge(job: Job, folder: Path) -> dict[str, Any]:
    """Join the shards in order."""
    with exclusive_lock(job.prefix):
        record = finished_record(job)
        if record is None:
            with open_output(job) as (record, source, target):
                for path in sorted(folder.glob("[0-9]*.json")):
                    _append(json.loads(path.read_bytes()), record, source, target)
        shutil.rmtree(folder.parent, ignore_errors=True)
    return record


def _append(shard: dict[str, Any], record: dict[str, Any], source: BinaryIO, target: BinaryIO) -> None:
    record["lines"] += shard["lines"]
    record["kept"] += len(shard["pairs"])
    for reason, lines in shard["left"].items():
        record["left"].setdefault(reason, []).extend(lines)
    source.writelines(f"{pair[0]}\n".encode() for pair in shard["pairs"])
    target.writelines(f"{pair[1]}\n".encode() for pair in shard["pairs"])


def _chunks(lines: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(lines)
    while part := list(islice(remaining, size)):
        yield part


def _open_lock(path: Path, attempts: int = LOCK_ATTEMPTS) -> TextIO:
    """Open a lock file; retry if another process deletes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except (FileNotFoundError, FileExistsError):  # FileExistsError if the folder vanishes during mkdir
        if not attempts:
            raise
    return _open_lock(path, attempts - 1)
