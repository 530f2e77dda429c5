"""Export a trained model to a bundle that runs without PyTorch, after checking that their outputs match.

The checks are in simulmt.train.export_checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from simulmt.config import require
from simulmt.data.store import Dataset
from simulmt.errors import BundleError
from simulmt.files import replacing_directory
from simulmt.model.ctc import CTCModel
from simulmt.model.transducer import TransducerModel
from simulmt.runtime.bundle import (
    FORMAT,
    GRAPHS,
    SOURCE,
    TARGET,
    WORDS,
    Bundle,
    BundleConfig,
    write_description,
    write_system_configs,
)
from simulmt.runtime.rules import DecodingRules, RulesConfig, frequent_words
from simulmt.train.decode import tune_blank_penalties
from simulmt.train.export_checks import TrainedModel, check_fp32, check_int8
from simulmt.train.graph import Precision, build_graph
from simulmt.train.systems import InferenceModel, check_vocabularies, load_model, translator_of


@dataclass(frozen=True)
class ExportConfig:
    """Settings of a bundle, and tolerances of its int8 checks."""

    source_language: str
    target_language: str
    delays: tuple[int, ...] = ()  # empty for a full-sentence model
    default_delay: int | None = None  # by default the first of the delays
    blank_penalties: tuple[float, ...] = ()
    agreements: tuple[int, ...] = ()  # of the policy of a wait-k model
    confidences: tuple[float, ...] = ()
    rules: RulesConfig = field(default_factory=RulesConfig)
    precision: Precision = "int8"
    longest: int = 256
    least_agreement: float = 0.95  # minimum share of symbols on which int8 and the trained model agree
    most_bleu_lost: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.least_agreement <= 1, f"least_agreement must be in 0..1, got {self.least_agreement}")


@torch.inference_mode()
def export(
    trained: TrainedModel,
    directory: Path,
    config: ExportConfig,
    card: str = "",
    development: Sequence[tuple[str, str]] = (),
) -> BundleConfig:
    """Write a bundle; `card` (data, scores, licences) is added to its README, `development` is (source, reference)."""
    if directory.exists():
        raise BundleError(f"{directory}: already exists; remove it or choose another directory")
    has_words = (
        bool(trained.words) or not trained.target.spaced
    )  # without spaces, Latin words are copied from the source
    require(has_words or not config.rules.unknown_word, "the rule unknown_word needs TrainedModel.words")
    described = _describe(trained.model, config)
    is_exact = config.precision == "fp32"
    with replacing_directory(directory) as new, TemporaryDirectory(prefix=".", dir=directory.parent) as other:
        exact = _write(trained, new if is_exact else Path(other), replace(described, precision="fp32"))
        checks = check_fp32(trained, exact)
        if not is_exact:
            small = _write(trained, new, described)
            checks |= check_int8(trained, exact, small, development, config.least_agreement, config.most_bleu_lost)
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
    development: int = 200,
    report: Callable[[str], None] = lambda _: None,
) -> BundleConfig:
    """Export a finished run, given its data directory; int8 is checked on the first `development` dev sentences.

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
    words = target_lexicon(dataset) if config.rules.unknown_word else []
    if tune_penalty and isinstance(model, CTCModel):
        rules = DecodingRules.of(config.rules, dataset.source_tokenizer, dataset.target_tokenizer, words)
        config = replace(config, blank_penalties=tune_blank_penalties(model, dataset, config.delays, rules, report))
    pairs = list(islice(zip(dataset.dev_sources(), dataset.dev_references[0], strict=True), development))
    trained = TrainedModel(model, dataset.source_tokenizer, dataset.target_tokenizer, words)
    described = export(trained, directory, config, card, pairs)
    write_system_configs(directory)
    return described


def target_lexicon(dataset: Dataset) -> list[str]:
    """Return the words that are too frequent in the training targets to be errors.

    Targets without spaces have no lexicon: their Latin words are copied from the source, whose words are always known,
    and a list would admit any prefix of its entries.
    """
    if not dataset.target_tokenizer.spaced:
        return []
    decode, train = dataset.target_tokenizer.decode, dataset.train
    return frequent_words(decode(train.pair(index)[1].tolist()) for index in range(len(train)))


def _check_options(model: InferenceModel, config: ExportConfig, tune_penalty: bool) -> None:
    if not isinstance(model, CTCModel):
        require(not tune_penalty, "tuning a blank penalty needs a CTC model")
        require(not config.rules.active, f"decoding rules need a CTC model: {', '.join(config.rules.active)}")
    if isinstance(model, TransducerModel):
        on_scores = ", ".join(config.rules.on_scores)
        require(not on_scores, f"decoding rules on scores need a CTC model without label context: {on_scores}")
    else:
        require(not config.rules.early_full_stop, "the decoding rule early_full_stop needs a transducer")
    config.rules.check_language(config.target_language)
    trained = ", ".join(map(str, config.delays)) or "full sentences only"
    require(
        config.default_delay is None or config.default_delay in config.delays,
        f"default delay {config.default_delay}: the model was trained for {trained}",
    )
    for name in ("blank_penalties", "agreements", "confidences"):
        count = len(getattr(config, name))
        listed = name.replace("_", " ")
        require(count in (0, len(config.delays)), f"{count} {listed}: give one for each delay of the model ({trained})")
    is_wait_k = not isinstance(model, CTCModel) and model.encoder.causal
    require(is_wait_k or not config.agreements, "agreements and confidences need a wait-k model")
    require(
        len(config.agreements) == len(config.confidences), "agreements and confidences are given together, or neither"
    )


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
        agreements=config.agreements,
        confidences=config.confidences,
        rules=config.rules,
    )


def _write(trained: TrainedModel, directory: Path, described: BundleConfig) -> Bundle:
    """Write a bundle without a model card."""
    (directory / SOURCE).write_bytes(trained.source.model)
    (directory / TARGET).write_bytes(trained.target.model)
    if described.rules.unknown_word:
        (directory / WORDS).write_text("".join(f"{word}\n" for word in sorted(trained.words)), encoding="utf-8")
    for name in GRAPHS[described.kind]:
        graph = build_graph(name, trained.model, described.longest, described.precision)
        graph.save(directory / f"{name}.onnx")
    write_description(directory, described, card="")
    return Bundle(directory)


def _card(described: BundleConfig, text: str) -> str:
    """Return the model card: the settings of the bundle, then `text` on data, scores and licences."""
    delays = ", ".join(map(str, described.delays)) or "none (full sentences)"
    penalties, agreements, confidences = (
        ", ".join(map(str, each)) for each in (described.blank_penalties, described.agreements, described.confidences)
    )
    lines = [
        f"# {described.source_language} to {described.target_language}, {described.kind}",
        "",
        f"A model for simulmt, {described.precision}.",
        "",
        f"- delays: {delays}",
        f"- longest sentence: {described.longest} source pieces",
        *([f"- blank penalties: {penalties}"] if penalties else []),
        *([f"- policy: agreement {agreements}, confidence {confidences}"] if agreements else []),
        *(["- sees words whole"] if described.whole_words else []),
        *(f"- decoding rule {rule}: {_setting(getattr(described.rules, rule))}" for rule in described.rules.active),
        *(f"- {name.replace('_', ' ')}: {value:.6g}" for name, value in described.checks.items()),
    ]
    return "\n".join(lines) + "\n" + (f"\n{text.strip()}\n" if text.strip() else "")


def _setting(value: float | bool) -> str:
    return "on" if value is True else f"{value:g}"
