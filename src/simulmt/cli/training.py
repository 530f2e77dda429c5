"""The commands from text files to a trained model: synthetic, prepare, train, sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.cli import panels
from simulmt.cli.inputs import require_file
from simulmt.errors import ConfigError, DataError, MissingExtraError

if TYPE_CHECKING:
    from simulmt.corpus import Corpus

UNSPACED_LANGUAGES = ("zh", "ja", "yue")  # written without spaces between words

Files = Annotated[list[Path] | None, typer.Option(show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. training.seed=2; may be repeated."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (synthetic, prepare, train, sweep):
        app.command(rich_help_panel=panels.TRAIN)(command)


def synthetic(
    output: Annotated[Path, typer.Option(help="Directory to write train, dev and test files into.")],
    reorder: Annotated[
        float, typer.Option(min=0, max=1, help="How far constituents move: 0 not at all, 1 very far.")
    ] = 1.0,
    train: Annotated[int, typer.Option(min=0, help="Training pairs.")] = 20_000,
    dev: Annotated[int, typer.Option(min=0, help="Development pairs.")] = 500,
    test: Annotated[int, typer.Option(min=0, help="Test pairs.")] = 500,
    seed: Annotated[int, typer.Option(help="Another seed, other sentences.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of these names that exist.")] = False,
) -> None:
    """Write a corpus in two invented languages, with its word alignments."""
    from simulmt.synthetic import write_corpus

    write_corpus(output, reorder, train, dev, test, seed, overwrite)
    typer.echo(f"{output}: {train} training, {dev} development and {test} test pairs", err=True)


def prepare(
    output: Annotated[Path, typer.Option(help="Data directory to write; vocabularies found there are used.")],
    dev_source: Annotated[Path | None, typer.Option(help="Source side of the development set; text or .sgm.")] = None,
    dev_target: Annotated[
        list[Path] | None, typer.Option(help="Its target side; repeated, or an .sgm of several, more references.")
    ] = None,
    dev_xml: Annotated[Path | None, typer.Option(help="Or all of it as one XML file, as WMT publishes it.")] = None,
    source: Annotated[
        list[Path] | None, typer.Option(help="Source text, line by line; plain, .gz or .xz; may be repeated.")
    ] = None,
    target: Annotated[list[Path] | None, typer.Option(help="Its translation, as many files in the same order.")] = None,
    tsv: Annotated[
        list[Path] | None, typer.Option(help="Both sides in one file, tab-separated; may be repeated.")
    ] = None,
    tmx: Annotated[list[Path] | None, typer.Option(help="A translation memory, TMX; may be repeated.")] = None,
    vocabularies: Annotated[
        Path | None, typer.Option(help="Data directory whose vocabularies to take instead of learning them.")
    ] = None,
    source_vocabulary: Annotated[int, typer.Option(min=7, help="Pieces in the source vocabulary.")] = 32_000,
    target_vocabulary: Annotated[int, typer.Option(min=7, help="Pieces in the target vocabulary.")] = 32_000,
    source_language: Annotated[str, typer.Option(help="Language code; for --tmx, which has many languages.")] = "",
    target_language: Annotated[
        str, typer.Option(help="Language code; zh, ja and yue are written without spaces.")
    ] = "",
    cased_source: Annotated[bool, typer.Option("--cased-source", help="Keep upper case in the source.")] = False,
    max_length: Annotated[int, typer.Option(min=1, help="Longest training sentence, in pieces.")] = 1024,
    max_ratio: Annotated[float, typer.Option(min=1, help="Largest ratio of lengths in a training pair.")] = 9.0,
    drop_duplicates: Annotated[bool, typer.Option("--drop-duplicates", help="Keep one of equal pairs.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token stores that exist.")] = False,
) -> None:
    """Learn vocabularies and turn parallel text into a data directory to train on.

    Every file may be packed: .gz or .xz.
    """
    from rich.console import Console

    from simulmt.dataset import prepare_dataset
    from simulmt.store import Filters
    from simulmt.text import VocabularySpec

    if dev_xml is None and not (dev_source and dev_target):
        raise ConfigError("no development set: give --dev-source and --dev-target, or --dev-xml")
    corpora = _corpora(source or [], target or [], tsv or [])
    corpora += _translation_memories(tmx or [], source_language, target_language)
    if not corpora:
        raise ConfigError("no training text: give --source and --target, --tsv or --tmx")
    if re.split("[-_]", target_language.lower())[0] in UNSPACED_LANGUAGES:
        target_spec = VocabularySpec(target_vocabulary, "identity", character_coverage=0.9995, spaced=False)
    else:
        target_spec = VocabularySpec(target_vocabulary, "nmt_nfkc")
    source_spec = VocabularySpec(source_vocabulary, "nmt_nfkc" if cased_source else "nmt_nfkc_cf")
    filters = Filters(max_length=max_length, max_ratio=max_ratio, drop_duplicates=drop_duplicates)
    dev, more_references = _development(dev_source, dev_target or [], dev_xml)
    console = Console(stderr=True)
    with console.status("") as status:
        dataset = prepare_dataset(
            output,
            corpora,
            dev,
            source_spec,
            target_spec,
            filters,
            overwrite,
            progress=lambda stage, pairs: status.update(f"{stage}: {pairs:,} pairs" if pairs else f"{stage} ..."),
            more_references=more_references,
            vocabularies=vocabularies,
        )
    manifest = dataset.train.manifest
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items() if count) or "none"
    typer.echo(f"{output}: {manifest.kept:,} of {manifest.read:,} training pairs kept; dropped: {dropped}", err=True)


def train(
    config: Annotated[Path, typer.Argument(help="Training configuration, a TOML file.")],
    run: Annotated[Path, typer.Option(help="Run directory; an existing run goes on where it was.")],
    assignments: Assignments = None,
    device: Device = "auto",
    wandb: Annotated[str, typer.Option(help="Also report to this Weights & Biases project.")] = "",
) -> None:
    """Train a system, or go on with a run. Under torchrun: torchrun --nproc-per-node N -m -- simulmt train ..."""
    try:
        from simulmt.train.loop import train as train_run
        from simulmt.train.monitor import Monitor
        from simulmt.train.record import exclusive, record_run
        from simulmt.train.settings import RunConfig
        from simulmt.train.world import join_world
    except ImportError as error:
        raise _missing("simulmt train", error) from None

    settings = RunConfig.read(require_file(config), assignments or ())
    with join_world(device) as world, exclusive(run) if world.is_first else nullcontext():
        monitor = Monitor(run, quiet=not world.is_first, wandb_project=wandb or None)
        if world.is_first:
            record_run(settings, run, world, monitor.warn)
        outcome = train_run(settings, run, world, monitor)
    if outcome.status == "stopped" and outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def sweep(
    config: Annotated[Path, typer.Argument(help="Training configuration of every trial, a TOML file.")],
    output: Annotated[Path, typer.Option(help="Sweep directory; an existing sweep goes on where it was.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, those that were run before included.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 1,
    space: Annotated[
        list[str] | None,
        typer.Option("--space", metavar="NAME=VALUES", help="Narrow a range, e.g. tau=[0.1,0.2]; may be repeated."),
    ] = None,
    assignments: Assignments = None,
    device: Device = "auto",
) -> None:
    """Search the sorting network's hyperparameters: tau, delta, gamma, M, l, mu."""
    try:
        from simulmt.config import build, override
        from simulmt.train.settings import RunConfig
        from simulmt.train.sweep import SweepConfig
        from simulmt.train.sweep import sweep as run_sweep
    except ImportError as error:
        raise _missing("simulmt sweep", error) from None

    settings = build(SweepConfig, {"trials": trials, "seed": seed, "space": override({}, space or ())}, "--space")
    outcome = run_sweep(RunConfig.read(require_file(config), assignments or ()), output, settings, device)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def _corpora(source: Sequence[Path], target: Sequence[Path], tsv: Sequence[Path]) -> list[Corpus]:
    from simulmt.corpus import ParallelFiles, TabSeparatedFile

    if len(source) != len(target):
        raise ConfigError(f"{len(source)} --source files but {len(target)} --target files; give them in pairs")
    pairs: list[Corpus] = [ParallelFiles(*files) for files in zip(source, target, strict=True)]
    return pairs + [TabSeparatedFile(path) for path in tsv]


def _translation_memories(paths: Sequence[Path], source_language: str, target_language: str) -> list[Corpus]:
    from simulmt.formats import TranslationMemory

    if paths and not (source_language and target_language):
        raise ConfigError("--tmx holds many languages: say which with --source-language and --target-language")
    return [TranslationMemory(path, source_language, target_language) for path in paths]


def _development(source: Path | None, targets: Sequence[Path], xml: Path | None) -> tuple[Corpus, list[list[str]]]:
    """The development set with its first references, and the other sets of references."""
    from simulmt.corpus import ParallelFiles, read_references
    from simulmt.formats import WmtTestSet

    if xml is not None:
        if source or targets:
            raise ConfigError("--dev-xml is the whole development set: leave out --dev-source and --dev-target")
        test_set = WmtTestSet(xml)
        return test_set, test_set.references()[1:]
    assert source is not None
    sets = [(path, references) for path in targets for references in read_references(path)]
    first = len(sets[0][1])
    for path, references in sets:
        if len(references) != first:
            raise DataError(f"{path}: {len(references)} references, but the first set in {targets[0]} has {first}")
    return ParallelFiles(source, targets[0]), [references for _, references in sets[1:]]


def _missing(command: str, error: ImportError) -> Exception:
    """An import that failed because of the missing extra, or, if it is something else, that error itself."""
    return error if (error.name or "").startswith("simulmt") else MissingExtraError(command, "train")
