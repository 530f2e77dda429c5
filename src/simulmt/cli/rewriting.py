"""The commands `simulmt rewrite ...`."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from simulmt.cli.evaluation import UnitChoice
from simulmt.cli.training import Device, print_note, require_vocabularies
from simulmt.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from simulmt.data.speech_noise import Language
    from simulmt.data.transforms import Progress
    from simulmt.model.beam import BeamConfig, SamplingConfig

BATCH_TOKENS = {"cuda": 65_536, "cpu": 2_048}
SECONDS_BETWEEN_LINES = 30.0  # when progress is not shown on a terminal


def _check_share(share: float) -> float:
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0 and at most 1")
    return share


Run = Annotated[Path, typer.Argument(help="A finished run, or a directory with model.json.")]
Data = Annotated[Path, typer.Option(help="Data directory that the model was trained on.")]
Source = Annotated[Path, typer.Option(help="Source text, one sentence per line; plain, .gz or .xz.")]
Target = Annotated[Path, typer.Option(help="Target text, one sentence per line.")]
Share = Annotated[float, typer.Option(callback=_check_share, help="Fraction of the pairs to sample.")]
Output = Annotated[Path, typer.Option(metavar="PREFIX", help="Write PREFIX.source, PREFIX.target and PREFIX.json.")]
Beam = Annotated[int, typer.Option(min=1, help="Beam size.")]
LengthPenalty = Annotated[float, typer.Option(min=0, help="Exponent of the length normalisation.")]
MaxRatio = Annotated[
    float, typer.Option(min=0, help="Maximum translation length as a multiple of the source length ...")
]
MaxExtra = Annotated[int, typer.Option(min=0, help="... plus this many pieces.")]
BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Batch size in source pieces.", show_default="65536 on a GPU, 2048 on a CPU"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing or unfinished output made with other settings.")
]

app = typer.Typer(
    name="rewrite",
    no_args_is_help=True,
    help="Derive new training text: distil, pseudo, rerank, backtranslate, filter, reorder, speech, recognised, "
    "numbers, dictionary, lexicon, weigh, join."
    "\n\nA command whose output is complete returns immediately. distil, pseudo, rerank, backtranslate and recognised "
    "resume if interrupted; to run one in several processes, start the same command several times, or start it with "
    "torchrun --nproc-per-node N -m -- simulmt.",
)


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
    """Translate source text with a teacher (sequence-level distillation).

    Sentences that are empty, longer than 1024 pieces or have no translation are dropped; PREFIX.json lists their lines.
    """
    with needs_extra("simulmt rewrite distil", "train"):
        from simulmt.model.beam import BeamConfig
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra)
    _translate(run, data, source, output, search, batch_tokens, device, overwrite)


@app.command()
def pseudo(
    run: Annotated[Path, typer.Argument(help="A finished run, a directory with model.json, or a bundle.")],
    data: Data,
    source: Source,
    output: Output,
    delay: Annotated[int, typer.Option(min=1, help="Delay k of the wait-k policy.")] = 9,
    beam: Beam = 1,
    length_penalty: LengthPenalty = 1.0,
    max_ratio: MaxRatio = 1.2,
    max_extra: MaxExtra = 10,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Translate source text with a wait-k model (pseudo references).

    Greedy decoding gives the output of a live stream; with a beam, a translation may end before the whole source is
    read. Add the result to the distilled pairs with `simulmt rewrite join`.
    """
    with needs_extra("simulmt rewrite pseudo", "train"):
        from simulmt.model.beam import BeamConfig
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra, reads_on=beam == 1)
    _translate(run, data, source, output, search, batch_tokens, device, overwrite, delay=delay)


@app.command()
def rerank(
    run: Annotated[Path, typer.Argument(help="A finished run, a directory with model.json, or a bundle.")],
    data: Data,
    reverse: Annotated[
        Path, typer.Option(metavar="RUN", help="A finished teacher run, trained from target to source.")
    ],
    reverse_data: Annotated[Path, typer.Option(metavar="DIR", help="Data directory that --reverse was trained on.")],
    source: Source,
    output: Output,
    target: Annotated[
        Path | None,
        typer.Option(
            help="Given translations of the source, line by line, as further candidates.", show_default="none"
        ),
    ] = None,
    delay: Annotated[int, typer.Option(min=1, help="Delay k of a wait-k model; a teacher has none.")] = 40,
    weight: Annotated[float, typer.Option(min=0, help="Weight of the reverse score.")] = 1.0,
    min_reverse: Annotated[
        float | None,
        typer.Option(
            max=0, help="Drop pairs with a lower reverse score, in nats per token, such as -2.", show_default="none"
        ),
    ] = None,
    beam: Beam = 8,
    length_penalty: LengthPenalty = 1.0,
    max_ratio: MaxRatio = 1.2,
    max_extra: MaxExtra = 10,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Translate source text, and choose the translation that a reverse model can best read back.

    Candidates are the hypotheses of beam search and the lines of --target. A candidate scores its log-probability per
    token given the source plus, times --weight, that of the source given the candidate (noisy-channel reranking). So
    translations that omit something lose, and a --target line that is a bad translation is replaced.

    Pairs below --min-reverse are dropped, as are sentences that are empty, longer than 1024 pieces or have no
    translation; PREFIX.json lists their lines.
    """
    with needs_extra("simulmt rewrite rerank", "train"):
        from simulmt.model.beam import BeamConfig
        from simulmt.train.rerank import Direction, RerankConfig, rerank_corpus
        from simulmt.train.rewrite import TranslationConfig
        from simulmt.train.run import init_distributed

    require_vocabularies(data)
    require_vocabularies(reverse_data, "--reverse-data")
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra)
    with init_distributed(device) as world:
        tokens = BATCH_TOKENS[world.device.type] if batch_tokens is None else batch_tokens
        config = RerankConfig(TranslationConfig(search, delay, tokens), weight, min_reverse)
        display = _Display(source, quiet=not world.is_first)
        forward, back = Direction(run, data), Direction(reverse, reverse_data)
        record = rerank_corpus(forward, back, source, target, output, config, world.device, overwrite, display)
    display.summarise(output, record)


@app.command()
def backtranslate(
    run: Annotated[Path, typer.Argument(help="A finished teacher run, trained from target to source.")],
    data: Data,
    target: Annotated[Path, typer.Option(help="Target text, one sentence per line; plain, .gz or .xz.")],
    output: Output,
    beam: Beam = 1,
    length_penalty: LengthPenalty = 1.0,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 for beam search.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely pieces; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 1,
    max_ratio: MaxRatio = 1.2,
    max_extra: MaxExtra = 10,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Translate target text back into the source language (tagged back-translation).

    Uses monolingual target text: a target-to-source teacher generates the sources. Each starts with the tag <bt>, which
    `simulmt prepare` encodes as one special symbol, so that a model trained on both can tell synthetic sources from
    real ones.
    """
    with needs_extra("simulmt rewrite backtranslate", "train"):
        from simulmt.model.beam import BeamConfig, SamplingConfig
    if top_k and not temperature:
        raise ConfigError(f"--top-k {top_k}: needs --temperature, such as 1")
    search = BeamConfig(beam, length_penalty, max_ratio, max_extra)
    sampling = SamplingConfig(temperature, top_k, seed) if temperature else None
    _translate(run, data, target, output, search, batch_tokens, device, overwrite, sampling=sampling, back=True)


@app.command("filter")
def filter_pairs(
    source: Source,
    target: Target,
    output: Output,
    languages: Annotated[
        str,
        typer.Option(
            metavar="SOURCE-TARGET", help="Languages of the pairs, such as de-en.", show_default="guessed from the text"
        ),
    ] = "",
    without: Annotated[
        list[Path] | None,
        typer.Option(
            help="Test set to hold out, in either language: drop pairs that share a sentence of four or more words, or "
            "ten words in a row, with it; repeatable."
        ),
    ] = None,
    max_words: Annotated[
        int, typer.Option(min=0, help="Drop pairs with more words on either side; 0 for no limit.")
    ] = 0,
    drop_shortest: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Drop this share of the pairs: those with the shortest targets among sources of the same length, "
            "which are the most likely to omit something.",
        ),
    ] = 0.0,
    check_numbers: Annotated[
        bool,
        typer.Option(
            "--check-numbers/--no-check-numbers",
            help="Drop pairs whose numbers differ. Human translations may differ on purpose: twenty to five is 4:40.",
        ),
    ] = True,
    lexicon: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Drop pairs that mistranslate a word of this lexicon (rewrite lexicon)."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Drop pairs that have different numbers or a repetitive target, or that overlap with a test set.

    Numbers are compared by value, in digits or in English, German and Chinese words: 3,000 equals 3.000 and 三千.
    PREFIX.json lists the dropped lines.
    """
    from simulmt.data.transforms import filter_corpus

    display = _Display()
    pair = _parse_languages(languages) if languages else None
    held_out = without or ()
    record = filter_corpus(
        source, target, output, pair, overwrite, display, held_out, max_words, drop_shortest, check_numbers, lexicon
    )
    display.summarise(output, record)


def _parse_languages(languages: str) -> tuple[str, str]:
    match = re.fullmatch("([a-z]{2,3})-([a-z]{2,3})", languages)
    if match is None:
        raise ConfigError(f"--languages {languages}: expected two codes, such as de-en")
    return match[1], match[2]


@app.command()
def reorder(
    source: Source,
    target: Target,
    output: Output,
    links: Annotated[
        Path | None,
        typer.Option(
            help="Word alignments in Pharaoh format (0-based), one line per pair.",
            show_default="computed with eflomal and saved as PREFIX.links",
        ),
    ] = None,
    source_unit: Annotated[UnitChoice, typer.Option(help="Alignment unit of the source.")] = UnitChoice.AUTO,
    target_unit: Annotated[UnitChoice, typer.Option(help="Alignment unit of the target.")] = UnitChoice.AUTO,
    segment_chinese: Annotated[
        bool, typer.Option("--segment-chinese", help="Segment a Chinese target into words with jieba first.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Reorder target words to follow the source words they translate.

    A word with several links follows the last one; an unaligned word follows the word before it. In text written
    without spaces every ideograph is a word, unless --segment-chinese is given.
    """
    from simulmt.data.transforms import align_and_reorder

    display = _Display()
    record = align_and_reorder(
        source,
        target,
        output,
        links=links,
        units=(source_unit.value, target_unit.value),
        segment_chinese=segment_chinese,
        overwrite=overwrite,
        report=display,
        log=print_note,
    )
    display.summarise(output, record)


@app.command()
def speech(
    source: Source,
    target: Target,
    output: Output,
    share: Share = 0.15,
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Add recognition errors typical of this source language; only en is supported.",
            show_default="none: only remove case and punctuation",
        ),
    ] = None,
    said: Annotated[
        Path | None, typer.Option(help="With --heard: learn misheard words from reference transcripts ...")
    ] = None,
    heard: Annotated[Path | None, typer.Option(help="... and the output of your recogniser for them.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Make source text look like the output of a speech recogniser: lower case, no punctuation.

    --noise en also adds disfluencies ("uh", repeated words, false starts), misheard words and spelled-out numbers, and
    keeps the punctuation of some sentences. Numbers and negations keep their meaning.

    Trained on the result together with the original pairs (`simulmt rewrite join`), a model learns to punctuate.
    """
    from simulmt.data.corpus import ParallelFiles
    from simulmt.data.transforms import SpeechConfig, speech_corpus

    if (said is None) != (heard is None) or (said and not noise):
        raise ConfigError("--said and --heard: give both, with --noise")
    if noise not in (None, "en"):
        raise ConfigError(f"--noise {noise}: expected en, the only supported language")
    display = _Display()
    config = SpeechConfig(share, seed, cast("Language | None", noise))
    examples = ParallelFiles(said, heard) if said and heard else None
    display.summarise(output, speech_corpus(source, target, output, config, overwrite, display, examples))


@app.command()
def recognised(
    source: Source,
    target: Target,
    output: Output,
    share: Share = 0.01,
    recogniser: Annotated[str, typer.Option(metavar="NAME[:DIR]", help="Speech recogniser.")] = "moonshine",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Replace source text with a recogniser's transcript of espeak-ng reading it aloud.

    Pairs are dropped if the transcript matches less than half of the source. Takes about one second per sentence on one
    core; start it several times to use several cores. Needs the extra speech, and espeak-ng.
    """
    with needs_extra("simulmt rewrite recognised", "train"):
        from simulmt.train.rewrite import RecognitionConfig, recognised_corpus

    display = _Display()
    config = RecognitionConfig(share, recogniser, seed=seed)
    display.summarise(output, recognised_corpus(source, target, output, config, overwrite, display))


@app.command()
def numbers(
    source: Source,
    target: Target,
    languages: Annotated[
        str, typer.Option(metavar="SOURCE-TARGET", help="Languages of the pairs, two of de, en and zh.")
    ],
    output: Output,
    share: Share = 0.2,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Copy pairs and replace their numbers, consistently on both sides.

    Replaces figures (3,000), figures with a scale (1.5 billion, 15亿), years, and words up to ninety-nine with random
    ones of the same kind. Pairs without such numbers are skipped. Pairs whose numbers cannot be matched with certainty
    are dropped; PREFIX.json lists their lines.

    Trained on the result together with the original pairs (`simulmt rewrite join`), a model learns to copy and convert
    numbers it has never seen.
    """
    from simulmt.data.number_swap import NumberSwapConfig, swap_corpus_numbers

    config = NumberSwapConfig(_parse_languages(languages), share, seed)
    display = _Display()
    display.summarise(output, swap_corpus_numbers(source, target, output, config, overwrite, display))


@app.command()
def dictionary(
    dictionary: Annotated[Path, typer.Argument(help="Dictionary in the format of Ding or CC-CEDICT.")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Extract words and phrases from a bilingual dictionary.

    Pairs every source alternative with the first target alternative of the same sense. Remarks, dialect and archaic
    words are left out. German nouns occur twice, alone and with their article.

    For German and English, use /usr/share/trans/de-en of the Debian package trans-de-en; for English and Chinese,
    CC-CEDICT, which gives each English word with the most frequent of its Chinese translations.
    """
    from simulmt.data.dictionary import dictionary_corpus

    display = _Display()
    display.summarise(output, dictionary_corpus(dictionary, output, overwrite, display))


@app.command()
def lexicon(
    source: Source,
    target: Target,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    dictionary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Dictionary in the format of Ding or CC-CEDICT.")
    ] = None,
) -> None:
    """Collect translations of rare words from trusted pairs and a dictionary, for rewrite filter --lexicon.

    Has one word a line, with its translations, separated by tabs. Words that the trusted pairs translate freely are
    left out.
    """
    from simulmt.data.dictionary import all_translations
    from simulmt.data.lexicon import write_lexicon

    words = write_lexicon(source, target, all_translations(dictionary) if dictionary else (), output)
    typer.echo(f"{output}: {words} words", err=True)


@app.command()
def weigh(
    source: Source,
    target: Target,
    labels: Annotated[Path, typer.Option(help="Labels, one per pair, such as the corpus it comes from.")],
    output: Output,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=NUMBER",
            help="Weight of a label: 2 repeats its pairs, 0.5 samples half of them, 0 drops them; repeatable.",
        ),
    ] = None,
    others: Annotated[float, typer.Option(min=0, help="Weight of all other labels.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Repeat, sample or drop pairs by label.

    Give more weight to in-domain text, and none to text whose licence does not permit your use.
    """
    from simulmt.data.transforms import WeightingConfig, weight_corpus

    weights = [_weight(each) for each in weight or []]
    twice = [label for label, count in Counter(label for label, _ in weights).items() if count > 1]
    if twice:
        raise ConfigError(f"--weight: given more than once for {', '.join(twice)}")
    config = WeightingConfig(dict(weights), others, seed)
    display = _Display()
    display.summarise(output, weight_corpus(source, target, labels, output, config, overwrite, display))


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
    source: Annotated[list[Path], typer.Option(help="Source text of a set; repeatable.")],
    target: Annotated[list[Path], typer.Option(help="Target text of each set, in the same order.")],
    output: Output,
    repeat: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of copies of a set; give once per set.", show_default="1"),
    ] = None,
    limit: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Maximum number of pairs of a set, 0 for all; give once per set.", show_default="0"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Concatenate several sets of sentence pairs."""
    from simulmt.data.transforms import JoinedSet, join_corpora

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
    text: Path,
    output: Path,
    search: BeamConfig,
    batch_tokens: int | None,
    device: str,
    overwrite: bool,
    delay: int | None = None,
    sampling: SamplingConfig | None = None,
    back: bool = False,
) -> None:
    from simulmt.train.rewrite import TranslationConfig, translate_corpus
    from simulmt.train.run import init_distributed

    require_vocabularies(data)
    with init_distributed(device) as world:
        tokens = BATCH_TOKENS[world.device.type] if batch_tokens is None else batch_tokens
        config = TranslationConfig(search, delay, tokens, sampling=sampling)
        display = _Display(text, quiet=not world.is_first)
        record = translate_corpus(run, data, text, output, config, world.device, overwrite, display, back)
    display.summarise(output, record)


class _Display:
    """Prints progress (live on a terminal, else every 30 seconds), then a summary."""

    def __init__(self, source: Path | None = None, quiet: bool = False) -> None:
        from rich.console import Console

        from simulmt.data.corpus import read_lines

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
        dropped = ", ".join(f"{len(lines):,} {reason}" for reason, lines in record["left"].items()) or "none"
        summary = f"{output}: {record['kept']:,} of {record['lines']:,} pairs; dropped: {dropped}{self._speed}"
        self._console.print(summary, soft_wrap=True)
