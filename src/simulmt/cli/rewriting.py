"""The commands that make new training text from old: rewrite distil, pseudo, reorder, speech, weigh, join."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from simulmt.cli import panels
from simulmt.cli.evaluation import UnitChoice
from simulmt.cli.inputs import require_vocabularies
from simulmt.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from simulmt.model.beam import BeamConfig
    from simulmt.train.rewrite import Unit
    from simulmt.train.shards import Progress

GUESSED_FROM = 10_000  # lines, to see whether text is written without spaces
BATCH_TOKENS = {"cuda": 65_536, "cpu": 2_048}
SECONDS_BETWEEN_LINES = 30.0  # of a log that is no screen

Run = Annotated[Path, typer.Argument(help="A finished run, or a directory with model.json.")]
Data = Annotated[Path, typer.Option(help="Data directory it was trained on; its two vocabularies are used.")]
Source = Annotated[Path, typer.Option(help="Source text, one sentence a line; plain, .gz or .xz.")]
Output = Annotated[Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.source, PREFIX.target and PREFIX.json.")]
Beam = Annotated[int, typer.Option(min=1, help="Width of the beam.")]
LengthPenalty = Annotated[float, typer.Option(min=0, help="Scores are divided by length to this power.")]
MaxRatio = Annotated[float, typer.Option(min=0, help="Longest translation: this times the source's pieces ...")]
MaxExtra = Annotated[int, typer.Option(min=0, help="... plus this.")]
BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Source pieces translated together.", show_default="65536 on a GPU, 2048 on a CPU"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a result or unfinished work of another kind.")]

app = typer.Typer(
    name="rewrite",
    no_args_is_help=True,
    help="Make new training text from old: distil, pseudo, reorder, speech, weigh, join.\n\nEvery command goes on "
    "where a killed one was, and returns at once when its result is there. Several processes share the work of one "
    "command: start it under torchrun --nproc-per-node N -m -- simulmt, or several times.",
)


def register(application: typer.Typer) -> None:
    """Add this module's commands to the application."""
    application.add_typer(app, rich_help_panel=panels.TRAIN)


@app.command()
def distil(
    run: Run,
    data: Data,
    source: Source,
    output: Output,
    beam: Beam = 5,
    length_penalty: LengthPenalty = 1.5,
    max_ratio: MaxRatio = 1.2,
    max_extra: MaxExtra = 10,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Pair each source sentence with its translation by a teacher (sequence-level distillation).

    Empty sentences, those of more than 1024 pieces and those without a translation are left out of both files; their
    lines are listed in PREFIX.json.
    """
    with _needing_train("simulmt rewrite distil"):
        from simulmt.model.beam import BeamConfig
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra)
    _translate(run, data, source, output, search, None, batch_tokens, device, overwrite)


@app.command()
def pseudo(
    run: Run,
    data: Data,
    source: Source,
    output: Output,
    delay: Annotated[int, typer.Option(min=1, help="The k that the wait-k policy translates with.")] = 9,
    beam: Beam = 1,
    length_penalty: LengthPenalty = 1.0,
    max_ratio: MaxRatio = 1.2,
    max_extra: MaxExtra = 10,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Pair each source sentence with its translation by a wait-k model (pseudo references).

    Without a beam they are what a live stream would write; with one, a translation may end before all was read. They go
    with the distilled pairs: add them to those with `simulmt rewrite join`.
    """
    with _needing_train("simulmt rewrite pseudo"):
        from simulmt.model.beam import BeamConfig
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra, reads_on=beam == 1)
    _translate(run, data, source, output, search, delay, batch_tokens, device, overwrite)


@app.command()
def reorder(
    source: Source,
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    output: Output,
    links: Annotated[
        Path | None,
        typer.Option(
            help="Word alignments in Pharaoh format (0-0 1-2), counted from 0, line by line.",
            show_default="eflomal makes them, and PREFIX.links keeps them",
        ),
    ] = None,
    source_unit: Annotated[UnitChoice, typer.Option(help="What the source is aligned in.")] = UnitChoice.AUTO,
    target_unit: Annotated[UnitChoice, typer.Option(help="What the target is aligned in.")] = UnitChoice.AUTO,
    cut_chinese: Annotated[
        bool, typer.Option("--cut-chinese", help="Cut a Chinese target into words first, with jieba.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Put the words of each target sentence into the order of the source words they translate.

    A word with several links goes by the last, one without any stays behind its predecessor. Words are what is between
    spaces. In text written without spaces every ideograph counts as one, unless --cut-chinese keeps words whole; they
    are written without spaces again.
    """
    with _needing_train("simulmt rewrite reorder"):
        from simulmt.train.rewrite import reorder_corpus
        from simulmt.train.shards import WRITTEN, alone, refuse_own_inputs, writing

    refuse_own_inputs(output, (source, target), (*WRITTEN, "words", "links"))
    with writing(output), alone(output):
        if cut_chinese:
            target, target_unit = _cut(target, output.with_name(f"{output.name}.words"), overwrite), UnitChoice.WORD
        units = _unit(source, source_unit), _unit(target, target_unit)
        aligned = links or _align(source, target, units, output.with_name(f"{output.name}.links"), overwrite)
    display = _Display(source)
    display.summarise(output, reorder_corpus(source, target, aligned, output, units, overwrite, display))


@app.command()
def speech(
    source: Source,
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    output: Output,
    share: Annotated[float, typer.Option(help="Share of the pairs, drawn at random.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Another seed, other pairs.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Write some pairs with their source as a speech recogniser would give it: lower case, no punctuation.

    Added to the pairs themselves with `simulmt rewrite join`, they make a model that punctuates on its own.
    """
    with _needing_train("simulmt rewrite speech"):
        from simulmt.train.rewrite import SpeechConfig, speech_corpus

    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0 and at most 1")
    display = _Display()
    display.summarise(output, speech_corpus(source, target, output, SpeechConfig(share, seed), overwrite, display))


@app.command()
def weigh(
    source: Source,
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    labels: Annotated[Path, typer.Option(help="A label for each pair, line by line: where it comes from, say.")],
    output: Output,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=NUMBER",
            help="How often its pairs are taken: 2 twice, 0.5 a random half of them, 0 none; may be repeated.",
        ),
    ] = None,
    others: Annotated[float, typer.Option(min=0, help="The weight of all other labels.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed, other pairs.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Take pairs more or less often by where they come from, or only those of some origins.

    What a model is to be good at counts more, and text whose licence does not suit you not at all.
    """
    with _needing_train("simulmt rewrite weigh"):
        from simulmt.train.rewrite import WeighingConfig, weigh_corpus

    weights = [_weight(each) for each in weight or []]
    twice = [label for label, count in Counter(label for label, _ in weights).items() if count > 1]
    if twice:
        raise ConfigError(f"--weight: {', '.join(twice)} has more than one")
    config = WeighingConfig(dict(weights), others, seed)
    display = _Display()
    display.summarise(output, weigh_corpus(source, target, labels, output, config, overwrite, display))


def _weight(text: str) -> tuple[str, float]:
    label, _, number = text.rpartition("=")
    try:
        if label.strip():
            return label.strip(), float(number)
    except ValueError:
        pass
    raise ConfigError(f"--weight {text}: expected LABEL=NUMBER, such as news=2")


@app.command()
def join(
    source: Annotated[list[Path], typer.Option(help="Source side of a set; may be repeated.")],
    target: Annotated[list[Path], typer.Option(help="Its target side, as many files in the same order.")],
    output: Output,
    repeat: Annotated[
        list[int] | None, typer.Option(min=1, help="How often a set is taken, once for each set.", show_default="1")
    ] = None,
    limit: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Pairs taken from its beginning, once for each set; 0 for all.", show_default="0"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write several sets of sentence pairs into one, set after set."""
    with _needing_train("simulmt rewrite join"):
        from simulmt.train.rewrite import JoinedSet, join_corpora

    repeats, limits = repeat or [1] * len(source), limit or [0] * len(source)
    for option, values in (("--target", target), ("--repeat", repeats), ("--limit", limits)):
        if len(values) != len(source):
            raise ConfigError(f"{len(source)} --source but {len(values)} {option}; give one for each set")
    sets = [JoinedSet(*each) for each in zip(source, target, repeats, limits, strict=True)]
    display = _Display()
    display.summarise(output, join_corpora(sets, output, overwrite, display))


def _translate(
    run: Path,
    data: Path,
    source: Path,
    output: Path,
    search: BeamConfig,
    delay: int | None,
    batch_tokens: int | None,
    device: str,
    overwrite: bool,
) -> None:
    from simulmt.train.rewrite import TranslationConfig, translate_corpus
    from simulmt.train.world import join_world

    require_vocabularies(data)
    with join_world(device) as world:
        tokens = BATCH_TOKENS[world.device.type] if batch_tokens is None else batch_tokens
        config = TranslationConfig(search, delay, tokens)
        display = _Display(source, quiet=not world.is_first)
        record = translate_corpus(run, data, source, output, config, world.device, overwrite, display)
    display.summarise(output, record)


def _cut(target: Path, words: Path, overwrite: bool) -> Path:
    from simulmt.corpus import file_sha256, read_lines
    from simulmt.eval.aligners import cut_chinese
    from simulmt.train.shards import keep

    return keep(
        words, {"target": file_sha256(target)}, overwrite, lambda: map(" ".join, cut_chinese(read_lines(target)))
    )


def _unit(path: Path, choice: UnitChoice) -> Unit:
    from simulmt.corpus import read_lines
    from simulmt.eval.aligners import guess_unit

    if choice is UnitChoice.AUTO:
        return guess_unit(islice(read_lines(path), GUESSED_FROM))
    return cast("Unit", choice.value)


def _align(source: Path, target: Path, units: Sequence[Unit], links: Path, overwrite: bool) -> Path:
    """Alignments by eflomal, which draws at random, so they are made only once."""
    from simulmt.alignment import format_pharaoh
    from simulmt.corpus import ParallelFiles, file_sha256
    from simulmt.eval.aligners import align_with_eflomal, alignment_words
    from simulmt.train.shards import keep

    def align() -> Iterator[str]:
        typer.echo(f"{links}: aligning with eflomal ...", err=True)
        pairs = [
            (alignment_words(pair.source, units[0]), alignment_words(pair.target, units[1]))
            for pair in ParallelFiles(source, target).pairs()
        ]
        return map(format_pharaoh, align_with_eflomal(pairs))

    facts = {"source": file_sha256(source), "target": file_sha256(target), "units": [*units]}
    return keep(links, facts, overwrite, align)


class _Display:
    """Shows how far the work is, on a screen all the time and in a log now and then, and at the end what came of it."""

    def __init__(self, source: Path | None = None, quiet: bool = False) -> None:
        from rich.console import Console

        from simulmt.corpus import read_lines

        self._console = Console(stderr=True, quiet=quiet, markup=False, highlight=False)
        self._total = "" if source is None or quiet else f" of {sum(1 for _ in read_lines(source)):,}"
        self._shown = time.monotonic()
        self._speed = ""

    def __call__(self, progress: Progress) -> None:
        self._speed = f"; {progress.sentences_per_second:,.0f} sentences/s"
        text = f"{progress.lines:,}{self._total} lines{self._speed}"
        if self._console.is_terminal:
            self._console.print(text, end="\r")
        elif time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._console.print(text)
            self._shown = time.monotonic()

    def summarise(self, output: Path, record: dict[str, Any]) -> None:
        left = ", ".join(f"{len(lines):,} {reason}" for reason, lines in record["left"].items()) or "none"
        kept = f"{output}: {record['kept']:,} of {record['lines']:,} pairs; left out: {left}{self._speed}"
        self._console.print(kept, soft_wrap=True)


@contextmanager
def _needing_train(command: str) -> Iterator[None]:
    """An import that fails because of the missing extra says what to install."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("simulmt"):
            raise
        raise MissingExtraError(command, "train") from None
