"""Speech recognition for sessions with audio.

Recognition runs in threads, one for each recogniser of the pool; sessions share them, block by block. A client's audio
is acknowledged as soon as it is received, so clients resend only audio lost in transit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from simulmt.errors import ConfigError, SpeechError
from simulmt.runtime.revisions import Word
from simulmt.serve.access import Counted, Counters, Limits, check_limit
from simulmt.serve.models import Metrics
from simulmt.serve.protocol import Ack, ErrorCode, RefusedError, Transcript
from simulmt.speech.audio import RATE, Samples
from simulmt.speech.live import Listener
from simulmt.speech.recogniser import (
    DEFAULT,
    DEFAULT_LANGUAGE,
    Recogniser,
    Recognition,
    is_default_installed,
    language_of,
    open_recogniser,
)

logger = logging.getLogger("simulmt.serve")

SAMPLE_BYTES = 2
ACKNOWLEDGED_EVERY = RATE // 2  # samples


@dataclass(frozen=True)
class Audio:
    """A binary frame: 16-bit little-endian mono samples at 16 kHz."""

    data: bytes

    @staticmethod
    def parse(data: bytes, max_bytes: int) -> Audio:
        """Validate a binary frame sent by a client."""
        if len(data) > max_bytes:
            raise RefusedError(ErrorCode.TOO_BIG, f"messages are limited to {max_bytes} bytes; send the audio in parts")
        if len(data) % SAMPLE_BYTES:
            raise RefusedError(
                ErrorCode.BAD_MESSAGE, f"expected 16-bit samples, got an odd number of bytes ({len(data)})"
            )
        return Audio(data)

    @property
    def length(self) -> int:
        """The number of samples."""
        return len(self.data) // SAMPLE_BYTES

    def samples(self) -> Samples:
        """Decode the samples."""
        return (np.frombuffer(self.data, "<i2") / (1 << 15)).astype(np.float32)


class _RecogniserThread:
    """A recogniser and the one thread that runs it; `load` and `start` are called only in the thread."""

    def __init__(self, language: str, name: str) -> None:
        self.language = language
        self.executor = ThreadPoolExecutor(1, f"recogniser-{language}")
        self._name = name
        self._recogniser: Recogniser | None = None

    def load(self) -> Recogniser:
        """Load the recogniser, unless it is loaded already."""
        if self._recogniser is None:
            try:
                self._recogniser = open_recogniser(self._name)
            except Exception as error:  # the errors of the libraries have no common base class
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise SpeechError(
                    f"cannot load the recogniser for {self.language}: {reason}; to serve text only: --recogniser none"
                ) from None
        return self._recogniser

    def start(self) -> Recognition:
        """Start recognising a speaker."""
        try:
            return self.load().start()
        except SpeechError as error:
            logger.error("%s", error)
            raise RefusedError(
                ErrorCode.NO_RECOGNISER, f"the recogniser for {self.language} does not work; see the log of the server"
            ) from None


class RecogniserPool:
    """Recognises the speech of a bounded number of sessions; maps languages to recognisers."""

    def __init__(self, recognisers: Mapping[str, str], limits: Limits, metrics: Metrics, counters: Counters) -> None:
        self._limits = limits
        self._metrics = metrics
        self._counters = counters
        self._threads = {language: _RecogniserThread(language, name) for language, name in recognisers.items()}

    def load(self) -> None:
        """Load all recognisers now instead of when each is first needed; raise SpeechError if one cannot be loaded."""
        for thread in self._threads.values():
            thread.executor.submit(thread.load).result()

    def open(self, language: str) -> SpeechInput:
        """Start recognising a speaker."""
        if language not in self._threads:
            known = ", ".join(sorted(self._threads)) or "none"
            raise RefusedError(ErrorCode.NO_RECOGNISER, f"no recogniser for {language}; available: {known}")
        check_limit(self._counters.total(Counted.AUDIO), self._limits.audio_streams, "audio streams")
        return SpeechInput(self._threads[language], self._metrics, self._counters)

    def close(self) -> None:
        """Stop all threads."""
        for thread in self._threads.values():
            thread.executor.shutdown(wait=False, cancel_futures=True)


class SpeechInput:
    """The audio input of one session; called by one task at a time."""

    def __init__(self, thread: _RecogniserThread, metrics: Metrics, counters: Counters) -> None:
        self.received = 0  # samples
        self._acknowledged = 0
        self._thread = thread
        self._metrics = metrics
        self._counters = counters
        self._listener: Listener | None = None
        self._is_open = True
        self._transcripts = 0
        self._shown = ""  # the last tentative text sent
        self._count(1)

    def receive(self, audio: Audio) -> Ack | None:
        """Count received audio; return an acknowledgement when one is due."""
        self.received += audio.length
        if self.received - self._acknowledged < ACKNOWLEDGED_EVERY:
            return None
        self._acknowledged = self.received
        return Ack(self.received)

    @property
    def seconds(self) -> float:
        """Seconds of audio recognised so far."""
        return self._listener.seconds if self._listener else 0.0

    async def recognise(self, audio: Audio | None) -> list[Word]:
        """Recognise received audio, or end it with None; return the words that are now stable."""
        return await asyncio.get_running_loop().run_in_executor(self._thread.executor, self._recognise, audio)

    def transcripts(self, words: Sequence[Word]) -> list[Transcript]:
        """Return the messages for new words or a changed tentative text; each holds words of one sentence."""
        tentative = self._listener.tentative if self._listener else ""
        texts, is_changed = _by_sentence(words), tentative != self._shown
        self._shown = tentative
        if is_changed and not texts:
            texts = [("", False)]
        first, self._transcripts = self._transcripts + 1, self._transcripts + len(texts)
        return [Transcript(seq, text, tentative, is_end) for seq, (text, is_end) in enumerate(texts, start=first)]

    def close(self) -> None:
        """Free the recogniser; may be called more than once."""
        if not self._is_open:
            return
        self._is_open = False
        self._count(-1)
        with suppress(RuntimeError):  # when the pool is closed
            self._thread.executor.submit(self._close_listener)

    def _count(self, change: int) -> None:
        self._counters.add(Counted.AUDIO, "", change)
        self._metrics.audio.inc(change)

    def _close_listener(self) -> None:
        """Run in the recogniser's thread, after a recognition that still runs: the first one opens the listener."""
        if self._listener is not None:
            self._listener.close()

    def _recognise(self, audio: Audio | None) -> list[Word]:
        """Run in the recogniser's thread."""
        if self._listener is None:
            self._listener = Listener(self._thread.start())
        before, started = self._listener.seconds, time.perf_counter()
        words = self._listener.finish() if audio is None else self._listener.push(audio.samples())
        language = self._thread.language
        self._metrics.audio_seconds.labels(language).inc(self._listener.seconds - before)
        self._metrics.recognition_seconds.labels(language).inc(time.perf_counter() - started)
        return words


def _by_sentence(words: Sequence[Word]) -> list[tuple[str, bool]]:
    """Join words; return the text of each sentence, and whether the sentence is complete."""
    sentences, text = [], ""
    for word in words:
        text += f"{word.text} " if word.text else ""
        if word.ends_sentence:
            sentences.append((text, True))
            text = ""
    return [*sentences, (text, False)] if text else sentences


def find_recognisers(options: Sequence[str]) -> dict[str, str]:
    """Return the names of recognisers by language, from options [LANGUAGE=]NAME[:DIR].

    The default is moonshine, if it is installed; `none` disables recognition.
    """
    if not options:
        return {DEFAULT_LANGUAGE: DEFAULT} if is_default_installed() else {}
    found: dict[str, str] = {}
    for option in options if list(options) != ["none"] else []:
        language, equals, name = option.rpartition("=")
        implied = language_of(name)  # also validates the name, whether or not a language is given
        language = language if equals else implied or ""
        if not language:
            raise ConfigError(f"--recogniser {option}: unknown language; give LANGUAGE={name}")
        if language in found:
            raise ConfigError(f"--recogniser {option}: duplicate recogniser for {language}; give one per language")
        found[language] = name
    return found
