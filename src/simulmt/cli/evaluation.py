"""The commands that score systems: evaluate, compare."""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from simulmt.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

    from simulmt.eval.results import Result
    from simulmt.stream import Translator

_LOG = re.compile(r"(?P<system>[^=:]+)(?::(?P<delay>[1-9][0-9]*))?=(?P<path>.+)")
_COLUMNS = ("BLEU", "chrF2", "BP", "AL", "LAAL", "DAL", "AP", "AL_CA", "compute_ms_median", "compute_ms_p99")


class UnitChoice(enum.StrEnum):
    AUTO = "auto"
    WORD = "word"
    CHAR = "char"


class TableFormat(enum.StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


class _Log(NamedTuple):
    system: str
    delay: int | None
    path: Path


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (evaluate, compare):
        app.command()(command)


def evaluate(
    source: Annotated[Path, typer.Option(help="Source side of the test set, one sentence a line.")],
    reference: Annotated[list[Path], typer.Option(help="Its translation, line by line; may be repeated.")],
    output: Annotated[Path, typer.Option(help="Results directory; results of other systems there are kept.")],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="A shipped model or the path of a bundle; may be repeated."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:DELAY]=PATH", help="What SimulEval logged of a system; may be repeated."),
    ] = None,
    delay: Annotated[str, typer.Option(metavar="K,K,...", help="Delays; those of each model if not given.")] = "",
    unit: Annotated[UnitChoice, typer.Option(help="What the target is counted in for latency.")] = UnitChoice.AUTO,
    test_set: Annotated[str, typer.Option(help="Name of the test set; that of its source file if not given.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first sentences.")] = None,
    timed: Annotated[int, typer.Option(min=0, help="Sentences that computation is timed on; 0 for none.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="How often each of them is timed.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with; 0 takes all cores.")] = 2,
    words_per_second: Annotated[float, typer.Option(help="Pace of the speaker in the speech-paced lag.")] = 2.5,
) -> None:
    """Score models, or logs of SimulEval, for quality and latency."""
    try:
        from simulmt.eval.evaluate import Evaluator, Timing, read_test_set
    except ImportError as error:
        raise _missing("simulmt evaluate", error) from None
    from rich.console import Console

    import simulmt

    delays, logs = _delays(delay), [_parse_log(text) for text in log or []]
    models = {name: simulmt.load(path, threads) for name, path in _models(model or []).items()}
    if not models and not logs:
        raise ConfigError("nothing to score: give --model or --log")
    work = [(name, k) for name, translator in models.items() for k in _delays_of(translator, delays)]
    _require_distinct([*work, *((entry.system, entry.delay) for entry in logs)])
    timing = Timing(timed, runs, words_per_second)
    results = []
    with Console(stderr=True).status("") as status:
        evaluator = Evaluator(read_test_set(source, reference, test_set, limit), unit.value, timing)
        for name, k in work:
            evaluator.progress = lambda news, name=name, k=k: status.update(f"{_title(name, k)}: {news}")
            evaluation = evaluator.bundle(name, models[name], k, threads)
            evaluation.write(output)
            results.append(evaluation.result)
        for entry in logs:
            evaluation = evaluator.log(entry.system, entry.path, entry.delay)
            evaluation.write(output)
            results.append(evaluation.result)
    _print_results(results)


def compare(
    directories: Annotated[list[Path], typer.Argument(help="Results directories of `simulmt evaluate`.")],
    baseline: Annotated[
        str | None, typer.Option(help="System that the others are held to; the first if not given.")
    ] = None,
    format: Annotated[TableFormat, typer.Option(help="How to print it.")] = TableFormat.TABLE,
) -> None:
    """Tell which differences between systems are significant (paired bootstrap, delay by delay)."""
    try:
        from simulmt.eval import compare as comparing
    except ImportError as error:
        raise _missing("simulmt compare", error) from None

    comparisons = comparing.compare(directories, baseline)
    if format is TableFormat.MARKDOWN:
        typer.echo(comparing.markdown(comparisons), nl=False)
    elif format is TableFormat.JSON:
        for comparison in comparisons:
            typer.echo(json.dumps(comparing.as_json(comparison), ensure_ascii=False))
    else:
        rows = [comparison.cells() for comparison in comparisons]
        _print_table(comparing.HEADINGS, rows, [f"* p < {comparing.SIGNIFICANT}", *comparing.signatures(comparisons)])
