"""Vosk: some twenty languages, without punctuation; needs `pip install vosk` and a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from simulmt.errors import SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import RATE, Samples
from simulmt.speech.events import EventReader

UPDATE_SAMPLES = RATE * 3 // 10  # between hypotheses; more frequent ones agree too readily
MODEL_FILES = ("am/final.mdl", "final.mdl")  # one of them


class VoskRecogniser:
    """A loaded Vosk model."""

    language: str | None = None

    def __init__(self, directory: Path) -> None:
        try:
            import vosk
        except ImportError:
            raise SpeechError("the recogniser vosk is not installed: pip install vosk") from None
        if not any((directory / name).is_file() for name in MODEL_FILES):  # the library would log its own errors
            raise SpeechError(f"{directory}: no {MODEL_FILES[0]}; expected the directory of a Vosk model")
        vosk.SetLogLevel(-1)
        self._library = vosk
        try:
            self._model = vosk.Model(str(directory))
        except Exception:  # the library raises a plain Exception
            raise SpeechError(f"{directory}: Vosk cannot load it") from None

    def start(self) -> VoskRecognition:
        recognizer = self._library.KaldiRecognizer(self._model, float(RATE))
        recognizer.SetWords(True)
        return VoskRecognition(recognizer)


class VoskRecognition:
    """Recognises one speaker."""

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
