"""The command `simulmt export`: from a training run to a bundle that runs without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.cli import panels
from simulmt.cli.inputs import require_vocabularies
from simulmt.errors import ConfigError, DataError, MissingExtraError

if TYPE_CHECKING:
    from simulmt.dataset import Dataset
    from simulmt.model.ctc import CTCModel
    from simulmt.runtime.wording import Wording

# Of the blank's logit, for --tune-penalty to choose from: the surer a model is of itself, the larger its best one.
PENALTIES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)


class Precision(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"


def register(app: typer.Typer) -> None:
    """Add this module's command to the application."""
    app.command(rich_help_panel=panels.TRAIN)(export)


def export(
    model: Annotated[Path, typer.Argument(help="A finished run, or the directory of a trained model.")],
    data: Annotated[Path, typer.Option(help="Data directory that it was trained on, for its vocabularies.")],
    output: Annotated[Path, typer.Option(help="Bundle directory to write.")],
    source_language: Annotated[str, typer.Option(help="Language code, e.g. en.")],
    target_language: Annotated[str, typer.Option(help="Language code, e.g. zh.")],
    precision: Annotated[Precision, typer.Option(help="int8 is several times smaller and faster.")] = Precision.INT8,
    default_delay: Annotated[
        int | None, typer.Option(help="Delay to use if none is asked for; else the first it was trained for.")
    ] = None,
    blank_penalty: Annotated[
        list[float] | None,
        typer.Option(help="CTC: what to take off the blank's score, once for each delay that it was trained for."),
    ] = None,
    tune_penalty: Annotated[
        bool,
        typer.Option(
            "--tune-penalty",
            help="CTC: choose the blank penalty of each delay by BLEU on the development set, beside the others.",
        ),
    ] = False,
    repeat_penalty: Annotated[
        float,
        typer.Option(min=0.0, help="CTC: what a piece pays that would write again what was written last; try 6."),
    ] = 0.0,
    word_penalty: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="CTC: what a piece pays that would make a word that neither training text nor source has; try 10. "
            "Where the target has no spaces, only the source's words count.",
        ),
    ] = 0.0,
    longest: Annotated[int, typer.Option(min=2, help="Source pieces after which a sentence is cut.")] = 256,
    development: Annotated[
        int, typer.Option(min=0, help="Development sentences on which int8 is held to full precision.")
    ] = 200,
    card: Annotated[
        Path | None, typer.Option(help="Text for the model card: data, scores, licences; Markdown.")
    ] = None,
) -> None:
    """Turn a trained model into a bundle that runs without PyTorch.

    Nothing is written unless the bundle agrees with the trained model.

    \b
    Example:
      simulmt export runs/en-zh --data data/en-zh --output en-zh --source-language en --target-language zh
      echo "Good morning." | simulmt translate --model ./en-zh
    """
    try:
        from simulmt.dataset import Dataset
        from simulmt.eval.system_dir import write_system_configs
        from simulmt.model.ctc import CTCModel
        from simulmt.runtime.wording import Wording
        from simulmt.train.export import ExportConfig, Trained
        from simulmt.train.export import export as export_bundle
        from simulmt.train.systems import check_vocabularies, load_model, translator_of
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("simulmt"):
            raise
        raise MissingExtraError("simulmt export", "train") from None

    network, system = load_model(model)
    require_vocabularies(data)
    dataset = Dataset.open(data)
    check_vocabularies(model, system, data, dataset.source_tokenizer, dataset.target_tokenizer)
    translator = translator_of(network)
    if tune_penalty and (blank_penalty or not isinstance(translator, CTCModel)):
        raise ConfigError("--tune-penalty: for a CTC model and without --blank-penalty only")
    for option, penalty in (("--repeat-penalty", repeat_penalty), ("--word-penalty", word_penalty)):
        if penalty and not isinstance(translator, CTCModel):
            raise ConfigError(f"{option}: for a CTC model only")
    delays = () if system.system == "teacher" else system.delays
    _check_delays(delays, default_delay, blank_penalty or [])
    words = _frequent_words(dataset) if word_penalty else []
    if tune_penalty and isinstance(translator, CTCModel):
        penalties = {"repeat_penalty": repeat_penalty, "word_penalty": word_penalty}
        wording = Wording.of(dataset.source_tokenizer, dataset.target_tokenizer, **penalties, words=words)
        blank_penalty = [_best_penalty(translator, dataset, delay, wording) for delay in delays]
    trained = Trained(translator, dataset.source_tokenizer, dataset.target_tokenizer, words)
    described = export_bundle(
        trained,
        output,
        ExportConfig(
            source_language,
            target_language,
            delays=delays,
            default_delay=default_delay,
            blank_penalties=tuple(blank_penalty or ()),
            repeat_penalty=repeat_penalty,
            word_penalty=word_penalty,
            precision=precision.value,
            longest=longest,
        ),
        "" if card is None else _read(card),
        _development_text(dataset, development),
    )
    write_system_configs(output)
    checks = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in described.checks.items())
    typer.echo(f"{output}: {described.kind} {described.precision}; {checks}", err=True)


def _check_delays(delays: Sequence[int], default: int | None, penalties: Sequence[float]) -> None:
    trained = ", ".join(map(str, delays)) or "whole sentences only"
    if default is not None and default not in delays:
        raise ConfigError(f"--default-delay {default}: the model was trained for {trained}")
    if penalties and len(penalties) != len(delays):
        raise ConfigError(f"{len(penalties)} --blank-penalty: give one for each delay of the model ({trained})")


def _best_penalty(model: CTCModel, dataset: Dataset, delay: int, wording: Wording | None) -> float:
    """The blank penalty that scores best on the development set, the smallest of equals."""
    import torch

    from simulmt.train.batches import DeviceStore
    from simulmt.train.decode import scores_by_blank_penalty

    dev = DeviceStore(dataset.dev, torch.device("cpu"))
    scores = scores_by_blank_penalty(
        model, dev, delay, PENALTIES, dataset.dev_references, dataset.target_tokenizer, wording=wording
    )
    best = max(scores, key=lambda penalty: (scores[penalty], -penalty))
    shown = ", ".join(f"{penalty:g}: {score:.2f}" for penalty, score in scores.items())
    typer.echo(f"k={delay}: development BLEU by blank penalty {shown}", err=True)
    return best


def _frequent_words(dataset: Dataset) -> list[str]:
    """The words that the training text has often enough to be no slips of it.

    Text without spaces has none of its own: a word in letters is a name or a term of the source there, and the
    source's words count as known anyway. A list would let any fragment pass that begins like one of its terms.
    """
    from simulmt.runtime.wording import frequent_words

    if not dataset.target_tokenizer.spaced:
        return []
    decode, train = dataset.target_tokenizer.decode, dataset.train
    return frequent_words(decode(train.pair(index)[1].tolist()) for index in range(len(train)))


def _development_text(dataset: Dataset, count: int) -> list[tuple[str, str]]:
    """The first development pairs; a data directory keeps the source as tokens only."""
    sources = (
        dataset.source_tokenizer.decode(dataset.dev.pair(index)[0].tolist()) for index in range(len(dataset.dev))
    )
    return list(zip(sources, dataset.dev_references[0][:count], strict=False))


def _read(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{card}: cannot be read as text: {error}") from None
