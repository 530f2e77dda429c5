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

UPDATE_SECONDS = 1.0  # between hypotheses; more frequent ones agree too readily
RESTART_AFTER = 60.0  # seconds after which a stream is restarted at the next silence ...
RESTART_AT_LATEST = 600.0  # ... or during speech
SILENCE_SECONDS = 1.0  # without speech
OVERLAP_SECONDS = 0.4  # of silence replayed to the new stream, so that it misses no onset
KEPT_SECONDS = 5.0  # of audio kept between lines, since a line starts before it is detected
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
    """A Moonshine model, by default the one in the wheel, with the voice activity detection of moonshine-voice."""

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

    Voice activity detection keeps all lines of a stream, so streams are restarted regularly to bound memory.
    """

    def __init__(self, model: Model, open_stream: Callable[[], Any]) -> None:
        self._model = model
        self._open_stream = open_stream
        self._stream = open_stream()
        self._stream_number = 0  # makes line ids unique
        self._stream_start = 0.0  # start of this stream, in seconds of audio
        self._audio_seconds = 0.0  # seconds of audio
        self._last_update = 0.0
        self._lines_finished = 0  # lines of this stream
        self._line_start: float | None = None  # start of the open line
        self._draft: list[int] = []  # tokens of the open line
        self._speech_end = 0.0  # end of the last line
        self._audio: Samples = np.zeros(0, np.float32)  # most recent samples

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._audio = np.concatenate([self._audio, samples])
        self._audio_seconds += len(samples) / RATE
        self._stream.add_audio(samples.tolist(), RATE)
        found = self._update()
        kept = KEPT_SECONDS if self._line_start is None else self._audio_seconds - self._line_start
        self._audio = self._audio[-math.ceil(kept * RATE) :]
        age = self._audio_seconds - self._stream_start
        is_silent = self._line_start is None and self._audio_seconds - self._speech_end > SILENCE_SECONDS
        if age > RESTART_AT_LATEST or (age > RESTART_AFTER and is_silent):
            found += self._restart(is_silent)
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
        """Recognise finished lines, and at intervals the open one."""
        found = []
        lines = self._stream.update_transcription().lines
        for number in range(self._lines_finished, len(lines)):
            line = lines[number]
            start = self._stream_start + line.start_time
            self._speech_end = start + line.duration
            if line.is_complete:
                found.append(self._recognise(number, start, True))
                self._lines_finished, self._line_start, self._draft = number + 1, None, []
            else:
                self._line_start = start
                if self._audio_seconds - self._last_update >= UPDATE_SECONDS:
                    found.append(self._recognise(number, start, False))
        return found

    def _recognise(self, number: int, start: float, is_final: bool) -> Hypothesis:
        self._last_update = self._audio_seconds
        origin = self._audio_seconds - len(self._audio) / RATE
        first, last = (max(0, round((time - origin) * RATE)) for time in (start, self._speech_end))
        self._draft = self._model.transcribe(self._audio[first:last], self._draft)
        text = self._model.text(self._draft)
        return Hypothesis(text, is_final, f"{self._stream_number}.{number}", start=start, end=self._speech_end)

    def _restart(self, is_silent: bool) -> list[Hypothesis]:
        found = self.finish()
        recent = self._audio[-int(OVERLAP_SECONDS * RATE) :] if is_silent else self._audio[:0]
        self._stream = self._open_stream()
        self._stream_start = self._audio_seconds - len(recent) / RATE
        self._stream_number += 1
        self._lines_finished = 0
        self._stream.add_audio(recent.tolist(), RATE)
        return found
