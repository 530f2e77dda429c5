"""Speech recognisers behind one interface; their libraries are imported only when a recogniser is opened.

    recogniser = open_recogniser("moonshine")
    recognition = recogniser.start()
    for samples in blocks:
        for hypothesis in recognition.push(samples): ...

Recognisers are named by library and model directory: moonshine, moonshine:DIR, vosk:DIR, sherpa:DIR. Vosk supports
some twenty languages and writes no punctuation; sherpa-onnx runs streaming transducers.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from simulmt.errors import ConfigError, SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import RATE, Samples
from simulmt.speech.events import EventReader
from simulmt.speech.moonshine import MoonshineRecogniser

DEFAULT = "moonshine"
DEFAULT_LANGUAGE = "en"
UPDATE_SAMPLES = RATE * 3 // 10  # between hypotheses; more frequent ones agree too readily
VOSK_FILES = ("am/final.mdl", "final.mdl")  # one of them
SHERPA_FILES = {"tokens": "tokens.txt", **{part: f"{part}*.onnx" for part in ("encoder", "decoder", "joiner")}}


class Recognition(Protocol):
    """Recognises one speaker; hypotheses are timed in seconds of audio."""

    def push(self, samples: Samples) -> list[Hypothesis]:
        """Add samples at 16 kHz, in blocks of any length; return new and revised hypotheses."""

    def finish(self) -> list[Hypothesis]:
        """End the audio; return the last hypotheses. Nothing may be pushed after this."""

    def close(self) -> None:
        """Free all resources; may be called more than once."""


class Recogniser(Protocol):
    """A loaded model, shared by any number of speakers."""

    language: str | None  # None if the model does not say

    def start(self) -> Recognition:
        """Start recognising a speaker."""


def open_recogniser(name: str = DEFAULT) -> Recogniser:
    """Load a recogniser by name."""
    kind, directory = parse_name(name)
    if kind == "moonshine":
        return MoonshineRecogniser(directory)
    assert directory is not None
    return VoskRecogniser(directory) if kind == "vosk" else SherpaRecogniser(directory)


def parse_name(name: str) -> tuple[str, Path | None]:
    """Split the name of a recogniser into library and model directory, and check both."""
    kind, _, path = name.partition(":")
    if kind not in ("moonshine", "vosk", "sherpa"):
        raise ConfigError(f"recogniser {name!r}: expected moonshine, moonshine:DIR, vosk:DIR or sherpa:DIR")
    if not path:
        if kind == DEFAULT:
            return kind, None
        raise ConfigError(f"recogniser {name}: expected the directory of a model, {kind}:DIR")
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise SpeechError(f"{directory}: no such directory; expected a model of the recogniser")
    return kind, directory


def language_of(name: str) -> str | None:
    """Return the language of a recogniser if its name implies one."""
    kind, directory = parse_name(name)
    if kind != DEFAULT:
        return None
    return DEFAULT_LANGUAGE if directory is None else directory.name.partition("-")[2] or None


def is_default_installed() -> bool:
    """Return whether the default recogniser is installed, without importing it."""
    return find_spec("moonshine_voice") is not None


class VoskRecogniser:
    """A loaded Vosk model."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import vosk
        except ImportError:
            raise SpeechError("the recogniser vosk is not installed: pip install vosk") from None
        if not any((directory / name).is_file() for name in VOSK_FILES):  # the library would log its own errors
            raise SpeechError(f"{directory}: no {VOSK_FILES[0]}; expected the directory of a Vosk model")
        vosk.SetLogLevel(-1)
        self._library = vosk
        try:
            self._model = vosk.Model(str(directory))
        except Exception:  # the library raises a plain Exception
            raise SpeechError(f"{directory}: Vosk cannot load it; download the model again") from None

    def start(self) -> VoskRecognition:
        recognizer = self._library.KaldiRecognizer(self._model, float(RATE))
        recognizer.SetWords(True)
        return VoskRecognition(recognizer)


class VoskRecognition:
    """Recognises one speaker with Vosk."""

    def __init__(self, recognizer: Any) -> None:
        self._recognizer = recognizer
        self._events = EventReader()
        self._since_update = 0  # samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        is_final = self._recognizer.AcceptWaveform((samples * 32767).astype(np.int16).tobytes())
        self._since_update += len(samples)
        if not is_final and self._since_update < UPDATE_SAMPLES:
            return []
        self._since_update = 0
        return self._read(self._recognizer.Result() if is_final else self._recognizer.PartialResult())

    def finish(self) -> list[Hypothesis]:
        return self._read(self._recognizer.FinalResult())

    def close(self) -> None:
        """Do nothing: the library frees its own resources."""

    def _read(self, event: str) -> list[Hypothesis]:
        return self._events.read_vosk(json.loads(event))


class SherpaRecogniser:
    """A loaded streaming transducer: tokens.txt and encoder, decoder and joiner as .onnx files."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import sherpa_onnx
        except ImportError:
            raise SpeechError("the recogniser sherpa is not installed: pip install sherpa-onnx") from None
        files = {part: _find(directory, pattern) for part, pattern in SHERPA_FILES.items()}
        try:
            self._recognizer = sherpa_onnx.OnlineRecognizer.from_transducer(
                **files, num_threads=1, enable_endpoint_detection=True
            )
        except Exception as error:  # the library's errors have no common base class
            raise SpeechError(f"{directory}: sherpa-onnx cannot load it: {str(error).splitlines()[0]}") from None

    def start(self) -> SherpaRecognition:
        return SherpaRecognition(self._recognizer)


class SherpaRecognition:
    """Recognises one speaker with sherpa-onnx."""

    def __init__(self, recognizer: Any) -> None:
        self._recognizer = recognizer
        self._stream = recognizer.create_stream()
        self._segment = 0
        self._since_update = 0  # samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._stream.accept_waveform(RATE, samples)
        self._decode()
        self._since_update += len(samples)
        is_final = self._recognizer.is_endpoint(self._stream)
        if not is_final and self._since_update < UPDATE_SAMPLES:
            return []
        self._since_update = 0
        return self._hypotheses(is_final)

    def finish(self) -> list[Hypothesis]:
        self._stream.input_finished()
        self._decode()
        return self._hypotheses(is_final=True)

    def close(self) -> None:
        """Do nothing: the library frees its own resources."""

    def _decode(self) -> None:
        while self._recognizer.is_ready(self._stream):
            self._recognizer.decode_stream(self._stream)

    def _hypotheses(self, is_final: bool) -> list[Hypothesis]:
        text = self._recognizer.get_result(self._stream)
        text = text.lower() if text.isupper() else text  # many models write capitals only
        found = [Hypothesis(text, is_final, self._segment)] if text else []
        if is_final:
            self._recognizer.reset(self._stream)
            self._segment += 1
        return found


def _find(directory: Path, pattern: str) -> str:
    """Return the path of a file of the model; prefer the quantized one."""
    found = sorted(directory.glob(pattern), key=lambda path: (".int8." not in path.name, path.name))
    if not found:
        raise SpeechError(f"{directory}: no {pattern}; expected the directory of a streaming transducer")
    return str(found[0])
