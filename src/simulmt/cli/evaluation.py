"""The evaluation commands: evaluate, compare, plot, report, anticipation and analyse."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulmt.cli.training import print_note
from simulmt.errors import ConfigError, MissingExtraError, needs_extra

if TYPE_CHECKING:
    from simulmt.data.alignment import Link, WordPair
    from simulmt.eval.order import OracleScore, SortedSentence
    from simulmt.eval.report.blocks import Aligner
    from simulmt.eval.results import Result
    from simulmt.eval.run import TestSet
    from simulmt.train.analysis import Sorter

COLUMNS = {  # heading: field of a result
    **{name: name for name in ("BLEU", "chrF2", "BP", "AL", "LAAL", "DAL", "AP")},
    "repeated": "repeated_words",
    "unknown": "unknown_words",
    "numbers %": "numbers_percent",
    "negations %": "negations_percent",
    "AL_CA ms": "AL_CA",
    "ms/token": "compute_ms_median",
    "p99": "compute_ms_p99",
}
SPEECH_QUALITY = {
    "WER": "word_error_rate",
    "BLEU": "BLEU",
    "whole": "BLEU_whole",
    "bare": "BLEU_bare",
    "clean": "BLEU_clean",
}
Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Results directories written by `simulmt evaluate`.")
]
Baseline = Annotated[str | None, typer.Option(help="Baseline system.")]
Sentences = Annotated[
    str, typer.Option(metavar="N,N,...", help="Line numbers of test sentences to show, starting at 1.")
]
Data = Annotated[Path | None, typer.Option(help="Data directory of the training run, if it has moved.")]
Device = Annotated[str, typer.Option(help="Device for the sorting network: auto, cpu, cuda or cuda:N.")]


class UnitChoice(enum.StrEnum):
    AUTO = "auto"
    WORD = "word"
    CHAR = "char"


class TableFormat(enum.StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def evaluate(
    source: Annotated[Path, typer.Option(help="Source text of the test set, one sentence per line.")],
    reference: Annotated[list[Path], typer.Option(help="Reference translation, one per line; repeatable.")],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Results directory; results of other systems in it are kept.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Name of a shipped model, or path of a bundle; repeatable."),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:DELAY]=PATH", help="SimulEval log of a system; repeatable."),
    ] = None,
    delay: Annotated[
        str, typer.Option(metavar="K,K,...", help="Delays to evaluate. Default: all delays of each model.")
    ] = "",
    unit: Annotated[UnitChoice, typer.Option(help="Unit of target length in latency metrics.")] = UnitChoice.AUTO,
    test_set: Annotated[str, typer.Option(help="Name of the test set. Default: name of the source file.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N sentences.")] = None,
    lexicon: Annotated[
        Path | None,
        typer.Option(help="Text in the target language, such as the training text; words not in it count as unknown."),
    ] = None,
    timed: Annotated[int, typer.Option(min=0, help="Number of sentences to time; 0 for none.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="Timing runs per sentence.")] = 3,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads, at most one per core; 0 uses OMP_NUM_THREADS, or all cores.")
    ] = 2,
    stop_at_end: Annotated[
        bool,
        typer.Option(
            "--stop-at-end",
            help="wait-k: stop when the model predicts END, as in the paper, instead of reading on.",
        ),
    ] = False,
    segment: Annotated[
        bool,
        typer.Option(
            "--segment",
            help="Models only: split lines into sentences at punctuation, as live streams do.",
        ),
    ] = False,
    words_per_second: Annotated[
        float, typer.Option(min=0.1, help="Assumed speaking rate, for the lag in seconds.")
    ] = 2.5,
    audio: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Evaluate on speech: a directory of WAV files, one per sentence, sorted by name, or espeak-ng.",
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
        from simulmt.eval.quality import Lexicon, listing
        from simulmt.eval.run import Evaluator, Timing, bundle_jobs, check_jobs, log_job, read_test_set, run_jobs
    from rich.console import Console

    jobs = [*bundle_jobs(model or [], _parse_numbers("--delay", delay)), *map(log_job, log or [])]
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
        evaluator = Evaluator(sentences, unit.value, timing, status.update, known, stop_at_end, print_note, segment)
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
        output.write_text(quality.comparison_markdown(comparisons), encoding="utf-8")
    if format is TableFormat.MARKDOWN:
        typer.echo(quality.comparison_markdown(comparisons), nl=False)
    elif format is TableFormat.JSON:
        for comparison in comparisons:
            typer.echo(json.dumps(quality.comparison_json(comparison), ensure_ascii=False))
    else:
        print_table(quality.COMPARISON_HEADINGS, [comparison.cells() for comparison in comparisons])
        typer.echo(f"* p < {quality.SIGNIFICANT}")
        typer.echo("\n".join(quality.comparison_signatures(comparisons)))


def _print_results(results: Sequence[Result]) -> None:
    from simulmt.cli.display import print_table

    rows = [[result.name, *(_format_cell(getattr(result, field)) for field in COLUMNS.values())] for result in results]
    print_table(("system", *COLUMNS), rows)
    typer.echo("\n".join(dict.fromkeys(result.signature for result in results)))


def _format_cell(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def plot(
    directories: Directories,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Output directory for the plots.")],
    baseline: Baseline = None,
    sentences: Sentences = "",
    alignments: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Alignments that `simulmt report` wrote, to draw into read/write paths."),
    ] = None,
) -> None:
    """Plot quality against latency, and any other results found, as SVG and PNG.

    --baseline adds plots of n-gram precision gained over that system; --sentences adds read/write paths of those
    sentences.
    """
    with needs_extra("simulmt plot", "eval"):
        from simulmt.eval.report.plots import draw_all, save_figures
    figures = draw_all(directories, baseline, _parse_numbers("--sentences", sentences), alignments)
    save_figures(figures, output, print_note)


def report(
    directories: Directories,
    output: Annotated[Path, typer.Option(help="HTML file to write; a Markdown file is written next to it.")],
    title: Annotated[str, typer.Option(help="Title of the report.")] = "",
    about: Annotated[list[str] | None, typer.Option(help="Introductory paragraph; repeatable.")] = None,
    baseline: Baseline = None,
    examples: Annotated[int, typer.Option(min=0, help="Example sentences per test set.")] = 5,
    sentences: Sentences = "",
    delay: Annotated[int | None, typer.Option(min=1, help="Delay of the example translations.")] = None,
    align: Annotated[
        bool, typer.Option("--align/--no-align", help="Align translations with eflomal to mark hallucinations.")
    ] = True,
) -> None:
    """Write results as one self-contained HTML page and Markdown tables.

    --baseline adds significance tests. Alignments are cached in the directory alignments next to the report.
    """
    with needs_extra("simulmt report", "eval"):
        from simulmt.eval.report.page import ReportOptions, build_report
    from rich.console import Console
    from rich.markup import escape

    named = {"title": title} if title else {}
    options = ReportOptions(
        **named,
        about=tuple(about or ()),
        baseline=baseline,
        examples=examples,
        sentences=_parse_numbers("--sentences", sentences),
        delay=delay,
    )
    aligner, cache = _eflomal() if align else None, output.parent / "alignments"
    with Console(stderr=True).status("") as status:
        built = build_report(directories, options, aligner, cache, lambda text: status.update(escape(text)))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(built.html, encoding="utf-8")
    output.with_suffix(".md").write_text(built.markdown, encoding="utf-8")
    typer.echo(f"{output} and {output.with_suffix('.md')}", err=True)


def anticipation(
    source: Annotated[Path, typer.Option(help="Source text, one sentence per line.")],
    target: Annotated[Path, typer.Option(help="Target text, one sentence per line.")],
    aligner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:PATH]",
            help="eflomal, pharaoh:FILE, awesome:MODEL, asn:RUN, or identity:RUN (control with Z = I); repeatable.",
            show_default="eflomal",
        ),
    ] = None,
    gold: Annotated[
        Path | None, typer.Option(help="Gold alignments: i-j for sure links, ipj or i?j for possible ones.")
    ] = None,
    gold_base: Annotated[
        int, typer.Option(min=0, max=1, help="Index of the first word in the gold alignments (0 or 1).")
    ] = 1,
    gold_target_first: Annotated[
        bool, typer.Option("--gold-target-first", help="Gold links are target-source instead of source-target.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output directory for plots, JSON and alignments.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the corpus. Default: name of the source file.")] = "",
    source_unit: Annotated[UnitChoice, typer.Option(help="Unit of source positions.")] = UnitChoice.AUTO,
    target_unit: Annotated[UnitChoice, typer.Option(help="Unit of target positions.")] = UnitChoice.AUTO,
    more_source: Annotated[Path | None, typer.Option(help="Additional source text to train eflomal on.")] = None,
    more_target: Annotated[Path | None, typer.Option(help="Translation of --more-source.")] = None,
    priors: Annotated[Path | None, typer.Option(help="Priors file written by eflomal-makepriors.")] = None,
    delay: Annotated[int | None, typer.Option(min=1, help="Delay of the sorting network.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Compute k-anticipation rates for k = 1 to 9, and alignment error rates.

    Rates are also given with target positions scaled to the source length. Units are words, or characters in text
    written without spaces. With --gold, the text must have the tokenisation that the annotators used. eflomal is
    stochastic: on a few hundred sentences, rates vary by a few points between runs. Add text with --more-source, or
    reuse alignments with --aligner pharaoh:FILE.
    """
    with needs_extra("simulmt anticipation", "eval"):
        from simulmt.data.alignment import read_word_pairs
        from simulmt.eval.order import ParallelText, write_anticipation
        from simulmt.eval.report.blocks import anticipation_table
        from simulmt.eval.report.plots import anticipation_figure, save_figures
    from simulmt.cli.display import print_table

    if (more_source is None) != (more_target is None):
        raise ConfigError("--more-source and --more-target go together: give both or neither")
    text = ParallelText.read(
        source, target, (source_unit.value, target_unit.value), gold, gold_base, gold_target_first, name
    )
    more = read_word_pairs(more_source, more_target, text.units) if more_source and more_target else []
    choices = aligner or ["eflomal"]
    alignments = {choice: _align(choice, text.pairs, more, priors, data, delay, device) for choice in choices}
    records = text.anticipation(alignments)
    table = anticipation_table(records)
    print_table(table.headings, table.rows, table.names)
    if output is not None:
        write_anticipation(output, records, alignments)
        save_figures([(f"{text.name}-anticipation", anticipation_figure(records))], output, print_note)


def analyse(
    run: Annotated[Path, typer.Argument(help="A finished ctc+asn run.")],
    source: Annotated[Path, typer.Option(help="Source text, one sentence per line.")],
    reference: Annotated[
        list[Path],
        typer.Option(
            help="Reference translation; the first is shown to the network, all are used for scoring; repeatable."
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Results directory.")],
    delay: Annotated[
        str, typer.Option(metavar="K,K,...", help="Delays to analyse. Default: all delays of the model.")
    ] = "",
    blank_penalty: Annotated[float, typer.Option(help="Penalty subtracted from the blank's score.")] = 0.0,
    sentences: Sentences = "",
    test_set: Annotated[str, typer.Option(help="Name of the test set. Default: name of the source file.")] = "",
    name: Annotated[str, typer.Option(help="Name of the model. Default: name of the run.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N sentences.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Analyse a sorting network: oracle order, distance of Z from the identity, heat maps of Z.

    Oracle order translates with the Z that the network infers from the reference: an upper bound, not a system.
    """
    with needs_extra("simulmt analyse", "train,eval"):
        from simulmt.eval.report.blocks import oracle_table, sorting_table
        from simulmt.eval.report.plots import heat_map_figures, save_figures
        from simulmt.eval.results import write_records
        from simulmt.eval.run import read_test_set
        from simulmt.train.analysis import Sorter
        from simulmt.train.run import init_distributed
    from simulmt.cli.display import print_table

    wanted, shown = _parse_numbers("--delay", delay), _parse_numbers("--sentences", sentences)
    texts = read_test_set(source, reference, test_set, limit)
    model = name or run.resolve().name
    with init_distributed(device) as world:
        sorter = Sorter.load(run, data, world.device)
        delays = [_checked_delay(sorter, k) for k in wanted or sorter.delays]
        scores = [_oracle_score(sorter, texts, model, k, blank_penalty) for k in delays]
        sortings = _sortings(sorter, texts, model, delays[0], shown)
    for table in (oracle_table(scores), sorting_table(scores)):
        print_table(table.headings, table.rows, table.names)
    write_records(output, scores)
    if sortings:
        write_records(output, sortings)
        save_figures(heat_map_figures(sortings), output, print_note)


def _align(
    choice: str,
    pairs: Sequence[WordPair],
    more: Sequence[WordPair],
    priors: Path | None,
    data: Path | None,
    delay: int | None,
    device: str,
) -> Sequence[set[Link] | None]:
    from simulmt.data.alignment import align

    kind, _, run = choice.partition(":")
    if kind not in ("asn", "identity") or not run:
        return align(choice, pairs, more, priors)
    with needs_extra("--aligner asn or identity", "train"):
        from simulmt.train.analysis import Sorter, align_words
        from simulmt.train.run import init_distributed
    with init_distributed(device) as world:
        sorter = Sorter.load(Path(run), data, world.device)
        return align_words(sorter, pairs, _checked_delay(sorter, delay), identity=kind == "identity")


def _checked_delay(sorter: Sorter, delay: int | None) -> int:
    try:
        return sorter.delay_or_default(delay)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


def _oracle_score(sorter: Sorter, texts: TestSet, model: str, delay: int, blank_penalty: float) -> OracleScore:
    from simulmt.eval.order import score_oracle
    from simulmt.train.analysis import oracle_order

    oracle, default, statistics = oracle_order(
        sorter, list(zip(texts.sources, texts.references[0], strict=True)), delay, blank_penalty
    )
    return score_oracle(
        texts,
        oracle,
        default,
        model=model,
        delay=delay,
        blank_penalty=blank_penalty,
        diagonal=statistics.diagonal,
        displacement=statistics.displacement,
    )


def _sortings(sorter: Sorter, texts: TestSet, model: str, delay: int, numbers: Sequence[int]) -> list[SortedSentence]:
    from simulmt.eval.order import numbered_pairs, sorted_sentence
    from simulmt.train.analysis import heat_map, sort_pairs

    sortings = sort_pairs(sorter, numbered_pairs(texts, numbers), delay)
    return [
        sorted_sentence(texts.name, model, delay, number, *heat_map(sorter, sorting))
        for number, sorting in zip(numbers, sortings, strict=True)
    ]


def _eflomal() -> Aligner | None:
    """Return eflomal if it is installed; otherwise warn."""
    if find_spec("eflomal") is None:
        print_note(f"hallucinations will not be marked: {MissingExtraError('word alignment with eflomal', 'align')}")
        return None
    from simulmt.data.alignment import align_with_eflomal

    return align_with_eflomal


def _parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of positive integers, without duplicates; empty text gives none."""
    if not re.fullmatch(r"(\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*)?", text):
        raise ConfigError(f"{option} {text}: expected comma-separated whole numbers from 1, such as 1,3,5")
    return tuple(dict.fromkeys(map(int, text.split(",")))) if text.strip() else ()
