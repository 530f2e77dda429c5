"""The commands that look at results: plot, report, anticipation, analyse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from simulmt.cli import panels
from simulmt.cli.evaluation import UnitChoice
from simulmt.errors import ConfigError, DataError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulmt.alignment import Link
    from simulmt.eval.aligners import WordPair
    from simulmt.eval.evaluate import TestSet
    from simulmt.eval.examples import Aligner
    from simulmt.eval.records import Anticipation, OracleScore, SortedSentence
    from simulmt.eval.results import Unit
    from simulmt.eval.tables import Table
    from simulmt.train.analysis import Sorter

Directories = Annotated[list[Path], typer.Argument(help="Results directories of `simulmt evaluate`.")]
Baseline = Annotated[str | None, typer.Option(help="System that the others are compared with.")]
Sentences = Annotated[str, typer.Option(metavar="N,N,...", help="Lines of the test set to look at, from 1.")]
Data = Annotated[Path | None, typer.Option(help="Data directory of a training run, if it has moved since.")]
Device = Annotated[str, typer.Option(help="Where a sorting network is run: auto, cpu, cuda or cuda:N.")]

WIDEST_TABLE = 1000  # characters; no screen is so wide, so that no column is squeezed


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (plot, report, anticipation, analyse):
        app.command(rich_help_panel=panels.MEASURE)(command)


def plot(
    directories: Directories,
    output: Annotated[Path, typer.Option(help="Directory for the pictures.")],
    baseline: Baseline = None,
    sentences: Sentences = "",
) -> None:
    """Draw quality against latency, and all else that the directories hold results of, as SVG and PNG.

    --baseline adds the n-gram precision that every other system gains over it, --sentences the read/write path of
    those sentences by every system at every delay.
    """
    try:
        from simulmt.eval.gallery import draw_gallery
    except ImportError as error:
        raise _missing("simulmt plot", error, "eval") from None
    _save(draw_gallery(directories, baseline, _numbers("--sentences", sentences)), output)


def report(
    directories: Directories,
    output: Annotated[Path, typer.Option(help="HTML file to write; the Markdown goes beside it.")],
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "",
    about: Annotated[list[str] | None, typer.Option(help="A paragraph to open it with; may be repeated.")] = None,
    baseline: Baseline = None,
    examples: Annotated[int, typer.Option(min=0, help="Sentences to show of each test set.")] = 5,
    sentences: Sentences = "",
    delay: Annotated[int | None, typer.Option(min=1, help="Delay at which they are shown.")] = None,
    align: Annotated[
        bool, typer.Option("--align/--no-align", help="Align the translations with eflomal, to mark hallucinations.")
    ] = True,
) -> None:
    """Make one self-contained HTML page, and Markdown tables, of results on disk.

    --baseline adds significance tests. Alignments are kept in the results directories; the next report reads them.
    """
    try:
        from simulmt.eval.report import ReportOptions, build_report
    except ImportError as error:
        raise _missing("simulmt report", error, "eval") from None

    named = {"title": title} if title else {}
    options = ReportOptions(
        **named,
        about=tuple(about or ()),
        baseline=baseline,
        examples=examples,
        sentences=_numbers("--sentences", sentences),
        delay=delay,
    )
    made = build_report(directories, options, _eflomal() if align else None)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(made.html, encoding="utf-8")
    output.with_suffix(".md").write_text(made.markdown, encoding="utf-8")
    typer.echo(f"{output} and {output.with_suffix('.md')}", err=True)


def anticipation(
    source: Annotated[Path, typer.Option(help="Source text, one sentence a line.")],
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    aligner: Annotated[
        list[str] | None,
        typer.Option(help="eflomal, pharaoh:FILE, awesome:MODEL or asn:RUN; may be repeated.", show_default="eflomal"),
    ] = None,
    gold: Annotated[Path | None, typer.Option(help="Alignments made by hand: i-j sure, ipj or i?j possible.")] = None,
    gold_base: Annotated[int, typer.Option(min=0, max=1, help="What the first word is called in them.")] = 1,
    gold_target_first: Annotated[
        bool, typer.Option("--gold-target-first", help="They name the target word first.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Directory for figures, JSON and alignments.")] = None,
    name: Annotated[str, typer.Option(help="Name of the corpus; that of its source file if not given.")] = "",
    source_unit: Annotated[UnitChoice, typer.Option(help="What the source is counted in.")] = UnitChoice.AUTO,
    target_unit: Annotated[UnitChoice, typer.Option(help="What the target is counted in.")] = UnitChoice.AUTO,
    more_source: Annotated[Path | None, typer.Option(help="More text for eflomal to learn from.")] = None,
    more_target: Annotated[Path | None, typer.Option(help="Its translation.")] = None,
    priors: Annotated[Path | None, typer.Option(help="Priors for eflomal, made by eflomal-makepriors.")] = None,
    delay: Annotated[int | None, typer.Option(min=1, help="Delay of a sorting network.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure how much a corpus must be anticipated: k-AR for k from 1 to 9, and the error rate of its alignments.

    Words are what is between spaces; text written without spaces is counted in characters. Text that is to be held to
    --gold must be tokenised as it was for those who aligned it. eflomal draws at random: two runs differ a little.
    """
    try:
        from simulmt.eval.aligners import read_gold
        from simulmt.eval.evaluate import sha256
        from simulmt.eval.records import measure_anticipation
    except ImportError as error:
        raise _missing("simulmt anticipation", error, "eval") from None

    if (more_source is None) != (more_target is None):
        raise ConfigError("--more-source and --more-target go together: give both or neither")
    pairs, units = _read_pairs(source, target, source_unit, target_unit)
    more = _read_pairs(more_source, more_target, *units)[0] if more_source and more_target else []
    by_hand = read_gold(gold, pairs, gold_base, gold_target_first) if gold else None
    corpus = name or source.name.partition(".")[0]
    files = {str(path): sha256(path) for path in (source, target, gold) if path}
    found = {
        choice: _align(choice, pairs, more, priors, _Network(data, delay, device)) for choice in aligner or ["eflomal"]
    }
    records = [measure_anticipation(corpus, choice, units, links, by_hand, files) for choice, links in found.items()]
    if by_hand:
        records.append(measure_anticipation(corpus, "gold", units, [sure for sure, _ in by_hand], None, files))
    _show_anticipation(records, found, output)


def analyse(
    run: Annotated[Path, typer.Argument(help="A finished training run of a ctc+asn system.")],
    source: Annotated[Path, typer.Option(help="Source text, one sentence a line.")],
    reference: Annotated[
        list[Path], typer.Option(help="Its translation, line by line; the network sees the first, all are scored.")
    ],
    output: Annotated[Path, typer.Option(help="Results directory for the figures.")],
    delay: Annotated[str, typer.Option(metavar="K,K,...", help="Delays; all of the model if not given.")] = "",
    blank_penalty: Annotated[float, typer.Option(help="What is taken off the blank's score.")] = 0.0,
    sentences: Sentences = "",
    test_set: Annotated[str, typer.Option(help="Name of the test set; that of its source file if not given.")] = "",
    name: Annotated[str, typer.Option(help="Name of the model; that of its run if not given.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Score the first sentences only.")] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Look into a sorting network: translation in oracle order beside the default, and Z as a heat map.

    Oracle order shows the reference to the network and translates with the Z it finds; it is a bound, not a system.
    """
    try:
        from simulmt.eval.evaluate import read_test_set
        from simulmt.eval.gallery import sorting_figure
        from simulmt.eval.records import write_records
        from simulmt.eval.tables import oracle_table
        from simulmt.train.analysis import Sorter
        from simulmt.train.world import join_world
    except ImportError as error:
        raise _missing("simulmt analyse", error, "train,eval") from None

    texts = read_test_set(source, reference, test_set, limit)
    model = name or run.resolve().name
    with join_world(device) as world:
        sorter = Sorter.load(run, data, world.device)
        delays = [_checked_delay(sorter, k) for k in _numbers("--delay", delay) or sorter.delays]
        scores = [_oracle_score(sorter, texts, model, k, blank_penalty) for k in delays]
        sortings = _sortings(sorter, texts, model, delays[0], _numbers("--sentences", sentences))
    _print(oracle_table(scores))
    write_records(output, scores)
    if sortings:
        write_records(output, sortings)
        named = ((f"{each.test_set}-line{each.number}-{model}-k{each.delay}-Z", each) for each in sortings)
        _save(((stem, sorting_figure(each)) for stem, each in named), output)


class _Network(NamedTuple):
    """How a sorting network is run."""

    data: Path | None
    delay: int | None
    device: str


def _align(
    choice: str, pairs: Sequence[WordPair], more: Sequence[WordPair], priors: Path | None, network: _Network
) -> Sequence[set[Link] | None]:
    from simulmt.eval.aligners import align_with_awesome, align_with_eflomal, read_pharaoh

    kind, _, where = choice.partition(":")
    if choice == "eflomal":
        return align_with_eflomal(pairs, more, priors)
    if kind == "pharaoh" and where:
        return read_pharaoh(Path(where), pairs)
    if kind == "awesome" and where:
        return align_with_awesome(pairs, Path(where))
    if kind == "asn" and where:
        return _align_with_network(pairs, Path(where), network)
    raise ConfigError(f"--aligner {choice}: expected eflomal, pharaoh:FILE, awesome:MODEL or asn:RUN")


def _align_with_network(pairs: Sequence[WordPair], run: Path, network: _Network) -> Sequence[set[Link] | None]:
    try:
        from simulmt.train.analysis import Sorter, align_words
        from simulmt.train.world import join_world
    except ImportError as error:
        raise _missing("--aligner asn", error, "train") from None
    with join_world(network.device) as world:
        sorter = Sorter.load(run, network.data, world.device)
        return align_words(sorter, pairs, _checked_delay(sorter, network.delay))


def _checked_delay(sorter: Sorter, delay: int | None) -> int:
    try:
        return sorter.delay_or_default(delay)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


def _read_pairs(
    source: Path, target: Path, source_unit: str, target_unit: str
) -> tuple[list[WordPair], tuple[Unit, Unit]]:
    """The pairs of two files as words, and the units they are counted in."""
    from simulmt.corpus import ParallelFiles
    from simulmt.eval.aligners import alignment_words, guess_unit

    pairs = list(ParallelFiles(source, target).pairs())
    units = [
        guess_unit(texts) if unit == "auto" else cast("Unit", str(unit))
        for unit, texts in ((source_unit, (p.source for p in pairs)), (target_unit, (p.target for p in pairs)))
    ]
    split = [(alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1])) for pair in pairs]
    return [*split], (units[0], units[1])


def _show_anticipation(
    records: Sequence[Anticipation], found: Mapping[str, Sequence[set[Link] | None]], output: Path | None
) -> None:
    from simulmt.alignment import format_pharaoh
    from simulmt.eval.gallery import anticipation_rates
    from simulmt.eval.plots import anticipation_figure
    from simulmt.eval.records import write_records
    from simulmt.eval.tables import anticipation_table

    _print(anticipation_table(records))
    if output is None:
        return
    write_records(output, records)
    corpus = records[0].corpus
    for choice, alignments in found.items():
        lines = (f"{format_pharaoh(links or ())}\n" for links in alignments)
        (output / f"{_file_name(f'{corpus}-{choice}')}.links").write_text("".join(lines), encoding="utf-8")
    _save([(f"{corpus}-anticipation", anticipation_figure(anticipation_rates(records)))], output)


def _oracle_score(sorter: Sorter, texts: TestSet, model: str, delay: int, blank_penalty: float) -> OracleScore:
    from simulmt.eval.records import OracleScore
    from simulmt.eval.score import QualityScorer
    from simulmt.train.analysis import oracle_order

    pairs = list(zip(texts.sources, texts.references[0], strict=True))
    translated = oracle_order(sorter, pairs, delay, blank_penalty)
    scorer = QualityScorer(texts.references, "word" if sorter.target.spaced else "char")
    oracle, default = scorer.score(translated.oracle), scorer.score(translated.default)
    return OracleScore(
        test_set=texts.name,
        model=model,
        delay=delay,
        blank_penalty=blank_penalty,
        sentences=len(pairs),
        oracle_BLEU=oracle.scores["BLEU"].value,
        oracle_interval=oracle.scores["BLEU"].interval,
        oracle_BP=oracle.brevity_penalty,
        default_BLEU=default.scores["BLEU"].value,
        default_interval=default.scores["BLEU"].interval,
        default_BP=default.brevity_penalty,
        signature=oracle.scores["BLEU"].signature,
    )


def _sortings(sorter: Sorter, texts: TestSet, model: str, delay: int, numbers: Sequence[int]) -> list[SortedSentence]:
    from simulmt.eval.records import SortedSentence
    from simulmt.train.analysis import heat_map, sort_pairs

    if numbers and max(numbers) > len(texts.sources):
        raise DataError(f"--sentences {max(numbers)}: {texts.name} has {len(texts.sources)} sentences")
    pairs = [(texts.sources[number - 1], texts.references[0][number - 1]) for number in numbers]
    records = []
    for number, sorting in zip(numbers, sort_pairs(sorter, pairs, delay), strict=True):
        drawn = heat_map(sorter, sorting)
        Z = tuple(tuple(round(float(cell), 4) for cell in row) for row in drawn.Z)
        records.append(SortedSentence(texts.name, model, delay, number, tuple(drawn.columns), tuple(drawn.rows), Z))
    return records


def _eflomal() -> Aligner | None:
    """eflomal where it is installed; what is lost without it is said."""
    if find_spec("eflomal") is None:
        typer.echo(f"no words will be marked: {MissingExtraError('word alignment by eflomal', 'align')}", err=True)
        return None
    from simulmt.eval.aligners import align_with_eflomal

    return align_with_eflomal


def _save(figures: Iterable[tuple[str, Figure]], directory: Path) -> None:
    """Write pictures and say where they are; advice that holds for many of them is given once."""
    from simulmt.eval.figure import save_figure

    advice = None
    for stem, figure in figures:
        saved = save_figure(figure, directory / _file_name(stem))
        advice = advice or saved.advice
        typer.echo(" ".join(map(str, saved.paths)), err=True)
    if advice:
        typer.echo(f"simulmt: {advice}", err=True)


def _file_name(text: str) -> str:
    """The text without what would make it a path or hard to type."""
    return re.sub(r"[^\w.+=-]+", "-", text)


def _print(table: Table) -> None:
    """Print a table; one that is wider than the screen keeps its columns whole."""
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(box=None)
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="left" if number < table.names else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    Console(width=WIDEST_TABLE).print(shown)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*)?", text):
        raise ConfigError(f"{option} {text}: expected whole numbers from 1, parted by commas, such as 1,3,5")
    return tuple(dict.fromkeys(map(int, text.split(",")))) if text.strip() else ()


def _missing(command: str, error: ImportError, extra: str) -> Exception:
    """An import that failed because of the missing extra, or, if it is something else, that error itself."""
    return error if (error.name or "").startswith("simulmt") else MissingExtraError(command, extra)
