"""From a trained model to a bundle that runs without PyTorch; nothing is written unless the two agree.

A bundle is first built in fp32 and held to the trained model number by number, which proves the graphs; an int8 bundle
is then held to the trained model by the symbols it chooses and, where there is development text, by its BLEU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from simulmt.config import require
from simulmt.data.dataset import Dataset
from simulmt.errors import BundleError
from simulmt.files import replacing_directory
from simulmt.model.ctc import CTCModel
from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.bundle import (
    FORMAT,
    SOURCE,
    TARGET,
    WORDS,
    Bundle,
    BundleConfig,
    write_description,
    write_system_configs,
)
from simulmt.runtime.caches import Array
from simulmt.runtime.ctc import CTCDecoder, CTCSentence
from simulmt.runtime.decoding import Due, Written, log_softmax
from simulmt.runtime.rules import NO_RULES, DecodingRules, RulesConfig
from simulmt.runtime.seq2seq import Row, Seq2SeqDecoder, Seq2SeqSentence, longest_translation
from simulmt.runtime.stream import Translator
from simulmt.runtime.transducer import History, TransducerDecoder, after
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS, START, Tokenizer
from simulmt.train.decode import bleu
from simulmt.train.graph import Precision, context_graph, ctc_graph, decoder_graph, encoder_graph
from simulmt.train.systems import check_vocabularies, load_model, translator_of
from simulmt.train.tune import target_lexicon, tune_blank_penalties

Model = CTCModel | Seq2SeqModel

TOLERANCE = 1e-4  # in log-probability, between fp32 in PyTorch and in onnxruntime, see `_rounding`
RANDOM_SENTENCES = 8
LONGEST_RANDOM = 48
TOGETHER = 6  # sentences compared side by side


@dataclass(frozen=True)
class ExportConfig:
    """How a bundle is to run, and how far int8 may be from the trained model."""

    source_language: str
    target_language: str
    delays: tuple[int, ...] = ()  # none for a full-sentence model
    default_delay: int | None = None  # the first of the delays, if none is given
    blank_penalties: tuple[float, ...] = ()
    rules: RulesConfig = field(default_factory=RulesConfig)
    precision: Precision = "int8"
    longest: int = 256
    least_agreement: float = 0.95  # share of symbols that int8 must choose like the trained model
    most_bleu_lost: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.least_agreement <= 1, f"least_agreement must be in 0..1, got {self.least_agreement}")


class Pair(NamedTuple):
    """The tokens of a source sentence and of a translation, each with its END."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode, its vocabularies, and for the rule unknown_word the words that it may write."""

    model: Model
    source: Tokenizer
    target: Tokenizer
    words: Sequence[str] = ()

    def __post_init__(self) -> None:
        sizes = (self.model.encoder.embedding.num_embeddings, self.model.target_embedding.num_embeddings)
        require(
            sizes == (self.source.size, self.target.size),
            f"the model is for vocabularies of {sizes[0]} and {sizes[1]} pieces, "
            f"not of {self.source.size} and {self.target.size}",
        )
        require(self.source.spaced, "the source vocabulary must be learnt with spaced = true")
        starts = self.model.encoder.word_starts
        require(
            starts is None or starts.bool().tolist() == self.source.word_starts,
            "the model sees words whole, but not those of this source vocabulary: give the one it was trained with",
        )


@torch.inference_mode()
def export(
    trained: Trained,
    directory: Path,
    config: ExportConfig,
    card: str = "",
    development: Sequence[tuple[str, str]] = (),
) -> BundleConfig:
    """Write a bundle; `card` (data, scores, licences) is added to its README, `development` is (source, reference)."""
    if directory.exists():
        raise BundleError(f"{directory}: exists already; remove it or export to another place")
    with replacing_directory(directory) as new, TemporaryDirectory(prefix=".", dir=directory.parent) as exact:
        return _export_checked(trained, new, Path(exact), config, card, development)


def export_run(
    run: Path,
    data: Path,
    directory: Path,
    config: ExportConfig,
    *,
    tune_penalty: bool = False,
    context_weight: float = 1.0,
    card: str = "",
    development: int = 200,
    report: Callable[[str], None] = lambda _: None,
) -> BundleConfig:
    """Export a finished run, given the data directory it was trained on; `development` sentences of it check int8.

    The delays of `config` are those of the run. `tune_penalty` chooses the blank penalty of each by development BLEU.
    `context_weight` scales a transducer's label context, as a language model's weight in shallow fusion.
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
    words = target_lexicon(dataset) if config.rules.unknown_word else []
    if tune_penalty and isinstance(model, CTCModel):
        rules = DecodingRules.of(config.rules, dataset.source_tokenizer, dataset.target_tokenizer, words)
        config = replace(config, blank_penalties=tune_blank_penalties(model, dataset, config.delays, rules, report))
    pairs = (
        list(zip(dataset.dev_sources(), dataset.dev_references[0], strict=True))[:development] if development else []
    )
    trained = Trained(model, dataset.source_tokenizer, dataset.target_tokenizer, words)
    described = export(trained, directory, config, card, pairs)
    write_system_configs(directory)
    return described


def _check_options(model: Model, config: ExportConfig, tune_penalty: bool) -> None:
    if not isinstance(model, CTCModel):
        require(not tune_penalty, "tuning a blank penalty needs a CTC model")
        require(not config.rules.active, f"decoding rules need a CTC model: {', '.join(config.rules.active)}")
    if isinstance(model, TransducerModel):
        on_scores = ", ".join(config.rules.on_scores)
        require(not on_scores, f"decoding rules on scores need a CTC model without label context: {on_scores}")
    config.rules.check_language(config.target_language)
    trained = ", ".join(map(str, config.delays)) or "whole sentences only"
    require(
        config.default_delay is None or config.default_delay in config.delays,
        f"default delay {config.default_delay}: the model was trained for {trained}",
    )
    require(
        len(config.blank_penalties) in (0, len(config.delays)),
        f"{len(config.blank_penalties)} blank penalties: give one for each delay of the model ({trained})",
    )


def _export_checked(
    trained: Trained,
    directory: Path,
    exact_directory: Path,
    config: ExportConfig,
    card: str,
    development: Sequence[tuple[str, str]],
) -> BundleConfig:
    has_words = bool(trained.words) or not trained.target.spaced  # where words in letters are the source's
    require(has_words or not config.rules.unknown_word, "the rule unknown_word needs words: give Trained some")
    described = _describe(trained.model, config)
    is_exact = config.precision == "fp32"
    exact = _write(trained, directory if is_exact else exact_directory, replace(described, precision="fp32"))
    checks = _check_fp32(trained, exact)
    if not is_exact:
        small = _write(trained, directory, described)
        checks |= _check_int8(trained, exact, small, config, development)
    described = replace(described, checks=checks)
    write_description(directory, described, _card(described, card))
    return described


def _describe(model: Model, config: ExportConfig) -> BundleConfig:
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
        rules=config.rules,
    )


def _write(trained: Trained, directory: Path, described: BundleConfig) -> Bundle:
    """A bundle with no card yet."""
    (directory / SOURCE).write_bytes(trained.source.model)
    (directory / TARGET).write_bytes(trained.target.model)
    if described.rules.unknown_word:
        (directory / WORDS).write_text("".join(f"{word}\n" for word in sorted(trained.words)), encoding="utf-8")
    model, longest, precision = trained.model, described.longest, described.precision
    if isinstance(model, CTCModel):
        ctc_graph(model, longest, precision).save(directory / "ctc.onnx")
        if isinstance(model, TransducerModel):
            context_graph(model, precision).save(directory / "context.onnx")
    else:
        encoder_graph(model, longest, precision).save(directory / "encoder.onnx")
        decoder_graph(model, longest_translation(longest) + 1, precision).save(directory / "decoder.onnx")
    write_description(directory, described, card="")
    return Bundle(directory)


def _check_fp32(trained: Trained, bundle: Bundle) -> dict[str, Any]:
    """Hold every log-probability of some random streams to the trained model's."""
    largest = worst = 0.0
    for delay in bundle.config.delays or (None,):
        for expected, found in _log_probabilities(trained, bundle, _random_pairs(trained, bundle), delay):
            errors = np.abs(expected - found).max(-1)
            largest = float(np.maximum(largest, errors.max()))  # unlike max() it passes on NaN
            worst = float(np.maximum(worst, (errors / _rounding(expected)).max()))
    if not worst <= TOLERANCE:
        allowed = TOLERANCE * largest / worst
        raise BundleError(
            f"export refused: onnxruntime is {largest:.1e} off the trained model, more than {allowed:.1e}"
        )
    _check_symbols(trained, bundle)
    return {"fp32_largest_difference": largest}


def _rounding(log_probs: Array) -> Array:
    """How much coarser than usual fp32 is in each row [V]: it rounds by the largest numbers, usually about 10.

    A model that is very sure of itself says -60 to most symbols.
    """
    return np.maximum(np.abs(log_probs).max(-1) / 10, 1)


def _check_symbols(trained: Trained, bundle: Bundle) -> None:
    """Hold the symbols that greedy streams of a CTC model get from the graph to its own, where these are clear."""
    if not isinstance(trained.model, CTCModel):
        return
    decoder = CTCDecoder(bundle, threads=0)
    decoder.rules = NO_RULES  # which are not part of the graph
    sources = [pair.source for pair in _random_pairs(trained, bundle)]
    for delay in bundle.config.delays:
        symbols = _ctc_found(decoder, trained.source, sources, delay, scores=False)
        for tokens, found in zip(sources, symbols, strict=True):
            expected = _ctc_expected(trained.model, tokens, delay, bundle.config.blank_penalty(delay))
            second, best = np.partition(expected, -2)[:, -2:].T
            if np.any((expected.argmax(-1) != found) & (best - second > TOLERANCE * _rounding(expected))):
                raise BundleError(f"export refused: at delay {delay} onnxruntime chooses other symbols than the model")


def _check_int8(
    trained: Trained, exact: Bundle, small: Bundle, config: ExportConfig, development: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Hold the symbols that int8 chooses, and its BLEU on development text, to those of full precision."""
    delay = small.config.default_delay
    pairs = _encoded(trained, development, config.longest) or _random_pairs(trained, small)
    compared = _log_probabilities(trained, small, pairs, delay)
    alike = np.concatenate([expected.argmax(-1) == found.argmax(-1) for expected, found in compared])
    agreement = float(alike.mean())
    if agreement < config.least_agreement:
        raise BundleError(
            f"export refused: int8 chooses {agreement:.1%} of the symbols like the trained model, "
            f"less than {config.least_agreement:.1%}; export in fp32"
        )
    checks: dict[str, Any] = {"int8_agreement": agreement, "int8_symbols_compared": len(alike)}
    return checks | _check_bleu(trained, exact, small, config, development) if development else checks


def _check_bleu(
    trained: Trained, exact: Bundle, small: Bundle, config: ExportConfig, development: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    sources, references = zip(*development, strict=True)
    scores = {}
    for name, bundle in (("fp32", exact), ("int8", small)):
        hypotheses = Translator(bundle).translate("\n".join(sources), bundle.config.default_delay).split("\n")
        scores[name] = bleu(hypotheses, [references], trained.target)
    lost = scores["fp32"] - scores["int8"]
    if lost > config.most_bleu_lost:
        raise BundleError(
            f"export refused: int8 loses {lost:.2f} BLEU on the development text, "
            f"more than {config.most_bleu_lost}; export in fp32"
        )
    return {f"{name}_bleu": score for name, score in scores.items()}


def _encoded(trained: Trained, development: Sequence[tuple[str, str]], longest: int) -> list[Pair]:
    return [
        Pair([*trained.source.encode(source)[: longest - 1], END], [*trained.target.encode(reference)[:longest], END])
        for source, reference in development
    ]


def _random_pairs(trained: Trained, bundle: Bundle) -> list[Pair]:
    generator = np.random.default_rng(0)

    def sentence(vocabulary: int) -> list[int]:
        length = generator.integers(1, min(bundle.config.longest, LONGEST_RANDOM))
        return [*generator.integers(len(SPECIAL_SYMBOLS), vocabulary, length).tolist(), END]

    return [Pair(sentence(trained.source.size), sentence(trained.target.size)) for _ in range(RANDOM_SENTENCES)]


def _log_probabilities(
    trained: Trained, bundle: Bundle, pairs: Sequence[Pair], delay: int | None
) -> Iterator[tuple[Array, Array]]:
    """Of each sentence, the log-probabilities of all symbols by the trained model and by the bundle."""
    if isinstance(trained.model, CTCModel):
        assert delay is not None, "a CTC model has a delay"
        compared = _ctc_log_probabilities(trained, CTCDecoder(bundle, threads=0), pairs, delay)
        if isinstance(trained.model, TransducerModel):
            return _with_context(trained.model, TransducerDecoder(bundle, threads=0), compared)
        return compared
    return _seq2seq_log_probabilities(trained.model, Seq2SeqDecoder(bundle, threads=0), pairs, delay)


def _ctc_log_probabilities(
    trained: Trained, decoder: CTCDecoder, pairs: Sequence[Pair], delay: int
) -> Iterator[tuple[Array, Array]]:
    assert isinstance(trained.model, CTCModel)
    for start in range(0, len(pairs), TOGETHER):
        group = [pair.source for pair in pairs[start : start + TOGETHER]]
        for tokens, found in zip(group, _ctc_found(decoder, trained.source, group, delay), strict=True):
            yield _ctc_expected(trained.model, tokens, delay, decoder.config.blank_penalty(delay)), found


def _with_context(
    model: TransducerModel, decoder: TransducerDecoder, compared: Iterator[tuple[Array, Array]]
) -> Iterator[tuple[Array, Array]]:
    """Add the label context to the scores of frames; both histories are what the trained model writes."""
    embedding, table = model.target_embedding.weight, model.context.table
    for expected, found in compared:
        history: History = (START,) * decoder.symbols
        histories, added = [], np.empty_like(expected)
        for frame, scores in enumerate(expected):
            histories.append(history)
            added[frame] = (model.context(torch.tensor(history), embedding) @ table.T).numpy()
            symbol = int((scores + added[frame]).argmax())
            history = history if symbol == BLANK else after(history, symbol)
        yield log_softmax(expected + added), log_softmax(found + decoder.context_scores(histories))


def _ctc_expected(model: CTCModel, tokens: Sequence[int], delay: int, blank_penalty: float) -> Array:
    logits = model(torch.tensor([tokens]), torch.tensor([len(tokens)]), delay)[0]
    logits[:, BLANK] -= blank_penalty
    return logits.log_softmax(-1).numpy()


def _seq2seq_log_probabilities(
    model: Seq2SeqModel, decoder: Seq2SeqDecoder, pairs: Sequence[Pair], delay: int | None
) -> Iterator[tuple[Array, Array]]:
    for source, target in pairs:
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]), delay)[0]
        yield logits.log_softmax(-1).numpy(), _seq2seq_found(decoder, source, target, delay)


class _Recorded(CTCSentence):
    """A sentence that writes nothing and keeps its frames: symbols, or their log-probabilities."""

    def __init__(self, whole_words: bool, scores: bool) -> None:
        super().__init__(whole_words=whole_words)
        self.wants_scores = scores
        self.frames: list[Array] = []

    def write(self, frames: Array, due: Due) -> Written:
        self.frames.append(frames.copy())
        return Written([], due.position, due.trigger)


def _ctc_found(
    decoder: CTCDecoder, source: Tokenizer, sentences: Sequence[Sequence[int]], delay: int, scores: bool = True
) -> list[Array]:
    """By the runtime, all sentences side by side and word by word."""
    recorded = [_Recorded(decoder.config.whole_words, scores) for _ in sentences]
    parted = [source.split_to_word_tokens(tokens[:-1]) for tokens in sentences]
    for index in range(max(map(len, parted)) + 1):
        for sentence, words in zip(recorded, parted, strict=True):
            if index < len(words):
                sentence.read(words[index], delay)
            elif not sentence.closed:
                sentence.close(delay)
        while due := [sentence for sentence in recorded if sentence.is_due]:
            decoder.advance(due)
    return [np.concatenate(sentence.frames) for sentence in recorded]


def _seq2seq_found(decoder: Seq2SeqDecoder, tokens: Sequence[int], target: Sequence[int], delay: int | None) -> Array:
    """By the runtime, forced to write `target`."""
    sentence = Seq2SeqSentence(beam=1)
    sentence.tokens = list(tokens)
    decoder.caches.reserve(sentence.slot, max(len(tokens), len(target)))
    found = []
    for position, last in enumerate([START, *target[:-1]]):
        visible = min(len(tokens), position + delay) if delay else len(tokens)
        decoder.read({sentence: visible})
        row = Row(sentence.slot, last, Due(position, visible, visible - 1, delay or 0))
        found.append(log_softmax(decoder.predict([row], "scores")))
    return np.concatenate(found)


def _card(described: BundleConfig, text: str) -> str:
    """The model card: what is known of the bundle itself, then what the caller says of data, scores and licences."""
    delays = ", ".join(map(str, described.delays)) or "none: it waits for the end of each sentence"
    lines = [
        f"# {described.source_language} to {described.target_language}, {described.kind}",
        "",
        f"A model for simulmt, {described.precision}.",
        "",
        f"- delays: {delays}",
        f"- longest sentence: {described.longest} source pieces",
        *(
            [f"- blank penalties: {', '.join(map(str, described.blank_penalties))}"]
            if described.blank_penalties
            else []
        ),
        *(["- sees words whole"] if described.whole_words else []),
        *(f"- decoding rule {rule}: {_setting(getattr(described.rules, rule))}" for rule in described.rules.active),
        *(f"- {name.replace('_', ' ')}: {value:.6g}" for name, value in described.checks.items()),
    ]
    return "\n".join(lines) + "\n" + (f"\n{text.strip()}\n" if text.strip() else "")


def _setting(value: float | bool) -> str:
    return "on" if value is True else f"{value:g}"
