"""A common interface to speech recognisers; their libraries are imported only when needed.

    recogniser = open_recogniser("moonshine")
    recognition = recogniser.start()
    for samples in blocks:
        for hypothesis in recognition.push(samples): ...

Recognisers are named by library and model directory: moonshine, moonshine:DIR, vosk:DIR, sherpa:DIR.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from simulmt.errors import ConfigError, SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import Samples

DEFAULT = "moonshine"
DEFAULT_LANGUAGE = "en"
LIBRARIES = {"moonshine": "moonshine_voice", "vosk": "vosk", "sherpa": "sherpa_onnx"}


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
    kind, directory = check_name(name)
    if kind == "moonshine":
        from simulmt.speech.moonshine import MoonshineRecogniser

        return MoonshineRecogniser(directory)
    assert directory is not None
    if kind == "vosk":
        from simulmt.speech.vosk import VoskRecogniser

        return VoskRecogniser(directory)
    from simulmt.speech.sherpa import SherpaRecogniser

    return SherpaRecogniser(directory)


def check_name(name: str) -> tuple[str, Path | None]:
    """Split a name into library and directory; raise an error if either is invalid."""
    kind, _, path = name.partition(":")
    if kind not in LIBRARIES:
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
    kind, directory = check_name(name)
    if kind != DEFAULT:
        return None
    return DEFAULT_LANGUAGE if directory is None else directory.name.partition("-")[2] or None


def is_installed(kind: str) -> bool:
    """Check whether the library of a recogniser is installed, without importing it."""
    return find_spec(LIBRARIES[kind]) is not None
