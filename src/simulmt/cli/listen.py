"""The command `simulmt listen`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulmt.cli.common import Panel
from simulmt.cli.live import STANDARD_INPUT, Delay, Model, Threads, load_translator, utf8_output
from simulmt.errors import ConfigError, SpeechError
from simulmt.runtime.captions import Format, Writer, open_writer
from simulmt.runtime.pipe import SentenceLines

if TYPE_CHECKING:
    from simulmt.runtime.revisions import Word
    from simulmt.runtime.stream import Translator
    from simulmt.speech.audio import Samples
    from simulmt.speech.live import LiveSpeech, SpeechClock
    from simulmt.speech.recogniser import Recogniser


def register(app: typer.Typer) -> None:
    """Add this module's command to the application."""
    app.command(rich_help_panel=Panel.TRANSLATE)(listen)


def listen(
    file: Annotated[
        Path | None,
        typer.Argument(help="WAV file; - reads WAV or 16-bit mono PCM at 16 kHz from standard input."),
    ] = None,
    microphone: Annotated[bool, typer.Option("--microphone", help="Listen to the microphone; Ctrl-C ends.")] = False,
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

    Runs offline on the CPU. Moonshine recognises English; for other languages give a Vosk or sherpa-onnx model
    directory. Subtitles of a file are timed by its audio.

    \b
    Examples:
      simulmt listen --microphone
      simulmt listen talk.wav --delay 3 --format srt > talk.srt
      ffmpeg -i talk.mp4 -f wav - | simulmt listen -
      simulmt listen rede.wav --model de-en --recogniser vosk:vosk-model-small-de-0.15
    """
    if (file is None) != microphone:
        raise ConfigError("give either a WAV file, or - for standard input, or --microphone")
    from simulmt.speech.live import LiveSpeech, SpeechClock
    from simulmt.speech.recogniser import open_recogniser

    with _blocks(file, device) as blocks, _transcript(transcript) as write_words:
        translator = load_translator(model, delay, threads)
        opened = open_recogniser(recogniser)
        _check_language(opened, recogniser, translator)
        speech = LiveSpeech(translator, opened.start(), delay, write_words)
        clock = translator.clock
        if not microphone:
            translator.clock = recorded = SpeechClock()  # measure lag and time subtitles as in a live stream
            blocks, clock = _paced(blocks, recorded), lambda: speech.listener.seconds
        else:
            typer.echo("Listening; Ctrl-C ends.", err=True)
        with closing(speech), closing(open_writer(style, utf8_output(), clock)) as writer:
            _translate(speech, blocks, writer)
        if not speech.stream.sentences_finished:
            typer.echo("simulmt: no speech was recognised", err=True)


def _translate(speech: LiveSpeech, blocks: Iterator[Samples], writer: Writer) -> None:
    """Translate until the audio ends or the user presses Ctrl-C; speech up to then is still translated."""
    lines = SentenceLines(writer)
    try:
        for samples in blocks:
            lines.write(speech.stream, speech.push(samples))
    except KeyboardInterrupt:
        lines.write(speech.stream, speech.finish())
        raise
    lines.write(speech.stream, speech.finish())


def _paced(blocks: Iterator[Samples], clock: SpeechClock) -> Iterator[Samples]:
    """Advance the clock with the audio."""
    from simulmt.speech.audio import RATE

    heard = 0
    for samples in blocks:
        heard += len(samples)
        clock.advance_to(heard / RATE)
        yield samples


@contextmanager
def _blocks(file: Path | None, device: str | None) -> Iterator[Iterator[Samples]]:
    """Open a file, standard input or a microphone."""
    from simulmt.speech.audio import listen_to_microphone, read_audio

    if file is None:
        yield listen_to_microphone(device)
    elif file == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise ConfigError("standard input is a terminal: pipe audio into it, or give a WAV file or --microphone")
        yield read_audio(sys.stdin.buffer, "standard input")
    else:
        try:
            opened = file.open("rb")
        except OSError as error:
            raise SpeechError(f"{file}: cannot be read: {error.strerror}") from None
        with opened:
            yield read_audio(opened, str(file))


@contextmanager
def _transcript(path: Path | None) -> Iterator[Callable[[Sequence[Word]], None]]:
    """Write stable words to a file, one line per sentence."""
    if path is None:
        yield lambda _: None
        return
    with path.open("w", encoding="utf-8") as output:

        def write(words: Sequence[Word]) -> None:
            for word in words:
                output.write(f"{word.text} " if word.text else "")
                output.write("\n" if word.ends_sentence else "")
            output.flush()

        yield write


def _check_language(recogniser: Recogniser, name: str, translator: Translator) -> None:
    language, wanted = recogniser.language, translator.config.source_language
    if language is not None and language != wanted:
        raise ConfigError(
            f"--recogniser {name} is for {language}, but {translator.bundle.name} translates from {wanted}: "
            "give another --model, or --recogniser vosk:DIR or sherpa:DIR"
        )
