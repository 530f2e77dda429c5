"""The commands evaluate and compare."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulmt.cli.common import Directories, UnitChoice, parse_numbers
from simulmt.errors import needs_extra

if TYPE_CHECKING:
    from simulmt.eval.results import Result

COLUMNS = {  # heading: field of a result
    **{name: name for name in ("BLEU", "chrF2", "BP", "AL", "LAAL", "DAL", "AP")},
    "repeated": "repeated_words",
    "unknown": "unknown_words",
    "numbers %": "numbers_percent",
    "negations %": "negations_percent",
    "AL_CA ms": "AL_CA",
    "ms/piece": "compute_ms_median",
    "p99": "compute_ms_p99",
}
SPEECH_QUALITY = {
    "WER": "word_error_rate",
    "BLEU": "BLEU",
    "whole": "BLEU_whole",
    "bare": "BLEU_bare",
    "clean": "BLEU_clean",
}


class TableFormat(enum.StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def evaluate(
    source: Annotated[Path, typer.Option(help="Source text of the test set, one sentence per line.")],
    reference: Annotated[list[Path], typer.Option(help="Reference translation, one per line; repeatable.")],
    output: Annotated[Path, typer.Option(help="Results directory; results of other systems in it are kept.")],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Name of a shipped model, or path of a bundle; repeatable."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:DELAY]=PATH", help="SimulEval log of a system; repeatable."),
    ] = None,
    delay: Annotated[str, typer.Option(metavar="K,K,...", help="Delays to evaluate. Default: all of each model.")] = "",
    unit: Annotated[UnitChoice, typer.Option(help="Unit of target length in latency metrics.")] = UnitChoice.AUTO,
    test_set: Annotated[str, typer.Option(help="Name of the test set. Default: name of the source file.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N sentences.")] = None,
    lexicon: Annotated[
        Path | None,
        typer.Option(help="Text in the target language, such as the training text; words not in it count as unknown."),
    ] = None,
    timed: Annotated[int, typer.Option(min=0, help="Number of sentences to time; 0 for none.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="Timing runs per sentence.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 uses all cores.")] = 2,
    stop_at_end: Annotated[
        bool,
        typer.Option(
            "--stop-at-end",
            help="wait-k: stop when the model predicts END, as in the paper, instead of reading on.",
        ),
    ] = False,
    words_per_second: Annotated[
        float, typer.Option(min=0.1, help="Speaking rate assumed by the speech-paced lag.")
    ] = 2.5,
    audio: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Score speech: directory of WAV files, one per sentence in order of name, or espeak-ng.",
        ),
    ] = None,
    recogniser: Annotated[str, typer.Option(metavar="NAME[:DIR]", help="Speech recogniser for --audio.")] = "moonshine",
    show: Annotated[
        bool, typer.Option("--show", help="Print every sentence with its translations and references.")
    ] = False,
) -> None:
    """Score models, or SimulEval logs, for quality and latency.

    For a system with one model per delay, repeat --model with the same NAME.

    --audio translates a recording as a live stream, and writes word error rate, BLEU of recognised and clean text,
    StreamLAAL, lag by cause, real-time factor and memory to OUTPUT/speech.json.
    """
    with needs_extra("simulmt evaluate", "eval"):
        from simulmt.data.corpus import read_lines
        from simulmt.eval.flaws import Lexicon, listing
        from simulmt.eval.run import Evaluator, Timing, bundle_jobs, check_jobs, log_job, read_test_set, run_jobs
    from rich.console import Console

    jobs = [*bundle_jobs(model or [], parse_numbers("--delay", delay)), *map(log_job, log or [])]
    check_jobs(jobs)
    timing = Timing(timed, runs, words_per_second)
    sentences = read_test_set(source, reference, test_set, limit)
    if audio is not None:
        from simulmt.eval.speech import run_speech_jobs  # not available on Windows

        with Console(stderr=True).status("") as status:
            scores = run_speech_jobs(jobs, sentences, audio, recogniser, threads, output, status.update)
        _print_speech(scores)
        return
    known = None if lexicon is None else Lexicon(read_lines(lexicon))
    with Console(stderr=True).status("") as status:
        evaluator = Evaluator(sentences, unit.value, timing, status.update, known, stop_at_end)
        evaluations = run_jobs(evaluator, jobs, threads, output)
    _print_results([evaluation.result for evaluation in evaluations])
    if show:
        hypotheses = {evaluation.result.name: evaluation.hypotheses for evaluation in evaluations}
        typer.echo("\n" + "\n".join(listing(sentences.sources, hypotheses, sentences.references)))


def _print_speech(results: Sequence[dict[str, Any]]) -> None:
    from simulmt.cli.display import print_table

    _, *causes = results[0]["lag"]
    rows = [
        [
            scores["system"],
            str(scores["delay"] or ""),
            *(f"{scores[field]:.1f}" for field in SPEECH_QUALITY.values()),
            *(f"{value:.0f}" for value in (scores["stream_laal"], *scores["lag"].values())),
            f"{scores['recognition_rtf'] + scores['translation_rtf']:.2f}",
            f"{scores['cpu_rtf']:.2f}",
            f"{scores['peak_memory_mb']:.0f}",
        ]
        for scores in results
    ]
    print_table(("system", "k", *SPEECH_QUALITY, "StreamLAAL ms", "lag ms", *causes, "RTF", "CPU", "MB"), rows)


def compare(
    directories: Directories,
    baseline: Annotated[str | None, typer.Option(help="Baseline system. Default: the first one.")] = None,
    format: Annotated[TableFormat, typer.Option(help="Output format.")] = TableFormat.TABLE,
    output: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
) -> None:
    """Test differences between systems for significance (paired bootstrap, per delay)."""
    with needs_extra("simulmt compare", "eval"):
        from simulmt.eval import quality
    from simulmt.cli.display import print_table

    comparisons = quality.compare(directories, baseline)
    if output is not None:
        output.write_text(quality.markdown(comparisons), encoding="utf-8")
    if format is TableFormat.MARKDOWN:
        typer.echo(quality.markdown(comparisons), nl=False)
    elif format is TableFormat.JSON:
        for comparison in comparisons:
            typer.echo(json.dumps(quality.as_json(comparison), ensure_ascii=False))
    else:
        print_table(quality.HEADINGS, [comparison.cells() for comparison in comparisons])
        typer.echo(f"* p < {quality.SIGNIFICANT}")
        typer.echo("\n".join(quality.signatures(comparisons)))


def _print_results(results: Sequence[Result]) -> None:
    from simulmt.cli.display import print_table

    rows = [[result.name, *(_figure(getattr(result, field)) for field in COLUMNS.values())] for result in results]
    print_table(("system", *COLUMNS), rows)
    typer.echo("\n".join(dict.fromkeys(result.signature for result in results)))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"
