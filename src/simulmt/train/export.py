"""Export a trained model to a bundle that runs without PyTorch, after checking that their outputs match.

The fp32 bundle must match the log-probabilities of the trained model, which verifies the graphs. An int8 bundle must
choose the same symbols for most frames and, given development text, reach nearly the same BLEU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from simulmt.config import require
from simulmt.data.store import Dataset
from simulmt.errors import BundleError
from simulmt.files import atomic_directory
from simulmt.model.ctc import CTCModel
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.bundle import (
    FORMAT,
    GRAPHS,
    SOURCE,
    TARGET,
    Bundle,
    BundleConfig,
    write_description,
    write_system_configs,
)
from simulmt.runtime.decoding import (
    Array,
    CTCDecoder,
    CTCSentence,
    Due,
    History,
    TransducerDecoder,
    Written,
    after,
    log_softmax,
)
from simulmt.runtime.seq2seq import Row, Seq2SeqDecoder, Seq2SeqSentence
from simulmt.runtime.stream import Translator
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS, START, Tokenizer
from simulmt.train.analysis import bleu, tune_blank_penalties
from simulmt.train.graph import Precision, build_graph
from simulmt.train.systems import InferenceModel, check_vocabularies, load_model, translator_of

TOLERANCE = 1e-4  # of log-probabilities between PyTorch and onnxruntime in fp32, see `_rounding`
_RANDOM_SENTENCES = 8
_MAX_RANDOM_LENGTH = 48
_BATCH_SIZE = 6  # sentences compared in one batch

_TokenPair = tuple[list[int], list[int]]  # a source sentence and its translation, each with END


@dataclass(frozen=True)
class ExportConfig:
    """Settings of a bundle, and tolerances of its int8 checks."""

    source_language: str
    target_language: str
    delays: tuple[int, ...] = ()  # empty for a full-sentence model
    default_delay: int | None = None  # by default the first of the delays
    blank_penalties: tuple[float, ...] = ()
    stabilities: tuple[float, ...] = ()  # thresholds of the policy of a wait-k model, one per delay
    max_waits: tuple[int, ...] = ()  # words over which the threshold falls to zero, one per delay; 0: it never falls
    precision: Precision = "int8"
    longest: int = 256
    min_agreement: float = 0.95  # share of symbols on which int8 and the trained model agree
    max_bleu_loss: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.min_agreement <= 1, f"min_agreement must be in 0..1, got {self.min_agreement}")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in eval mode, and its vocabularies."""

    model: InferenceModel
    source: Tokenizer
    target: Tokenizer

    def __post_init__(self) -> None:
        sizes = (self.model.encoder.embedding.num_embeddings, self.model.target_embedding.num_embeddings)
        require(
            sizes == (self.source.size, self.target.size),
            f"the model has vocabularies of {sizes[0]} and {sizes[1]} pieces, "
            f"got {self.source.size} and {self.target.size}",
        )
        require(self.source.spaced, "the source vocabulary must be trained with spaced = true")
        starts = self.model.encoder.word_starts
        require(
            starts is None or starts.bool().tolist() == self.source.word_starts,
            "the model sees whole words of another source vocabulary; use the one it was trained with",
        )


@torch.inference_mode()
def export(
    trained: TrainedModel,
    directory: Path,
    config: ExportConfig,
    card: str = "",
    dev_pairs: Sequence[tuple[str, str]] = (),
) -> BundleConfig:
    """Write a bundle; `card` (data, scores, licences) is added to its README, `dev_pairs` are (source, reference)."""
    if directory.exists():
        raise BundleError(f"{directory}: already exists; remove it or choose another directory")
    has_policy = isinstance(trained.model, Seq2SeqModel) and trained.model.policy is not None
    require(has_policy or not config.stabilities, "stabilities need a wait-k model with a policy (model.policy_inner)")
    require(
        bool(config.stabilities) or not has_policy,
        "a model with a policy needs stabilities (--stability), one for each delay",
    )
    described = _describe(trained.model, config)
    is_fp32 = config.precision == "fp32"
    with atomic_directory(directory) as new, TemporaryDirectory(prefix=".", dir=directory.parent) as other:
        fp32 = _write(trained, new if is_fp32 else Path(other), replace(described, precision="fp32"))
        checks = check_fp32(trained, fp32)
        if not is_fp32:
            int8 = _write(trained, new, described)
            checks |= check_int8(trained, fp32, int8, dev_pairs, config.min_agreement, config.max_bleu_loss)
        described = replace(described, checks=checks)
        write_description(new, described, _card(described, card))
    return described


def export_run(
    run: Path,
    data: Path,
    directory: Path,
    config: ExportConfig,
    *,
    tune_penalty: bool = False,
    context_weight: float = 1.0,
    card: str = "",
    dev_sentences: int = 200,
    report: Callable[[str], None] = lambda _: None,
) -> BundleConfig:
    """Export a finished run, given its data directory; int8 is checked on `dev_sentences` sentences of its dev set.

    The delays of `config` are replaced by those of the run. `tune_penalty` chooses the blank penalty of each by BLEU on
    the development set. `context_weight` scales a transducer's label context, like the language model weight in shallow
    fusion.
    """
    network, system = load_model(run)
    dataset = Dataset.open(data)
    check_vocabularies(run, system, data, dataset.source_tokenizer, dataset.target_tokenizer)
    model = translator_of(network)
    config = replace(config, delays=() if system.system == "teacher" else system.delays)
    _check_options(model, config, tune_penalty)
    if isinstance(model, TransducerModel):
        model.context.table.data.mul_(context_weight)
    else:
        require(context_weight == 1.0, "a context weight needs a transducer")
    if tune_penalty and isinstance(model, CTCModel):
        config = replace(config, blank_penalties=tune_blank_penalties(model, dataset, config.delays, report))
    pairs = list(islice(zip(dataset.dev_sources(), dataset.dev_references[0], strict=True), dev_sentences))
    trained = TrainedModel(model, dataset.source_tokenizer, dataset.target_tokenizer)
    described = export(trained, directory, config, card, pairs)
    write_system_configs(directory)
    return described


def _check_options(model: InferenceModel, config: ExportConfig, tune_penalty: bool) -> None:
    require(isinstance(model, CTCModel) or not tune_penalty, "tuning a blank penalty needs a CTC model")
    trained = ", ".join(map(str, config.delays)) or "full sentences only"
    require(
        config.default_delay is None or config.default_delay in config.delays,
        f"default delay {config.default_delay}: the model was trained for {trained}",
    )
    for name in ("blank_penalties", "stabilities", "max_waits"):
        count = len(getattr(config, name))
        listed = name.replace("_", " ")
        require(count in (0, len(config.delays)), f"{count} {listed}: give one for each delay of the model ({trained})")


def _describe(model: InferenceModel, config: ExportConfig) -> BundleConfig:
    if isinstance(model, CTCModel):
        kind, mu = "transducer" if isinstance(model, TransducerModel) else "ctc", model.mu
    else:
        kind, mu = "wait-k" if model.encoder.causal else "full-sentence", 1
    default = config.delays[0] if config.default_delay is None and config.delays else config.default_delay
    return BundleConfig(
        format=FORMAT,
        kind=kind,  # type: ignore[arg-type]
        source_language=config.source_language,
        target_language=config.target_language,
        precision=config.precision,
        longest=config.longest,
        mu=mu,
        delays=config.delays,
        default_delay=default,
        whole_words=model.encoder.word_starts is not None,
        blank_penalties=config.blank_penalties,
        stabilities=config.stabilities,
        max_waits=config.max_waits,
    )


def _write(trained: TrainedModel, directory: Path, described: BundleConfig) -> Bundle:
    """Write a bundle without a model card."""
    (directory / SOURCE).write_bytes(trained.source.model)
    (directory / TARGET).write_bytes(trained.target.model)
    for name in GRAPHS[described.kind]:
        graph = build_graph(name, trained.model, described.longest, described.precision)
        graph.save(directory / f"{name}.onnx")
    write_description(directory, described, card="")
    return Bundle(directory)


def _card(described: BundleConfig, text: str) -> str:
    """Return the model card: the settings of the bundle, then `text` on data, scores and licences."""
    delays = ", ".join(map(str, described.delays)) or "none (full sentences)"
    listed = described.blank_penalties, described.stabilities, described.max_waits
    penalties, stabilities, waits = (", ".join(map(str, each)) for each in listed)
    lines = [
        f"# {described.source_language} to {described.target_language}, {described.kind}",
        "",
        f"A model for simulmt, {described.precision}.",
        "",
        f"- delays: {delays}",
        f"- maximum sentence length: {described.longest} source pieces",
        *([f"- blank penalties: {penalties}"] if penalties else []),
        *([f"- policy: stability thresholds {stabilities}"] if stabilities else []),
        *([f"- words over which the threshold falls to zero: {waits} (0: it never falls)"] if waits else []),
        *(["- look-ahead: whole words"] if described.whole_words else []),
        *(f"- {name.replace('_', ' ')}: {value:.6g}" for name, value in described.checks.items()),
    ]
    return "\n".join(lines) + "\n" + (f"\n{text.strip()}\n" if text.strip() else "")


def check_fp32(trained: TrainedModel, bundle: Bundle) -> dict[str, Any]:
    """Check that all log-probabilities of random streams match the trained model."""
    largest = worst = 0.0
    for delay in bundle.config.delays or (None,):
        for expected, found in _log_probabilities(trained, bundle, _random_pairs(trained, bundle), delay):
            errors = np.abs(expected - found).max(-1)
            largest = float(np.maximum(largest, errors.max()))  # unlike max(), propagates NaN
            worst = float(np.maximum(worst, (errors / _rounding(expected)).max()))
    if not worst <= TOLERANCE:
        allowed = TOLERANCE * largest / worst
        raise BundleError(
            f"export failed: onnxruntime differs from the trained model by {largest:.1e}, more than {allowed:.1e}"
        )
    _check_symbols(trained, bundle)
    if bundle.config.has_policy:
        _check_stability(trained, bundle)
    return {"fp32_largest_difference": largest}


def _check_stability(trained: TrainedModel, bundle: Bundle) -> None:
    for delay in bundle.config.delays:
        difference = _stability_differences(trained, bundle, _random_pairs(trained, bundle), delay).max()
        if not difference <= TOLERANCE:
            raise BundleError(f"export failed: at delay {delay} the stability differs by {difference:.1e}")


@torch.inference_mode()
def _stability_differences(
    trained: TrainedModel, bundle: Bundle, pairs: Sequence[_TokenPair], delay: int | None
) -> Array:
    """Return the differences between the stabilities of the runtime and of the trained model."""
    model, decoder = trained.model, Seq2SeqDecoder(bundle, threads=0)
    assert isinstance(model, Seq2SeqModel), "only wait-k models have a policy"
    assert model.policy is not None, "a model without a policy"
    differences = []
    for source, target in pairs:
        H = model.encoder(torch.tensor([source]))
        expected = model.policy(model.decode(H, None, torch.tensor([target]), delay)[0]).sigmoid().numpy()
        differences.append(np.abs(expected - _seq2seq_actual(decoder, source, target, delay, "stability")))
    return np.concatenate(differences)


def _rounding(log_probs: Array) -> Array:
    """Return the factor by which the tolerance of each row [V] grows, since fp32 rounding grows with magnitude.

    Log-probabilities are usually about -10, but those of a very confident model are about -60 for most symbols.
    """
    return np.maximum(np.abs(log_probs).max(-1) / 10, 1)


def _check_symbols(trained: TrainedModel, bundle: Bundle) -> None:
    """Check that greedy streams of a CTC model choose its symbols, except for near ties."""
    if not isinstance(trained.model, CTCModel):
        return
    decoder = CTCDecoder(bundle, threads=0)
    sources = [source for source, _ in _random_pairs(trained, bundle)]
    for delay in bundle.config.delays:
        symbols = _ctc_actual(decoder, trained.source, sources, delay, scores=False)
        for tokens, actual in zip(sources, symbols, strict=True):
            expected = _ctc_expected(trained.model, tokens, delay, bundle.config.blank_penalty(delay))
            second, best = np.partition(expected, -2)[:, -2:].T
            if np.any((expected.argmax(-1) != actual) & (best - second > TOLERANCE * _rounding(expected))):
                raise BundleError(f"export failed: at delay {delay} onnxruntime and the model choose different symbols")


def check_int8(
    trained: TrainedModel,
    fp32: Bundle,
    int8: Bundle,
    dev_pairs: Sequence[tuple[str, str]],
    min_agreement: float,
    max_bleu_loss: float,
) -> dict[str, Any]:
    """Check the symbols that int8 chooses, and its BLEU on development text, against full precision."""
    delay = int8.config.default_delay
    pairs = _encoded(trained, dev_pairs, int8.config.longest) or _random_pairs(trained, int8)
    compared = _log_probabilities(trained, int8, pairs, delay)
    alike = np.concatenate([expected.argmax(-1) == found.argmax(-1) for expected, found in compared])
    agreement = float(alike.mean())
    if agreement < min_agreement:
        raise BundleError(
            f"export failed: int8 and the trained model agree on {agreement:.1%} of the symbols, "
            f"less than {min_agreement:.1%}; export in fp32"
        )
    checks: dict[str, Any] = {"int8_agreement": agreement, "int8_symbols_compared": len(alike)}
    if int8.config.has_policy:
        checks["int8_stability_difference"] = float(_stability_differences(trained, int8, pairs, delay).mean())
    return checks | _check_bleu(trained, fp32, int8, dev_pairs, max_bleu_loss) if dev_pairs else checks


def _check_bleu(
    trained: TrainedModel, fp32: Bundle, int8: Bundle, dev_pairs: Sequence[tuple[str, str]], max_bleu_loss: float
) -> dict[str, Any]:
    sources, references = zip(*dev_pairs, strict=True)
    scores = {}
    for name, bundle in (("fp32", fp32), ("int8", int8)):
        hypotheses = Translator(bundle).translate("\n".join(sources), bundle.config.default_delay).split("\n")
        scores[name] = bleu(hypotheses, [references], trained.target)
    lost = scores["fp32"] - scores["int8"]
    if lost > max_bleu_loss:
        raise BundleError(
            f"export failed: int8 loses {lost:.2f} BLEU on the development text, "
            f"more than {max_bleu_loss}; export in fp32"
        )
    return {f"{name}_bleu": score for name, score in scores.items()}


def _encoded(trained: TrainedModel, dev_pairs: Sequence[tuple[str, str]], longest: int) -> list[_TokenPair]:
    return [
        ([*trained.source.encode(source)[: longest - 1], END], [*trained.target.encode(reference)[:longest], END])
        for source, reference in dev_pairs
    ]


def _random_pairs(trained: TrainedModel, bundle: Bundle) -> list[_TokenPair]:
    generator = np.random.default_rng(0)

    def sentence(vocabulary: int) -> list[int]:
        length = generator.integers(1, min(bundle.config.longest, _MAX_RANDOM_LENGTH))
        return [*generator.integers(len(SPECIAL_SYMBOLS), vocabulary, length).tolist(), END]

    return [(sentence(trained.source.size), sentence(trained.target.size)) for _ in range(_RANDOM_SENTENCES)]


def _log_probabilities(
    trained: TrainedModel, bundle: Bundle, pairs: Sequence[_TokenPair], delay: int | None
) -> Iterator[tuple[Array, Array]]:
    """Yield the log-probabilities of each sentence by the trained model and by the bundle."""
    model = trained.model
    if isinstance(model, Seq2SeqModel):
        return _seq2seq_log_probabilities(model, Seq2SeqDecoder(bundle, threads=0), pairs, delay)
    assert delay is not None, "a CTC model has a delay"
    sources = [source for source, _ in pairs]
    compared = _ctc_log_probabilities(model, CTCDecoder(bundle, threads=0), trained.source, sources, delay)
    if isinstance(model, TransducerModel):
        return _with_context(model, TransducerDecoder(bundle, threads=0), compared)
    return compared


def _ctc_log_probabilities(
    model: CTCModel, decoder: CTCDecoder, tokenizer: Tokenizer, sources: Sequence[list[int]], delay: int
) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(sources), _BATCH_SIZE):
        group = sources[start : start + _BATCH_SIZE]
        for tokens, actual in zip(group, _ctc_actual(decoder, tokenizer, group, delay), strict=True):
            yield _ctc_expected(model, tokens, delay, decoder.config.blank_penalty(delay)), actual


def _with_context(
    model: TransducerModel, decoder: TransducerDecoder, compared: Iterator[tuple[Array, Array]]
) -> Iterator[tuple[Array, Array]]:
    """Add the label context to the scores of frames; both histories are what the trained model writes."""
    embedding, table = model.target_embedding.weight, model.context.table
    for expected, found in compared:
        history: History = (START,) * decoder.symbols
        histories, added = [], np.empty_like(expected)
        for index, scores in enumerate(expected):
            histories.append(history)
            added[index] = (model.context(torch.tensor(history), embedding) @ table.T).numpy()
            symbol = int((scores + added[index]).argmax())
            history = history if symbol == BLANK else after(history, symbol)
        yield log_softmax(expected + added), log_softmax(found + decoder.context_scores(histories))


def _ctc_expected(model: CTCModel, tokens: Sequence[int], delay: int, blank_penalty: float) -> Array:
    logits = model(torch.tensor([tokens]), torch.tensor([len(tokens)]), delay)[0]
    logits[:, BLANK] -= blank_penalty
    return logits.log_softmax(-1).numpy()


def _seq2seq_log_probabilities(
    model: Seq2SeqModel, decoder: Seq2SeqDecoder, pairs: Sequence[_TokenPair], delay: int | None
) -> Iterator[tuple[Array, Array]]:
    for source, target in pairs:
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]), delay)[0]
        yield logits.log_softmax(-1).numpy(), log_softmax(_seq2seq_actual(decoder, source, target, delay, "scores"))


class _RecordingSentence(CTCSentence):
    """A sentence that records its frames, as symbols or log-probabilities, and writes nothing."""

    def __init__(self, whole_words: bool, scores: bool) -> None:
        super().__init__(whole_words)
        self.wants_scores = scores
        self.frames: list[Array] = []

    def write(self, frames: Array, due: Due) -> Written:
        self.frames.append(frames.copy())
        return Written([], due.position, due.trigger)


def _ctc_actual(
    decoder: CTCDecoder, source: Tokenizer, sentences: Sequence[Sequence[int]], delay: int, scores: bool = True
) -> list[Array]:
    """Return the frames computed by the runtime, with all sentences in one batch, word by word."""
    recorded = [_RecordingSentence(decoder.config.whole_words, scores) for _ in sentences]
    split = [source.split_to_word_tokens(tokens[:-1]) for tokens in sentences]
    for index in range(max(map(len, split)) + 1):
        for sentence, words in zip(recorded, split, strict=True):
            if index < len(words):
                sentence.read(words[index], delay)
            elif not sentence.closed:
                sentence.close(delay)
        while due := [sentence for sentence in recorded if sentence.is_due]:
            decoder.advance(due)
    return [np.concatenate(sentence.frames) for sentence in recorded]


def _seq2seq_actual(
    decoder: Seq2SeqDecoder, tokens: Sequence[int], target: Sequence[int], delay: int | None, output: str
) -> Array:
    """Return an output of the runtime with forced decoding of `target`."""
    sentence = Seq2SeqSentence(beam=1)
    sentence.tokens = list(tokens)
    decoder.caches.reserve(sentence.slot, max(len(tokens), len(target)))
    found = []
    for position, last in enumerate([START, *target[:-1]]):
        visible = min(len(tokens), position + delay) if delay else len(tokens)
        decoder.read({sentence: visible})
        row = Row(sentence.slot, last, Due(position, visible, visible - 1, delay or 0))
        found.append(decoder.predict([row], output)[output])
    return np.concatenate(found)
