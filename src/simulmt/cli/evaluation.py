"""The commands that score systems: evaluate, compare."""

from __future__ import annotations

import enum
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from simulmt.cli import panels
from simulmt.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from simulmt.eval.evaluate import Evaluation, Evaluator
    from simulmt.eval.results import Result
    from simulmt.runtime.bundle import Bundle

COLUMNS = {  # heading: field of a result
    **{name: name for name in ("BLEU", "chrF2", "BP", "AL", "LAAL", "DAL", "AP")},
    "twice": "written_twice",
    "torn": "torn_words",
    "AL_CA ms": "AL_CA",
    "ms/piece": "compute_ms_median",
    "p99": "compute_ms_p99",
}
WIDEST = 300  # better a table that the terminal wraps than one with figures cut off
_LOG = re.compile(r"(?P<system>[^=:]+)(?::(?P<delay>[1-9][0-9]*))?=(?P<path>.+)")


class UnitChoice(enum.StrEnum):
    AUTO = "auto"
    WORD = "word"
    CHAR = "char"


class TableFormat(enum.StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


class BundleJob(NamedTuple):
    """A bundle to be scored at a delay."""

    system: str
    delay: int | None
    bundle: Bundle


class LogJob(NamedTuple):
    """A log to be scored."""

    system: str
    delay: int | None
    path: Path


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (evaluate, compare):
        app.command(rich_help_panel=panels.MEASURE)(command)


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
    delay: Annotated[str, typer.Option(metavar="K,K,...", help="Delays; all of each model if not given.")] = "",
    unit: Annotated[UnitChoice, typer.Option(help="What the target is counted in for latency.")] = UnitChoice.AUTO,
    test_set: Annotated[str, typer.Option(help="Name of the test set; that of its source file if not given.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first sentences only.")] = None,
    lexicon: Annotated[
        Path | None, typer.Option(help="Target text, such as that of training; words it does not have count as torn.")
    ] = None,
    timed: Annotated[int, typer.Option(min=0, help="Sentences that computation is timed on; 0 for none.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="How often each of them is timed.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with; 0 takes all cores.")] = 2,
    words_per_second: Annotated[
        float, typer.Option(min=0.1, help="Pace of the speaker in the speech-paced lag.")
    ] = 2.5,
) -> None:
    """Score models, or logs of SimulEval, for quality and latency.

    A system whose delays are models of their own is given by several --model options with the same name.
    """
    try:
        from simulmt.corpus import read_lines
        from simulmt.eval.evaluate import Evaluator, Timing, read_test_set
        from simulmt.eval.flaws import Lexicon
    except ImportError as error:
        raise _missing("simulmt evaluate", error) from None
    from rich.console import Console

    from simulmt.eval.results import require_room

    jobs = _jobs(model or [], log or [], delay)
    timing = Timing(timed, runs, words_per_second)
    sentences = read_test_set(source, reference, test_set, limit)
    known = None if lexicon is None else Lexicon(read_lines(lexicon))
    require_room(output, sentences.name)
    results = []
    with Console(stderr=True).status("") as status:
        evaluator = Evaluator(sentences, unit.value, timing, status.update, known)
        for evaluation in _evaluations(evaluator, jobs, threads):
            evaluation.write(output)
            results.append(evaluation.result)
    _print_results(results)


def compare(
    directories: Annotated[list[Path], typer.Argument(help="Results directories of `simulmt evaluate`.")],
    baseline: Annotated[
        str | None, typer.Option(help="System that the others are held to; the first if not given.")
    ] = None,
    format: Annotated[TableFormat, typer.Option(help="How it is printed.")] = TableFormat.TABLE,
    output: Annotated[Path | None, typer.Option(help="Markdown file to write it to as well.")] = None,
) -> None:
    """Tell which differences between systems are significant: paired bootstrap, delay by delay."""
    try:
        from simulmt.eval import compare as comparing
    except ImportError as error:
        raise _missing("simulmt compare", error) from None

    comparisons = comparing.compare(directories, baseline)
    if output is not None:
        output.write_text(comparing.markdown(comparisons), encoding="utf-8")
    if format is TableFormat.MARKDOWN:
        typer.echo(comparing.markdown(comparisons), nl=False)
    elif format is TableFormat.JSON:
        for comparison in comparisons:
            typer.echo(json.dumps(comparing.as_json(comparison), ensure_ascii=False))
    else:
        _print_table(comparing.HEADINGS, [comparison.cells() for comparison in comparisons])
        typer.echo(f"* p < {comparing.SIGNIFICANT}")
        typer.echo("\n".join(comparing.signatures(comparisons)))


def _jobs(models: Sequence[str], logs: Sequence[str], delay: str) -> list[BundleJob | LogJob]:
    jobs: list[BundleJob | LogJob] = [*_bundle_jobs(models, _parse_delays(delay)), *map(_log_job, logs)]
    if not jobs:
        raise ConfigError("nothing to score: give --model or --log")
    seen = set()
    for job in jobs:
        if job[:2] in seen:
            raise ConfigError(f"system {job.system} is there twice at delay {job.delay}; name one of them: NAME=...")
        seen.add(job[:2])
    return jobs


def _bundle_jobs(models: Sequence[str], delays: Sequence[int]) -> Iterator[BundleJob]:
    from simulmt.eval.results import check_system_name
    from simulmt.runtime.bundle import Bundle, find

    systems: defaultdict[str, list[Bundle]] = defaultdict(list)
    for text in models:
        name, equals, path = ("", "", text) if Path(text).exists() else text.partition("=")
        bundle = Bundle(find(path if equals else text))
        systems[check_system_name(name if equals else bundle.name)].append(bundle)
    for system, bundles in systems.items():
        trained = {k for bundle in bundles for k in bundle.config.delays}
        if trained and not trained.issuperset(delays):
            known = ", ".join(map(str, sorted(trained)))
            raise ConfigError(f"--delay {','.join(map(str, delays))}: {system} was trained for {known}")
        for bundle in bundles:
            chosen = [k for k in delays or bundle.config.delays if k in bundle.config.delays]
            yield from (BundleJob(system, k, bundle) for k in (chosen if bundle.config.delays else [None]))


def _log_job(text: str) -> LogJob:
    from simulmt.eval.results import check_system_name

    match = _LOG.fullmatch(text)
    if match is None:
        raise ConfigError(f"--log {text}: expected NAME:DELAY=PATH, or NAME=PATH for a system without delay")
    delay = int(match["delay"]) if match["delay"] else None
    return LogJob(check_system_name(match["system"]), delay, Path(match["path"]))


def _parse_delays(text: str) -> list[int]:
    if not text:
        return []
    if not re.fullmatch(r"\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*", text):
        raise ConfigError(f"--delay {text}: expected delays from 1 on, parted by commas, such as 1,3,5")
    return list(dict.fromkeys(map(int, text.split(","))))


def _evaluations(evaluator: Evaluator, jobs: Sequence[BundleJob | LogJob], threads: int) -> Iterator[Evaluation]:
    from simulmt.stream import Translator

    translator: Translator | None = None
    for job in jobs:
        if isinstance(job, LogJob):
            yield evaluator.log(job.system, job.path, job.delay)
            continue
        if translator is None or translator.bundle is not job.bundle:
            translator = Translator(job.bundle, threads)
        yield evaluator.bundle(job.system, translator, job.delay, threads)


def _print_results(results: Sequence[Result]) -> None:
    rows = [[result.name, *(_figure(getattr(result, field)) for field in COLUMNS.values())] for result in results]
    _print_table(("system", *COLUMNS), rows)
    typer.echo("\n".join(dict.fromkeys(result.signature for result in results)))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(width=WIDEST).print(table)


def _missing(command: str, error: ImportError) -> Exception:
    """An import that failed because of the missing extra, or, if it is something else, that error itself."""
    return error if (error.name or "").startswith("simulmt") else MissingExtraError(command, "eval")
