"""The command `simulmt export`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from simulmt.cli.common import Panel, require_vocabularies
from simulmt.errors import ConfigError, DataError, needs_extra

RULES = "Decoding rules: errors to suppress"


class Precision(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"


def register(app: typer.Typer) -> None:
    """Add this module's command to the application."""
    app.command(rich_help_panel=Panel.TRAIN)(export)


def export(
    model: Annotated[Path, typer.Argument(help="A finished run, or a directory with model.json.")],
    data: Annotated[Path, typer.Option(help="Data directory that the model was trained on.")],
    output: Annotated[Path, typer.Option(help="Bundle directory to create.")],
    source_language: Annotated[str, typer.Option(help="Language code, e.g. en.")],
    target_language: Annotated[str, typer.Option(help="Language code, e.g. zh.")],
    precision: Annotated[
        Precision, typer.Option(help="Weight precision; int8 is several times smaller and faster.")
    ] = Precision.INT8,
    default_delay: Annotated[
        int | None, typer.Option(help="Default delay of the bundle (default: the first of the model).")
    ] = None,
    blank_penalty: Annotated[
        list[float] | None,
        typer.Option(help="CTC: penalty on the blank's logit; give it once for each delay of the model."),
    ] = None,
    tune_penalty: Annotated[
        bool,
        typer.Option(
            "--tune-penalty",
            help="CTC: choose the blank penalty of each delay by BLEU on the development set.",
        ),
    ] = False,
    context_weight: Annotated[
        float, typer.Option(min=0.0, help="Transducer: weight of the label context; above 1, repetitions are rarer.")
    ] = 1.0,
    repeated_symbol: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="PENALTY",
            rich_help_panel=RULES,
            help="CTC: penalty on repeating the last piece or Chinese character; try 6.",
        ),
    ] = 0.0,
    restarted_noun: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="PENALTY",
            rich_help_panel=RULES,
            help="CTC, German to English: penalty on restarting a capitalised word in lower case "
            '("Good Mor morning"); try 6.',
        ),
    ] = 0.0,
    unknown_word: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="PENALTY",
            rich_help_panel=RULES,
            help="CTC: penalty on words that occur neither in the training text nor in the source; try 10. "
            "If the target has no spaces, only the words of the source count.",
        ),
    ] = 0.0,
    doubled_punctuation: Annotated[
        bool,
        typer.Option(
            "--doubled-punctuation",
            rich_help_panel=RULES,
            help="CTC and transducer: drop all but one of several punctuation marks in a row.",
        ),
    ] = False,
    early_full_stop: Annotated[
        bool,
        typer.Option(
            "--early-full-stop",
            rich_help_panel=RULES,
            help="Transducer: write no full-width full stop, question or exclamation mark before the source has one.",
        ),
    ] = False,
    longest: Annotated[
        int, typer.Option(min=2, help="Maximum source pieces per sentence; longer sentences are split.")
    ] = 256,
    development: Annotated[
        int, typer.Option(min=0, help="Development sentences on which int8 is compared with full precision.")
    ] = 200,
    card: Annotated[
        Path | None, typer.Option(help="Markdown file to append to the model card: data, scores, licences.")
    ] = None,
) -> None:
    """Export a trained model as a bundle that runs without PyTorch.

    Nothing is written unless the bundle gives the same output as the trained model.

    \b
    Example:
      simulmt export runs/en-zh --data data/en-zh --output en-zh --source-language en --target-language zh
      echo "Good morning." | simulmt translate --model ./en-zh
    """
    with needs_extra("simulmt export", "train"):
        from simulmt.runtime.rules import RulesConfig
        from simulmt.train.export import ExportConfig, export_run

    require_vocabularies(data)
    if tune_penalty and blank_penalty:
        raise ConfigError("--tune-penalty and --blank-penalty cannot be combined")
    config = ExportConfig(
        source_language,
        target_language,
        default_delay=default_delay,
        blank_penalties=tuple(blank_penalty or ()),
        rules=RulesConfig(repeated_symbol, restarted_noun, unknown_word, doubled_punctuation, early_full_stop),
        precision=precision.value,
        longest=longest,
    )
    described = export_run(
        model,
        data,
        output,
        config,
        tune_penalty=tune_penalty,
        context_weight=context_weight,
        card="" if card is None else _read(card),
        development=development,
        report=partial(typer.echo, err=True),
    )
    checks = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in described.checks.items())
    typer.echo(f"{output}: {described.kind} {described.precision}; {checks}", err=True)


def _read(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{card}: cannot be read as text: {error}") from None
