"""The commands synthetic, prepare, train, sweep, average, grow and export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.errors import ConfigError, DataError, needs_extra

if TYPE_CHECKING:
    from simulmt.data.corpus import Corpus
    from simulmt.text import Normalization

Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. training.seed=2; repeatable."),
]

print_note = partial(typer.echo, err=True)


class Precision(StrEnum):
    INT8 = "int8"
    FP32 = "fp32"


def synthetic(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Output directory for the train, dev and test files.")],
    reorder: Annotated[
        float, typer.Option(min=0, max=1, help="Reordering distance, from 0 (monotone) to 1 (far).")
    ] = 1.0,
    train: Annotated[int, typer.Option(min=0, help="Number of training pairs.")] = 20_000,
    dev: Annotated[int, typer.Option(min=0, help="Number of development pairs.")] = 500,
    test: Annotated[int, typer.Option(min=0, help="Number of test pairs.")] = 500,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
) -> None:
    """Generate a synthetic parallel corpus with word alignments."""
    from simulmt.data.synthetic import write_corpus

    write_corpus(output, reorder, train, dev, test, seed, overwrite)
    typer.echo(f"{output}: {train} training, {dev} development and {test} test pairs", err=True)


def prepare(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Data directory to create; vocabularies already in it are reused.")
    ],
    dev_source: Annotated[Path | None, typer.Option(help="Source text of the development set; plain or .sgm.")] = None,
    dev_target: Annotated[
        list[Path] | None, typer.Option(help="Reference of the development set; repeatable; .sgm may contain several.")
    ] = None,
    dev_xml: Annotated[
        Path | None, typer.Option(help="Development set as one WMT XML file, instead of --dev-source and --dev-target.")
    ] = None,
    source: Annotated[
        list[Path] | None, typer.Option(help="Source text, one sentence per line; plain, .gz or .xz; repeatable.")
    ] = None,
    target: Annotated[
        list[Path] | None, typer.Option(help="Target text, one file per --source, in the same order.")
    ] = None,
    tsv: Annotated[list[Path] | None, typer.Option(help="Tab-separated parallel text; repeatable.")] = None,
    tmx: Annotated[list[Path] | None, typer.Option(help="TMX translation memory; repeatable.")] = None,
    vocabularies: Annotated[
        Path | None,
        typer.Option(metavar="NAME_OR_DIR", help="Data directory or model (bundle) to take the vocabularies from."),
    ] = None,
    source_vocabulary: Annotated[int, typer.Option(min=7, help="Size of the source vocabulary.")] = 32_000,
    target_vocabulary: Annotated[int, typer.Option(min=7, help="Size of the target vocabulary.")] = 32_000,
    source_language: Annotated[str, typer.Option(help="Source language code, needed for --tmx.")] = "",
    target_language: Annotated[
        str, typer.Option(help="Target language code; zh, ja and yue are treated as written without spaces.")
    ] = "",
    cased_source: Annotated[bool, typer.Option("--cased-source", help="Do not lower-case the source.")] = False,
    uncased_target: Annotated[
        bool,
        typer.Option(
            "--uncased-target",
            help="Case-fold the target, as in the paper; in text without spaces, also full-width punctuation.",
        ),
    ] = False,
    max_length: Annotated[int, typer.Option(min=1, help="Maximum length of a training sentence in pieces.")] = 1024,
    max_ratio: Annotated[float, typer.Option(min=1, help="Maximum length ratio of a training pair.")] = 9.0,
    drop_duplicates: Annotated[bool, typer.Option("--drop-duplicates", help="Drop duplicate pairs.")] = False,
    vocabulary_sample: Annotated[
        int, typer.Option(min=101, help="Number of sentences to sample for learning vocabularies.")
    ] = 2_000_000,
    processes: Annotated[int, typer.Option(min=0, help="Number of encoding processes; 0 for one per core.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing token stores.")] = False,
) -> None:
    """Learn vocabularies and encode parallel text for training.

    All files may be gzip- or xz-compressed.
    """
    from rich.console import Console

    from simulmt.data.store import Filters, prepare_dataset
    from simulmt.files import cores
    from simulmt.text import VocabularySpec

    if dev_xml is None and not (dev_source and dev_target):
        raise ConfigError("no development set: give --dev-source and --dev-target, or --dev-xml")
    corpora = _corpora(source or [], target or [], tsv or [], tmx or [], (source_language, target_language))
    if not corpora:
        raise ConfigError("no training text: give --source and --target, --tsv or --tmx")
    target_spec = VocabularySpec.for_target(target_language, target_vocabulary, uncased_target, vocabulary_sample)
    folding: Normalization = "nmt_nfkc" if cased_source else "nmt_nfkc_cf"
    source_spec = VocabularySpec(source_vocabulary, folding, sample=vocabulary_sample)
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
            vocabularies=vocabularies and _find_vocabularies(vocabularies),
            processes=processes or cores(),
        )
    manifest = dataset.train.manifest
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items() if count) or "none"
    typer.echo(f"{output}: {manifest.kept:,} of {manifest.read:,} training pairs kept; dropped: {dropped}", err=True)


def train(
    config: Annotated[Path, typer.Argument(help="Training configuration (TOML file).")],
    run: Annotated[Path, typer.Option(help="Run directory; an existing run is resumed.")],
    assignments: Assignments = None,
    device: Device = "auto",
    wandb: Annotated[str, typer.Option(help="Also log to this Weights & Biases project.")] = "",
) -> None:
    """Train a system, or resume a run. Multi-GPU: torchrun --nproc-per-node N -m -- simulmt train ..."""
    with needs_extra("simulmt train", "train"):
        from simulmt.train.loop import train as train_run
        from simulmt.train.monitor import Monitor
        from simulmt.train.run import exclusive, init_distributed, record_run
        from simulmt.train.systems import RunConfig

    settings = RunConfig.read(require_file(config), assignments or ())
    with init_distributed(device) as world, exclusive(run) if world.is_first else nullcontext():
        monitor = Monitor(run, quiet=not world.is_first, wandb_project=wandb or None)
        if world.is_first:
            record_run(settings, run, world, monitor.warn)
        outcome = train_run(settings, run, world, monitor)
    if outcome.status == "stopped" and outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def sweep(
    config: Annotated[Path, typer.Argument(help="Training configuration of every trial (TOML file).")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Sweep directory; an existing sweep is resumed.")],
    trials: Annotated[int, typer.Option(min=1, help="Total number of trials, including earlier ones.")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed of the search.")] = 1,
    space: Annotated[
        list[str] | None,
        typer.Option("--space", metavar="NAME=VALUES", help="Restrict a search range, e.g. tau=[0.1,0.2]; repeatable."),
    ] = None,
    assignments: Assignments = None,
    device: Device = "auto",
) -> None:
    """Search the sorting network's hyperparameters: tau, delta, gamma, M, l, mu."""
    with needs_extra("simulmt sweep", "train"):
        from simulmt.config import build, override
        from simulmt.train.sweep import SweepConfig
        from simulmt.train.sweep import sweep as run_sweep
        from simulmt.train.systems import RunConfig

    settings = build(SweepConfig, {"trials": trials, "seed": seed, "space": override({}, space or ())}, "--space")
    outcome = run_sweep(RunConfig.read(require_file(config), assignments or ()), output, settings, device)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def average(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="Finished runs or bundles, at least two.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write the averaged model to.")],
    weight: Annotated[
        list[float] | None,
        typer.Option(metavar="NUMBER", help="Weight of a model; give once per model.", show_default="equal"),
    ] = None,
) -> None:
    """Average the weights of models fine-tuned from one another.

    Fine-tuning on in-domain text can cost quality on other text. Averaging the weights before and after often keeps
    both.

    \b
    Example:
      simulmt average runs/adapted en-zh --weight 0.6 --weight 0.4 --output averaged
    """
    with needs_extra("simulmt average", "train"):
        from simulmt.train.restore import average_models
    weights = weight or [1.0] * len(models)
    if len(models) < 2:
        raise ConfigError("give at least two models to average")
    if len(weights) != len(models):
        raise ConfigError(f"{len(models)} models but {len(weights)} --weight; give one for each model")
    if bad := [each for each in weights if not 0 < each < math.inf]:
        raise ConfigError(f"--weight {bad[0]:g}: expected a number above 0")
    if output.exists():
        raise ConfigError(f"--output {output}: exists; choose another directory or delete it")
    average_models(models, weights, output)
    typer.echo(f"the averaged model is in {output}", err=True)


def grow(
    model: Annotated[Path, typer.Argument(help="A bundle or its name, or a finished run.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write the model and vocabularies to.")],
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For a run: the data directory that it was trained on.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text in the target language, whose characters are added; repeatable."),
    ] = None,
    minimum_count: Annotated[
        int, typer.Option(min=1, help="Add characters that occur at least this often in all the text.")
    ] = 2,
    encoder_layers: Annotated[
        int, typer.Option(min=0, help="Number of encoder layers; 0 for as many as before.", show_default=False)
    ] = 0,
) -> None:
    """Add characters or encoder layers to a trained model, to be trained further.

    A model cannot write characters that its vocabulary lacks. Existing words keep their ids, and new layers change
    nothing until they are trained, so translations stay as they were.

    \b
    Example:
      simulmt grow en-zh --text train.zh --output grown
      simulmt prepare --vocabularies grown --source train.en --target train.zh ... --output data
      simulmt train config.toml --set data=data --set init=grown --run runs/grown
    """
    with needs_extra("simulmt grow", "train"):
        from simulmt.train.grow import grow_model
    if not text and not encoder_layers:
        raise ConfigError("nothing to add: give --text or --encoder-layers")
    if output.exists():
        raise ConfigError(f"--output {output}: exists; choose another directory or delete it")
    if data is not None:
        require_vocabularies(data)
    grown = grow_model(model, output, data, [require_file(each) for each in text or ()], minimum_count, encoder_layers)
    typer.echo(f"{output}: {len(grown.characters)} more characters, {grown.layers} more layers", err=True)


def export(
    model: Annotated[Path, typer.Argument(help="A finished run, or a directory with model.json.")],
    data: Annotated[Path, typer.Option(help="Data directory that the model was trained on.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Bundle directory to create.")],
    source_language: Annotated[str, typer.Option(help="Language code, e.g. en.")],
    target_language: Annotated[str, typer.Option(help="Language code, e.g. zh.")],
    precision: Annotated[
        Precision, typer.Option(help="Weight precision; int8 is several times smaller and faster.")
    ] = Precision.INT8,
    default_delay: Annotated[
        int | None, typer.Option(help="Default delay of the bundle (default: the model's first delay).")
    ] = None,
    blank_penalty: Annotated[
        list[float] | None,
        typer.Option(help="CTC: penalty on the blank's logit; give once per delay."),
    ] = None,
    tune_penalty: Annotated[
        bool,
        typer.Option(
            "--tune-penalty",
            help="CTC: choose the blank penalty of each delay by BLEU on the development set.",
        ),
    ] = False,
    stability: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Wait-k with a policy: stability threshold for writing a token; give once per delay.",
        ),
    ] = None,
    max_wait: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Wait-k with a policy: maximum number of words to wait for an unstable token; the threshold falls to "
            "zero meanwhile (0: no limit, and it never falls); give once per delay.",
        ),
    ] = None,
    context_weight: Annotated[
        float, typer.Option(min=0.0, help="Transducer: weight of the label context; above 1, it reduces repetition.")
    ] = 1.0,
    longest: Annotated[
        int, typer.Option(min=2, help="Maximum source pieces per sentence; longer sentences are split.")
    ] = 256,
    dev_sentences: Annotated[
        int, typer.Option(min=0, help="Development sentences on which int8 is compared with full precision.")
    ] = 200,
    card: Annotated[
        Path | None, typer.Option(help="Markdown file to append to the model card: data, scores, licences.")
    ] = None,
) -> None:
    """Export a trained model as a bundle that runs without PyTorch.

    Nothing is written unless the output of the bundle matches that of the trained model; int8 may differ slightly.

    \b
    Example:
      simulmt export runs/en-zh --data data/en-zh --output en-zh --source-language en --target-language zh
      echo "Good morning." | simulmt translate --model ./en-zh
    """
    with needs_extra("simulmt export", "train"):
        from simulmt.train.export import ExportConfig, export_run

    require_vocabularies(data)
    if tune_penalty and blank_penalty:
        raise ConfigError("--tune-penalty and --blank-penalty cannot be combined")
    config = ExportConfig(
        source_language,
        target_language,
        default_delay=default_delay,
        blank_penalties=tuple(blank_penalty or ()),
        stabilities=tuple(stability or ()),
        max_waits=tuple(max_wait or ()),
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
        card="" if card is None else _read_card(card),
        dev_sentences=dev_sentences,
        report=print_note,
    )
    checks = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in described.checks.items())
    typer.echo(f"{output}: {described.kind} {described.precision}; {checks}", err=True)


def _find_vocabularies(name_or_path: Path) -> Path:
    """Return a directory with vocabularies, given its path or the name of a shipped model."""
    from simulmt.runtime.bundle import SHIPPED, shipped_names

    is_shipped = not name_or_path.is_dir() and str(name_or_path) in shipped_names()
    return SHIPPED / name_or_path if is_shipped else name_or_path


def _corpora(
    source: Sequence[Path], target: Sequence[Path], tsv: Sequence[Path], tmx: Sequence[Path], languages: tuple[str, str]
) -> list[Corpus]:
    from simulmt.data.corpus import ParallelFiles, TabSeparatedFile, TranslationMemory

    if len(source) != len(target):
        raise ConfigError(f"{len(source)} --source files but {len(target)} --target files; give them in pairs")
    if tmx and not all(languages):
        raise ConfigError("--tmx needs --source-language and --target-language")
    pairs: list[Corpus] = [ParallelFiles(*files) for files in zip(source, target, strict=True)]
    return [*pairs, *map(TabSeparatedFile, tsv), *(TranslationMemory(path, *languages) for path in tmx)]


def _development(source: Path | None, targets: Sequence[Path], xml: Path | None) -> tuple[Corpus, list[list[str]]]:
    """Return the development set with its first references, and the other reference sets."""
    from simulmt.data.corpus import WmtTestSet, read_development

    if xml is not None:
        if source or targets:
            raise ConfigError("--dev-xml cannot be combined with --dev-source and --dev-target")
        test_set = WmtTestSet(xml)
        return test_set, test_set.references()[1:]
    assert source is not None
    return read_development(source, targets)


def _read_card(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{card}: cannot be read as text: {error}") from None


def require_file(path: Path) -> Path:
    """Return the path if it is a file; raise DataError otherwise."""
    if path.is_file():
        return path
    raise DataError(f"{path}: is a directory, expected a file" if path.is_dir() else f"{path}: no such file")


def require_vocabularies(data: Path, option: str = "--data") -> None:
    """Raise DataError unless `option` is a directory with two vocabularies."""
    for name in ("source.model", "target.model"):
        if not (data / name).is_file():
            raise DataError(f"{option} {data}: no {name}; expected a data directory written by simulmt prepare")
