"""The commands around a finished model: translate, demo, bench; and those of models.py."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from simulmt.cli import models, panels
from simulmt.cli.captions import Format, open_writer
from simulmt.errors import BundleError, ConfigError, DataError, StreamError

if TYPE_CHECKING:
    from simulmt.stream import Translator

STANDARD_INPUT = Path("-")
CORES = os.cpu_count() or 1

Model = Annotated[
    str | None,
    typer.Option(metavar="NAME_OR_DIR", help="A shipped model, or the directory of any.", show_default="the first"),
]
Delay = Annotated[
    int | None,
    typer.Option(metavar="K", help="Source pieces to wait for before writing.", show_default="the model's own"),
]
Threads = Annotated[int, typer.Option(min=0, max=CORES, help="CPU threads; 0 takes all cores.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="Sentences to use, one a line.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (translate, demo, bench):
        app.command(rich_help_panel=panels.TRANSLATE)(command)
    app.add_typer(models.app, name="models", rich_help_panel=panels.TRANSLATE)


def translate(
    file: Annotated[Path, typer.Argument(help="Text in UTF-8; - is standard input.")] = STANDARD_INPUT,
    model: Model = None,
    delay: Delay = None,
    style: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.TEXT,
    threads: Threads = 0,
) -> None:
    """Translate text while it arrives: a line for a line, written word by word.

    srt and vtt are subtitles, timed by when they were translated.
    jsonl is one object for every piece of translation: the number of its
    line, how many words of the line were read for it, and its lag, that is,
    the wait for these words (policy), for the computation (queue), and the
    computation itself (compute).

    \b
    Examples:
      echo "Good morning, everyone." | simulmt translate
      simulmt translate talk.txt --delay 3 > talk.translated
      speech-to-text | simulmt translate --format vtt > captions.vtt
    """
    from simulmt.cli.pipe import UNREADABLE, LineTranslator, arrivals

    with _opened(file) as descriptor:
        translator = _load(model, delay, threads)
        if os.isatty(descriptor):
            typer.echo("Type a sentence and Enter; Ctrl-D ends.", err=True)
        with closing(open_writer(style, _utf8_output())) as writer:
            lines, is_damaged = LineTranslator(translator, delay, writer), False
            for arrived in arrivals(descriptor, translator.clock):
                is_damaged |= any(UNREADABLE in part.text for part in arrived)
                lines.push(arrived)
            lines.finish()
        if is_damaged:
            typer.echo("simulmt: some of the input was not UTF-8 and is not translated; `iconv` converts it", err=True)


def demo(
    model: Model = None,
    delay: Delay = None,
    pace: Annotated[float, typer.Option(min=0.1, help="Words a second.")] = 2.5,
    text: TextFile = None,
    fast: Annotated[bool, typer.Option("--fast", help="As fast as it goes, instead of at speaking pace.")] = False,
) -> None:
    """Watch a text being translated at speaking pace.

    In the trace R is a word read, W a piece of translation written.

    \b
    Examples:
      simulmt demo
      simulmt demo --delay 1 --pace 4
      simulmt demo --text my-speech.txt
    """
    from rich.console import Console

    from simulmt.cli.display import Tally, describe, open_view, play
    from simulmt.cli.samples import sentences_for

    translator = _load(model, delay, threads=0)
    sentences = sentences_for(translator.config, text)
    console = Console(file=_utf8_output(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{describe(translator, delay)}\n")
    tally = Tally()
    with closing(open_view(console, translator.config)) as view:
        for moment in play(translator, sentences, delay, 0 if fast else pace):
            tally.count(moment)
            view.show(moment)
    console.print(tally.summary())
    chosen = f" --model {shlex.quote(model)}" if model else ""
    console.print(f"\nNext:\n  echo {shlex.quote(sentences[0])} | simulmt translate{chosen}")
    console.print(f"  simulmt bench{chosen}\n  simulmt models\n  simulmt --help")


def bench(
    model: Model = None,
    delay: Delay = None,
    threads: Annotated[int, typer.Option(min=1, max=CORES, help="CPU threads.")] = 1,
    text: TextFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how fast a model is on this machine.

    A token is a piece of a source word. Speakers are live streams of 2.5 words a second.

    \b
    Examples:
      simulmt bench
      simulmt bench --model ./my-bundle --threads 2 --json
    """
    import dataclasses
    import json

    from rich.console import Console

    from simulmt.cli.measure import as_table, measure
    from simulmt.cli.samples import sentences_for
    from simulmt.runtime.bundle import Bundle, find

    directory = find(model or _default_model())
    sentences = sentences_for(Bundle(directory).config, text)
    found = measure(lambda: _load(directory, delay, threads), sentences, delay, threads)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        Console().print(as_table(found))


def _load(model: str | Path | None, delay: int | None, threads: int) -> Translator:
    """Load a model, and see to it that it can be run with a delay."""
    import simulmt

    translator = simulmt.load(model or _default_model(), threads)
    try:
        translator.checked_delay(delay)
    except StreamError as error:
        raise ConfigError(f"--{error}") from None
    return translator


def _default_model() -> str:
    """The first shipped model of real languages, or else the first."""
    from simulmt.cli.samples import SYNTHETIC
    from simulmt.runtime.bundle import SHIPPED, Bundle, shipped_names

    names = shipped_names()
    if not names:
        raise BundleError("no model came with this installation: give the directory of one with --model")
    real = (name for name in names if Bundle(SHIPPED / name).config.source_language != SYNTHETIC)
    return next(real, names[0])


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """The descriptor of a file or of standard input."""
    if file == STANDARD_INPUT:
        yield 0
        return
    try:
        opened = file.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    with opened:
        yield opened.fileno()


def _utf8_output() -> TextIO:
    """Standard output; translations do not depend on the locale."""
    if sys.stdout is None:
        raise DataError("the output cannot be written: standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout
