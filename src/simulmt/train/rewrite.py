"""Derive training text with models: distillation, pseudo references, back-translation, recognised speech.

Each function writes PREFIX.source, PREFIX.target and PREFIX.json, the record of inputs, settings and dropped lines. A
finished job returns at once, an interrupted one resumes (see simulmt.train.shards). Fast transforms, which need not
resume, are in simulmt.data.transforms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulmt.config import as_table, require
from simulmt.data.corpus import Pair, file_sha256, read_lines
from simulmt.data.derived import EMPTY, Dropped, Job, Report, Rewritten, finished
from simulmt.data.speech_noise import unpunctuated
from simulmt.data.transforms import sample_pairs
from simulmt.errors import CheckpointError, ConfigError
from simulmt.model.beam import BeamConfig, Sampler, SamplingConfig, beam_search
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.speech.live import transcribe
from simulmt.speech.recogniser import open_recogniser
from simulmt.speech.synthesis import random_voice, synthesise
from simulmt.text import BACK_TRANSLATED, END, PAD, Tokenizer
from simulmt.train.batches import cut_by_length
from simulmt.train.loop import precision
from simulmt.train.settings import TrainingConfig
from simulmt.train.shards import rewrite
from simulmt.train.systems import SystemConfig, check_vocabularies, load_model

TOO_LONG, NO_TRANSLATION, MISHEARD = "too_long", "no_translation", "misheard"
SPOKEN_LINES = 200  # lines per shard of recognised speech; a few minutes
SHARD_LINES = {"cuda": 65_536, "cpu": 2_048}  # lines per shard of translation; a few seconds
SHORTEST = 8  # tokens; shorter sentences count as this long, to bound the number of sentences in a batch


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

    With `back`, translate target text by a teacher of the reverse direction into tagged sources (tagged
    back-translation).
    """
    name = "backtranslate" if back else "distil" if config.delay is None else "pseudo"
    job = _translation_job(name, model, vocabularies, text, prefix, config, device, overwrite)
    translator = cache(lambda: CorpusTranslator.load(model, vocabularies, config, device))
    if finished(job) is None:
        translator()  # fail before anything is overwritten

    def translate(lines: Sequence[str]) -> list[Rewritten]:
        translated = translator()(lines)
        if not back:
            return translated
        return [each if isinstance(each, Dropped) else (BACK_TRANSLATED + each[1], each[0]) for each in translated]

    return rewrite(job, lambda: read_lines(text), translate, report)


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
    metadata = {
        "rewrite": name,
        "settings": {**settings, "device": device.type},
        "inputs": {
            "model": file_sha256(weights),
            **{f"{side} vocabulary": file_sha256(vocabularies / f"{side}.model") for side in ("source", "target")},
            "source": file_sha256(text),
        },
    }
    return Job(prefix, metadata, [text, weights, weights.with_name("model.json")], overwrite, SHARD_LINES[device.type])


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
        results: list[Rewritten] = [Dropped(EMPTY if length == 1 else TOO_LONG) for length in lengths]
        fit = np.flatnonzero((lengths > 1) & (lengths <= self.config.max_length + 1))
        by_length = fit[np.argsort(lengths[fit], kind="stable")]
        counts = np.bincount(np.maximum(lengths[fit], SHORTEST))
        cuts = cut_by_length(counts, self.config.batch_tokens)
        for start, stop in pairwise(cuts):
            numbers = by_length[start:stop]
            for number, ids in zip(numbers, self._translate([sentences[n] for n in numbers]), strict=True):
                text = self.target.decode(ids)
                results[number] = (lines[number], text) if text.strip() else Dropped(NO_TRANSLATION)
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
            if self.device.type == "cuda":  # the other kernels are slower with few queries per sentence
                stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
            search, delay, sampler = self.config.search, self.config.delay, self._sampler(source)
            found = beam_search(self.model, tokens, torch.from_numpy(lengths), search, delay, best=1, sampler=sampler)
        return [hypotheses[0].tokens for hypotheses in found]

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
    least_alike: float = 0.5  # minimum word similarity of transcript and source; other pairs are dropped
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
    """Replace the sources of a share of the pairs by recogniser transcripts of their synthesised speech (espeak-ng)."""
    inputs = {"source": source, "target": target}
    job = Job.on_files(prefix, "recognised", as_table(config), inputs, overwrite, SPOKEN_LINES)
    recogniser = cache(lambda: open_recogniser(config.recogniser))
    if finished(job) is None:
        recogniser()  # fail before anything is overwritten

    def recognise(pair: Pair) -> Rewritten:
        transcript = transcribe(recogniser(), synthesise(pair.source, random_voice(f"{config.seed}:{pair.line}")))
        words, recognised = unpunctuated(pair.source).split(), unpunctuated(transcript).split()
        similarity = SequenceMatcher(None, words, recognised, autojunk=False).ratio()
        if not transcript or not pair.target or similarity < config.least_alike:
            return Dropped(MISHEARD, pair.line)
        return transcript, pair.target

    return rewrite(
        job,
        lambda: sample_pairs(source, target, config.share, config.seed),
        lambda pairs: [*map(recognise, pairs)],
        report,
    )


def _weights(model: Path) -> Path:
    for path in (model / "model.safetensors", model / "final" / "model.safetensors"):
        if path.exists():
            return path
    raise CheckpointError(f"{model}: no trained model found; a finished run has one in final/")


def _check_system(model: Path, system: SystemConfig, delay: int | None) -> None:
    wanted: Literal["teacher", "wait-k"] = "teacher" if delay is None else "wait-k"
    if system.system != wanted:
        use = "distillation needs a teacher" if delay is None else "pseudo references need a wait-k model"
        raise ConfigError(f"{model}: a {system.system} model, but {use}")
