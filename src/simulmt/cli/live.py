"""The commands that translate: translate, demo, bench, listen, serve and models."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from simulmt.errors import BundleError, ConfigError, DataError, StreamError, needs_extra
from simulmt.runtime.captions import Format, Writer, open_writer

if TYPE_CHECKING:
    from simulmt.runtime.bundle import Bundle
    from simulmt.runtime.pipe import Arrival
    from simulmt.runtime.revisions import Word
    from simulmt.runtime.stream import Translator
    from simulmt.serve.access import Limits
    from simulmt.speech.audio import Samples
    from simulmt.speech.live import LiveSpeech, SpeechClock
    from simulmt.speech.recogniser import Recogniser

STANDARD_INPUT = Path("-")

Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_DIR",
        help="Name of a shipped model, or path of a bundle.",
        show_default="the first in `simulmt models`",
    ),
]
Delay = Annotated[
    int | None,
    typer.Option(help="Delay k, in source tokens (subwords).", show_default="the model's default"),
]
Threads = Annotated[
    int, typer.Option(min=0, help="CPU threads, at most one per core; 0 uses OMP_NUM_THREADS, or all cores.")
]
TextFile = Annotated[Path | None, typer.Option("--text", help="Text file to use, one sentence per line.")]
Name = Annotated[str, typer.Argument(metavar="NAME_OR_DIR", help="Name of a shipped model, or path of a bundle.")]

LISTED = ("model", "languages", "kind", "size", "delays", "default")

models_app = typer.Typer(name="models", invoke_without_command=True)


class InputKind(StrEnum):
    TEXT = "text"
    REVISIONS = "revisions"


def translate(
    file: Annotated[Path, typer.Argument(help="UTF-8 text file; - reads standard input.")] = STANDARD_INPUT,
    model: Model = None,
    delay: Annotated[
        int | None,
        typer.Option(
            help="Delay k, in source tokens (subwords).",
            show_default="the model's default; for a file, its largest",
        ),
    ] = None,
    kind: Annotated[InputKind, typer.Option("--input", help="Plain text, or a recogniser's JSON events.")] = (
        InputKind.TEXT
    ),
    style: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    beam: Annotated[
        int,
        typer.Option(help="Beam size. Above 1 needs a full-sentence model, or a wait-k model at its largest delay."),
    ] = 1,
    threads: Threads = 0,
) -> None:
    """Translate text as it arrives, line by line and word by word.

    A file is translated with the model's largest delay unless --delay is given.

    srt and vtt write subtitles, timed by when the text was translated. jsonl writes one object per commit: its line
    (sentence), how many words of that line had been read (source_words), and its lag in ms, split into waiting for
    words (policy), waiting for the CPU (queue) and computing (compute).

    --input revisions reads the JSON events of a speech recogniser that revises its words, such as WhisperLiveKit, Vosk
    or Moonshine, one per line. Words are translated once they are stable; the lag reports that wait as recognition.

    \b
    Examples:
      echo "Where is the nearest hospital?" | simulmt translate
      simulmt translate talk.txt > talk.translated
      speech-to-text | simulmt translate --format vtt > captions.vtt
      recogniser | simulmt translate --input revisions
    """
    from simulmt.runtime.pipe import POLL, LineTranslator, RevisionTranslator, arrivals

    is_revised = kind is InputKind.REVISIONS
    name = "standard input" if file == STANDARD_INPUT else str(file)
    with _open_input(file) as descriptor:
        translator = load_translator(model, delay, threads)
        if delay is None and not is_revised and stat.S_ISREG(os.fstat(descriptor).st_mode):
            delay = translator.config.largest_delay
        _check_options(translator, delay, beam)
        if os.isatty(descriptor) and not is_revised:
            typer.echo("Type a sentence and press Enter; Ctrl-D to quit.", err=True)
        with closing(open_writer(style, utf8_output())) as writer:
            lines = (RevisionTranslator if is_revised else LineTranslator)(translator, delay, writer, beam)
            try:
                for arrived in _warn_once(arrivals(descriptor, translator.clock, POLL if is_revised else None), name):
                    lines.push(arrived)
                lines.finish()
            except DataError as error:
                raise DataError(f"{name}: {error}") from None


def demo(
    model: Model = None,
    delay: Delay = None,
    pace: Annotated[float, typer.Option(min=0.1, help="Words per second.")] = 2.5,
    text: TextFile = None,
    fast: Annotated[bool, typer.Option("--fast", help="Do not wait between words.")] = False,
) -> None:
    """Translate a sample text live at speaking pace.

    In the trace, R is a word read and W a piece of output written.

    \b
    Examples:
      simulmt demo
      simulmt demo --delay 1 --pace 4
      simulmt demo --text my-speech.txt
    """
    from rich.console import Console

    from simulmt.cli.display import describe, open_demo
    from simulmt.runtime.demo import DemoStatistics, play, sentences_for

    translator = load_translator(model, delay, threads=0)
    sentences = sentences_for(translator.config, text)
    console = Console(file=utf8_output(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{describe(translator, delay)}\n")
    statistics = DemoStatistics()
    with closing(open_demo(console, translator.config)) as view:
        for step in play(translator, sentences, delay, 0 if fast else pace):
            statistics.count(step)
            view.show(step)
    console.print(statistics.summary())
    chosen = f" --model {shlex.quote(model)}" if model else ""
    command = _command()
    console.print(f"\nNext:\n  echo {shlex.quote(sentences[0])} | {command} translate{chosen}")
    console.print(f"  {command} bench{chosen}\n  {command} models\n  {command} --help")


def bench(
    model: Model = None,
    delay: Delay = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, at most one per core.")] = 1,
    text: TextFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the speed of a model on this machine.

    A token is a subword of the source. A speaker is a live stream of 2.5 words per second.

    \b
    Examples:
      simulmt bench
      simulmt bench --model ./my-bundle --threads 2 --json
    """
    import dataclasses
    import json

    from rich.console import Console

    from simulmt.cli.display import benchmark_table
    from simulmt.files import cores
    from simulmt.runtime.bundle import Bundle, default_names, find
    from simulmt.runtime.demo import measure, sentences_for

    directory = find(model or next(default_names()))
    sentences = sentences_for(Bundle(directory).config, text)
    threads = min(threads, cores())
    measurements = measure(lambda: load_translator(directory, delay, threads), sentences, delay, threads)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(measurements), indent=2))
    else:
        Console().print(benchmark_table(measurements))


def listen(
    file: Annotated[
        Path | None,
        typer.Argument(help="WAV file; - reads WAV or 16-bit mono PCM at 16 kHz from standard input."),
    ] = None,
    microphone: Annotated[bool, typer.Option("--microphone", help="Record from the microphone until Ctrl-C.")] = False,
    device: Annotated[str | None, typer.Option(help="Number or name of the microphone.")] = None,
    recogniser: Annotated[
        str, typer.Option(metavar="NAME[:DIR]", help="moonshine, moonshine:DIR, vosk:DIR or sherpa:DIR.")
    ] = "moonshine",
    model: Model = None,
    delay: Delay = None,
    style: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    transcript: Annotated[Path | None, typer.Option(help="Also write the recognised text to this file.")] = None,
    threads: Threads = 1,
) -> None:
    """Translate speech as it is spoken, one line per sentence.

    Runs offline on the CPU. Moonshine recognises English; for other languages, pass the directory of a Vosk or
    sherpa-onnx model with --recogniser. Subtitles for a file follow the timing of its audio.

    \b
    Examples:
      simulmt listen --microphone
      simulmt listen talk.wav --delay 3 --format srt > talk.srt
      ffmpeg -i talk.mp4 -f wav - | simulmt listen -
      simulmt listen rede.wav --model de-en --recogniser vosk:vosk-model-small-de-0.15
    """
    if (file is None) != microphone:
        raise ConfigError("give a WAV file, - for standard input, or --microphone")
    from simulmt.speech.live import LiveSpeech, SpeechClock
    from simulmt.speech.recogniser import open_recogniser

    with _open_audio(file, device) as blocks, _open_transcript(transcript) as write_words:
        translator = load_translator(model, delay, threads)
        opened = open_recogniser(recogniser)
        _check_language(opened, recogniser, translator)
        speech = LiveSpeech(translator, opened.start(), delay, write_words)
        clock = translator.clock
        if not microphone:
            translator.clock = recorded = SpeechClock()  # measure lag and time subtitles as in a live stream
            blocks, clock = _advance_clock(blocks, recorded), lambda: speech.listener.seconds
        else:
            typer.echo("Listening; Ctrl-C to stop.", err=True)
        with closing(speech), closing(open_writer(style, utf8_output(), clock)) as writer:
            _translate_speech(speech, blocks, writer)
        if not speech.stream.sentences_finished:
            typer.echo("simulmt: no speech was recognised", err=True)


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="Name of a shipped model, or path of a bundle; repeatable.",
            show_default="all shipped models except toy",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to bind; 0 for a free one.")] = 8000,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(help="File of API keys, one per line. Default: no key needed."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="Allowed origin of web pages, such as https://example.org, or * for any; repeatable."
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Change a limit, such as streams=500; docs/protocol.md lists them."),
    ] = None,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Serve /metrics without an API key.")] = False,
    room_keys: Annotated[bool, typer.Option("--room-keys", help="Require an API key from viewers of rooms.")] = False,
    recogniser: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LANGUAGE=]NAME[:DIR]",
            help="Recognise speech: moonshine, moonshine:DIR, de=vosk:DIR, de=sherpa:DIR, or none; repeatable.",
            show_default="moonshine, if it is installed",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes.", show_default="one per core on Linux, else 1")
    ] = 0,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of each worker.", show_default="cores divided by workers")
    ] = 0,
) -> None:
    """Serve live translation over a web page, a WebSocket API and an HTTP API.

    Ctrl-C or SIGTERM drains open streams before exiting; a second one exits immediately.

    \b
    Examples:
      simulmt serve
      simulmt serve --model en-zh --model ./my-bundle --port 9000
      simulmt serve --host 0.0.0.0 --api-keys-file keys.txt --limit streams=500
    """
    from simulmt.files import cores

    with needs_extra("simulmt serve", "serve"):
        from simulmt.runtime.bundle import default_names
        from simulmt.serve.access import ApiKeys
        from simulmt.serve.app import Settings
        from simulmt.serve.audio import find_recognisers
        from simulmt.serve.server import run, set_up_logging

    if room_keys and not api_keys_file:
        raise ConfigError("--room-keys needs --api-keys-file: without keys everyone is admitted")
    set_up_logging()
    workers = workers or (cores() if sys.platform == "linux" else 1)  # only Linux balances SO_REUSEPORT
    settings = Settings(
        models=tuple(model or default_names()),
        host=host,
        limits=_limits(limit or []),
        keys=ApiKeys.read(api_keys_file) if api_keys_file else ApiKeys(),
        origins=tuple(origin or ()),
        threads=threads or max(1, cores() // workers),
        open_metrics=open_metrics,
        room_keys=room_keys,
        recognisers=find_recognisers(recogniser or []),
    )
    run(settings, port, workers)


@models_app.callback()
def models(context: typer.Context) -> None:
    """List the installed models; show or verify one.

    \b
    Examples:
      simulmt models
      simulmt models show en-zh
      simulmt models verify ./my-bundle
    """
    from simulmt.cli.display import print_table
    from simulmt.runtime.bundle import SHIPPED, Bundle, shipped_names

    if context.invoked_subcommand:
        return
    names = shipped_names()
    if not names:
        typer.echo("no models installed; create one with simulmt export", err=True)
        return
    rows = []
    for name in names:
        try:
            properties = _properties(Bundle(SHIPPED / name))
        except BundleError as error:  # still list the others
            typer.echo(f"simulmt: {error}", err=True)
        else:
            rows.append([properties[label] for label in LISTED])
    print_table(LISTED, rows, names=len(LISTED))


@models_app.command()
def show(name: Name) -> None:
    """Show a model's properties and its card."""
    from simulmt.runtime.bundle import CARD, Bundle, find

    bundle = Bundle(find(name))
    for label, value in _properties(bundle).items():
        typer.echo(f"{label:<16}{value}")
    card = bundle.directory / CARD
    if card.exists():
        typer.echo(f"\n{card.read_text(encoding='utf-8').rstrip()}")


@models_app.command()
def verify(name: Name) -> None:
    """Verify the checksums of a model's files."""
    from simulmt.runtime.bundle import Bundle, find

    bundle = Bundle(find(name))
    bundle.verify()
    typer.echo(f"{bundle.name}: all checksums match")


@models_app.command()
def path(name: Name) -> None:
    """Print the directory of a model."""
    from simulmt.runtime.bundle import find

    typer.echo(str(find(name)))


def load_translator(model: str | Path | None, delay: int | None, threads: int) -> Translator:
    """Load a model and check the delay."""
    import simulmt
    from simulmt.runtime.bundle import default_names

    translator = simulmt.load(model or next(default_names()), threads)
    _check_options(translator, delay)
    return translator


def _check_options(translator: Translator, delay: int | None, beam: int = 1) -> None:
    """Raise ConfigError if the model does not support the delay or the beam."""
    try:
        translator.stream(delay, beam)
    except StreamError as error:  # starts with the argument's name, which is also the option's
        raise ConfigError(f"--{error}") from None


@contextmanager
def _open_input(file: Path) -> Iterator[int]:
    """Open a file or standard input, and yield its descriptor."""
    if file == STANDARD_INPUT:
        try:
            os.fstat(0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard input") from None
        yield 0
        return
    if " " in str(file) and not file.exists():
        raise ConfigError(f'{file}: no such file; to translate a sentence: echo "{file}" | simulmt translate')
    with file.open("rb", buffering=0) as opened:
        yield opened.fileno()


def _command() -> str:
    """Return how to run simulmt in this shell."""
    if shutil.which("simulmt"):
        return "simulmt"
    program = Path(sys.argv[0])
    return "python -m simulmt" if program.name == "__main__.py" else shlex.quote(os.path.relpath(program))


def _warn_once(arrivals: Iterator[list[Arrival]], name: str) -> Iterator[list[Arrival]]:
    """Yield all arrivals unchanged; warn once about bytes that are not UTF-8."""
    warned = False
    for arrived in arrivals:
        bad_line = next((part.bad_line for part in arrived if part.bad_line), None)
        if bad_line and not warned:
            warned = True
            advice = "skipping bytes that are not UTF-8; convert the text with `iconv`"
            typer.echo(f"simulmt: {name}: line {bad_line}: {advice}", err=True)
        yield arrived


def utf8_output() -> TextIO:
    """Return standard output as UTF-8, whatever the locale."""
    if sys.stdout is None:
        raise DataError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout


def _translate_speech(speech: LiveSpeech, blocks: Iterator[Samples], writer: Writer) -> None:
    """Translate until the audio ends or the user presses Ctrl-C; speech up to then is still translated."""
    from simulmt.runtime.pipe import SentenceLines

    lines = SentenceLines(writer)
    try:
        for samples in blocks:
            lines.write(speech.stream, speech.push(samples))
    except KeyboardInterrupt:
        lines.write(speech.stream, speech.finish())
        raise
    lines.write(speech.stream, speech.finish())


def _advance_clock(blocks: Iterator[Samples], clock: SpeechClock) -> Iterator[Samples]:
    """Advance the clock with the audio."""
    from simulmt.speech.audio import RATE

    heard = 0
    for samples in blocks:
        heard += len(samples)
        clock.advance_to(heard / RATE)
        yield samples


@contextmanager
def _open_audio(file: Path | None, device: str | None) -> Iterator[Iterator[Samples]]:
    """Open a file, standard input or a microphone."""
    from simulmt.speech.audio import listen_to_microphone, read_audio

    if file is None:
        yield listen_to_microphone(device)
    elif file == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise ConfigError("standard input is a terminal: pipe audio into it, or give a WAV file or --microphone")
        yield read_audio(sys.stdin.buffer, "standard input", allow_raw=True)
    else:
        with file.open("rb") as opened:
            yield read_audio(opened, str(file))


@contextmanager
def _open_transcript(path: Path | None) -> Iterator[Callable[[Sequence[Word]], None]]:
    """Write stable words to a file, one line per sentence."""
    if path is None:
        yield lambda _: None
        return
    with path.open("w", encoding="utf-8") as output:
        separator = ""

        def write(words: Sequence[Word]) -> None:
            nonlocal separator
            for word in words:
                if word.text:
                    output.write(f"{separator}{word.text}")
                    separator = " "
                if word.ends_sentence:
                    output.write("\n")
                    separator = ""
            output.flush()

        yield write


def _check_language(recogniser: Recogniser, name: str, translator: Translator) -> None:
    language, wanted = recogniser.language, translator.config.source_language
    if language is not None and language != wanted:
        raise ConfigError(
            f"--recogniser {name} is for {language}, but {translator.bundle.name} translates from {wanted}: "
            "give another --model, or --recogniser vosk:DIR or sherpa:DIR"
        )


def _limits(assignments: list[str]) -> Limits:
    from simulmt.config import build, override
    from simulmt.serve.access import Limits

    for assignment in assignments:
        if "=" not in assignment:
            raise ConfigError(f"--limit {assignment}: expected NAME=NUMBER, for example streams=500")
    return build(Limits, override({}, assignments), "--limit")


def _properties(bundle: Bundle) -> dict[str, str]:
    config = bundle.config
    size = sum(path.stat().st_size for path in bundle.directory.iterdir() if path.is_file())
    return {
        "model": bundle.name,
        "languages": f"{config.source_language} to {config.target_language}",
        "kind": f"{config.kind} {config.precision}",
        "size": f"{size / 1e6:.1f} MB",
        "delays": ",".join(map(str, config.delays)) or "full sentences",
        "default": str(config.default_delay or "-"),
        "look-ahead": "whole words" if config.whole_words or config.has_policy else "pieces",
        "vocabularies": f"{bundle.source.size} and {bundle.target.size} pieces",
        "directory": str(bundle.directory),
    }
