"""Moonshine recognisers; the wheel of moonshine-voice 0.0.65 includes tiny-en."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from simulmt.errors import MissingExtraError, SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import RATE, Samples

UPDATE_SECONDS = 1.0  # between hypotheses; two that follow each other more closely agree on words too readily
RENEWED_AFTER = 60.0  # seconds after which a stream is replaced in the next silence ...
RENEWED_AT_LAST = 600.0  # ... or in mid-speech
SILENCE = 1.0  # seconds without speech
OVERLAP = 0.4  # seconds of silence replayed to the new stream, so that it misses no onset
KEPT = 5.0  # seconds of audio kept without an open line: one begins somewhat before it is detected
VAD_OPTIONS = {  # detect lines of speech, do not transcribe them
    "skip_transcription": "true",
    "transcription_interval": "0.05",
    "return_audio_data": "false",
    "identify_speakers": "false",
}


class Model(Protocol):
    """Recognises segments of speech."""

    def transcribe(self, samples: Samples, draft: Sequence[int] = ()) -> list[int]: ...

    def text(self, tokens: Sequence[int]) -> str: ...


class MoonshineRecogniser:
    """A Moonshine model, by default the one in the wheel; moonshine-voice detects the voice."""

    language: str | None

    def __init__(self, directory: Path | None = None) -> None:
        library = find_spec("moonshine_voice")
        if library is None or library.origin is None:
            raise MissingExtraError("the recogniser moonshine", "speech")
        path = directory or Path(library.origin).parent / "assets" / "tiny-en"
        if not path.is_dir():
            raise SpeechError(f"{path}: not in this version of moonshine-voice; install moonshine-voice==0.0.65")
        from moonshine_voice.moonshine_api import ModelArch
        from moonshine_voice.transcriber import Transcriber

        from simulmt.speech.moonshine_model import MoonshineModel

        self.language = path.name.partition("-")[2] or None
        self._model = MoonshineModel(path, self.language)
        self._detector = Transcriber(path, ModelArch.TINY, options=VAD_OPTIONS)

    def start(self) -> MoonshineRecognition:
        return MoonshineRecognition(self._model, self._open_stream)

    def _open_stream(self) -> Any:
        stream: Any = self._detector.create_stream(update_interval=sys.float_info.max)
        stream.start()
        return stream


class MoonshineRecognition:
    """Recognises one speaker.

    The voice detector keeps all lines of a stream, so streams are replaced regularly to bound memory.
    """

    def __init__(self, model: Model, open_stream: Callable[[], Any]) -> None:
        self._model = model
        self._open_stream = open_stream
        self._stream = open_stream()
        self._renewed = 0  # number of this stream, to make line ids unique
        self._begun = 0.0  # start of this stream, in seconds of audio
        self._heard = 0.0  # seconds of audio
        self._updated = 0.0
        self._finished = 0  # lines of this stream
        self._open: float | None = None  # the start of the line in progress
        self._draft: list[int] = []  # its tokens so far
        self._spoken = 0.0  # when the last line ended
        self._audio: Samples = np.zeros(0, np.float32)  # the latest

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._audio = np.concatenate([self._audio, samples])
        self._heard += len(samples) / RATE
        self._stream.add_audio(samples.tolist(), RATE)
        found = self._update()
        kept = KEPT if self._open is None else self._heard - self._open
        self._audio = self._audio[-math.ceil(kept * RATE) :]
        age = self._heard - self._begun
        is_silent = self._open is None and self._heard - self._spoken > SILENCE
        if age > RENEWED_AT_LAST or (age > RENEWED_AFTER and is_silent):
            found += self._renew(is_silent)
        return found

    def finish(self) -> list[Hypothesis]:
        self._stream.stop()
        found = self._update()
        self.close()
        return found

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _update(self) -> list[Hypothesis]:
        """Recognise lines that have ended, and from time to time the open one."""
        found = []
        lines = self._stream.update_transcription().lines
        for number in range(self._finished, len(lines)):
            line = lines[number]
            start = self._begun + line.start_time
            self._spoken = start + line.duration
            if line.is_complete:
                found.append(self._recognise(number, start, True))
                self._finished, self._open, self._draft = number + 1, None, []
            else:
                self._open = start
                if self._heard - self._updated >= UPDATE_SECONDS:
                    found.append(self._recognise(number, start, False))
        return found

    def _recognise(self, number: int, start: float, is_final: bool) -> Hypothesis:
        self._updated = self._heard
        origin = self._heard - len(self._audio) / RATE
        first, last = (max(0, round((time - origin) * RATE)) for time in (start, self._spoken))
        self._draft = self._model.transcribe(self._audio[first:last], self._draft)
        text = self._model.text(self._draft)
        return Hypothesis(text, is_final, f"{self._renewed}.{number}", start=start, end=self._spoken)

    def _renew(self, is_silent: bool) -> list[Hypothesis]:
        found = self.finish()
        recent = self._audio[-int(OVERLAP * RATE) :] if is_silent else self._audio[:0]
        self._stream = self._open_stream()
        self._begun, self._renewed, self._finished = self._heard - len(recent) / RATE, self._renewed + 1, 0
        self._stream.add_audio(recent.tolist(), RATE)
        return found
