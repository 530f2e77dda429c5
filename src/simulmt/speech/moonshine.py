"""Moonshine recognisers; the wheel of moonshine-voice 0.0.65 includes tiny-en."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from simulmt.errors import MissingExtraError, SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech.audio import RATE, Samples
from simulmt.speech.events import EventReader

UPDATE_SECONDS = 0.5  # minimum interval between hypotheses
UPDATE_SHARE = 0.35  # of the open line, all of which is read again each time: a long one is updated less often ...
UPDATE_MOST = 1.2  # ... but not less than that
RENEWED_AFTER = 60.0  # seconds after which a stream is replaced in the next silence ...
RENEWED_AT_LAST = 600.0  # ... or in mid-speech
RECYCLED_AFTER = 1200.0  # seconds of audio after which a process gives way to another
SILENCE = 1.0  # seconds without speech
OVERLAP = 0.4  # seconds of silence replayed to the new stream, so that it misses no onset
ARCHITECTURES = {"tiny": "TINY", "base": "BASE"}  # by the first part of the directory name


class MoonshineRecogniser:
    """A Moonshine model, by default the one in the wheel, in a process that is replaced from time to time.

    The library leaks the audio of every hypothesis, some 0.2 MB per second of speech. Streams are replaced regularly
    anyway, so they move on to a new process when the old one has heard enough.
    """

    language: str | None = "en"

    def __init__(self, directory: Path | None = None) -> None:
        library = find_spec("moonshine_voice")
        if library is None or library.origin is None:
            raise MissingExtraError("the recogniser moonshine", "speech")
        path = directory or Path(library.origin).parent / "assets" / "tiny-en"
        size, _, language = path.name.partition("-")
        if not path.is_dir():
            raise SpeechError(f"{path}: not in this version of moonshine-voice; install moonshine-voice==0.0.65")
        if size not in ARCHITECTURES:
            raise SpeechError(f"{path}: expected a directory named tiny-LANGUAGE or base-LANGUAGE")
        self.language = language or None
        self._path = path
        self._architecture = ARCHITECTURES[size]
        self._process = TranscriberProcess(path, self._architecture)

    def start(self) -> MoonshineRecognition:
        return MoonshineRecognition(self.process)

    def process(self) -> TranscriberProcess:
        """Return the process for a new stream."""
        if self._process.seconds > RECYCLED_AFTER or not self._process.is_alive:
            self._process.retire()
            self._process = TranscriberProcess(self._path, self._architecture)
        return self._process


class TranscriberProcess:
    """A transcriber in a process of its own, see simulmt.speech.moonshine_host."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.seconds = 0.0  # of audio heard
        self._lock = Lock()
        self._streams = 0  # open
        self._opened = 0  # ever
        self._is_retired = False
        command = [sys.executable, "-m", "simulmt.speech.moonshine_host", str(path), architecture]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._answer()
        except SpeechError as error:
            raise SpeechError(f"{path}: {error}") from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def create_stream(self) -> TranscriberStream:
        self._opened += 1
        self._streams += 1
        stream = TranscriberStream(self, self._opened)
        self.call("open", self._opened)
        return stream

    def call(self, operation: str, stream: int, samples: bytes = b"") -> Any:
        """Run an operation there; return its result."""
        request = {"operation": operation, "stream": stream, "bytes": len(samples)}
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n" + samples)
                self._process.stdin.flush()
            except (OSError, ValueError):  # a broken or a closed pipe
                raise SpeechError("the process of the recogniser has died") from None
            return self._answer()

    def closed_stream(self) -> None:
        """Note that a stream is closed."""
        self._streams -= 1
        self._end_if_unused()

    def retire(self) -> None:
        """End the process once its last stream is closed."""
        self._is_retired = True
        self._end_if_unused()

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._streams:
            self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SpeechError("the process of the recogniser has died")
        answer = json.loads(line)
        if "error" in answer:
            raise SpeechError(answer["error"])
        return answer["result"]


class TranscriberStream:
    """A stream of a transcriber in another process."""

    def __init__(self, process: TranscriberProcess, number: int) -> None:
        self._process = process
        self._number = number

    def add_audio(self, samples: Samples) -> None:
        self._process.seconds += len(samples) / RATE
        self._process.call("add", self._number, samples.astype(np.float32).tobytes())

    def update(self) -> list[dict[str, Any]]:
        """Recognise what was added; return all lines."""
        lines: list[dict[str, Any]] = self._process.call("update", self._number)
        return lines

    def stop(self) -> None:
        self._process.call("stop", self._number)

    def close(self) -> None:
        with suppress(SpeechError):
            self._process.call("close", self._number)
        self._process.closed_stream()


class MoonshineRecognition:
    """Recognises one speaker.

    A Moonshine stream keeps all of its audio, so streams are replaced regularly to bound memory.
    """

    def __init__(self, process: Callable[[], Any]) -> None:
        self._process = process  # for the next stream
        self._events = EventReader()
        self._stream: Any = None
        self._renewed = 0  # number of this stream, to make line ids unique
        self._begun = 0.0  # start of this stream, in seconds of audio
        self._heard = 0.0  # seconds of audio
        self._updated = 0.0
        self._open: Hypothesis | None = None  # the line in progress
        self._spoken = 0.0  # when the last line ended
        self._recent: Samples = np.zeros(0, np.float32)  # the last OVERLAP of the audio
        self._open_stream()

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._stream.add_audio(samples)
        self._heard += len(samples) / RATE
        self._recent = np.concatenate([self._recent, samples])[-int(OVERLAP * RATE) :]
        open_seconds = self._heard - (self._open.start or 0.0) if self._open else 0.0
        if self._heard - self._updated < min(max(UPDATE_SECONDS, UPDATE_SHARE * open_seconds), UPDATE_MOST):
            return []
        found = self._update()
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

    def _open_stream(self) -> None:
        self._stream = self._process().create_stream()

    def _update(self) -> list[Hypothesis]:
        """Recognise the audio added so far; return the lines that changed."""
        self._updated = self._heard
        found: list[Hypothesis] = []
        for line in self._stream.update():
            if line["is_updated"] or line["is_new"]:
                name, start = f"{self._renewed}.{line['line_id']}", self._begun + line["start_time"]
                found += self._events.read_moonshine({**line, "line_id": name, "start_time": start})
        if found:
            self._open = None if found[-1].is_final else found[-1]
            self._spoken = found[-1].end or self._spoken
        return found

    def _renew(self, is_silent: bool) -> list[Hypothesis]:
        found = self.finish()
        self._open, self._begun, self._renewed = None, self._heard, self._renewed + 1
        self._open_stream()
        if is_silent:
            self._begun -= len(self._recent) / RATE
            self._stream.add_audio(self._recent)
        return found
