"""Live speech translation: recogniser, stabiliser and stream.

    speech = LiveSpeech(translator, open_recogniser().start(), delay=3)
    for samples in blocks:
        for commit in speech.push(samples): ...
    for commit in speech.finish(): ...

Words are translated as soon as they are stable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from simulmt.runtime.revisions import Hypothesis, Stabiliser, Word, feed
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.speech.audio import RATE, Samples
from simulmt.speech.recogniser import Recogniser, Recognition


class Listener:
    """Recognises speech and returns stable words, timed in seconds of audio."""

    def __init__(self, recognition: Recognition) -> None:
        self._recognition = recognition
        self._stabiliser = Stabiliser()
        self.seconds = 0.0  # seconds of audio

    @property
    def tentative(self) -> str:
        """Words that may still be revised."""
        return self._stabiliser.tentative

    def push(self, samples: Samples) -> list[Word]:
        """Recognise more audio; return the words that are now stable."""
        self.seconds += len(samples) / RATE
        return self._stabilise(self._recognition.push(samples)) + self._stabiliser.tick(self.seconds)

    def finish(self) -> list[Word]:
        """End the audio; return the remaining words."""
        words = self._stabilise(self._recognition.finish()) + self._stabiliser.flush(self.seconds)
        self.close()
        return words

    def close(self) -> None:
        """Free the recogniser."""
        self._recognition.close()

    def _stabilise(self, hypotheses: Sequence[Hypothesis]) -> list[Word]:
        return [word for hypothesis in hypotheses for word in self._stabiliser.push(hypothesis, self.seconds)]


def transcribe(recogniser: Recogniser, samples: Samples) -> str:
    """Return the text of a whole recording."""
    with closing(recogniser.start()) as recognition:
        found = [*recognition.push(samples), *recognition.finish()]
    return " ".join(hypothesis.text for hypothesis in found if hypothesis.is_final)


class SpeechClock:
    """Simulates real time for recorded speech.

    Time advances to the end of each block of audio, plus the time spent computing. So the lag measured on a file is
    that of a live stream, however fast the file is read.
    """

    def __init__(self) -> None:
        self._offset = -time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() + self._offset

    def advance_to(self, seconds: float) -> None:
        """Advance to this second of the audio, unless the clock is already past it."""
        self._offset += max(0.0, seconds - self())


class LiveSpeech:
    """Recognises and translates speech; the audio counterpart of `Stream`."""

    def __init__(
        self,
        translator: Translator,
        recognition: Recognition,
        delay: int | None = None,
        on_words: Callable[[Sequence[Word]], None] = lambda _: None,
    ) -> None:
        self.stream: Stream = translator.stream(delay)
        self.listener = Listener(recognition)
        self._translator = translator
        self._on_words = on_words  # called with new stable words
        self.recognition_seconds = self.translation_seconds = 0.0  # of computation

    def push(self, samples: Samples, arrived: float | None = None) -> list[Commit]:
        """Translate more audio; `arrived` is its arrival time, by default now."""
        return self._translate(lambda: self.listener.push(samples), arrived)

    def finish(self) -> list[Commit]:
        """End the speech; return the rest of the translation."""
        return self._translate(self.listener.finish) + self.stream.finish()

    def close(self) -> None:
        """Free the recogniser."""
        self.listener.close()

    def _translate(self, recognise: Callable[[], Sequence[Word]], arrived: float | None = None) -> list[Commit]:
        clock = self._translator.clock
        started = clock()
        words = recognise()
        recognised = clock()
        self._on_words(words)
        waited = recognised - (started if arrived is None else arrived)
        feed(self.stream, words, self.listener.seconds + waited, recognised)
        commits = self._translator.drain([self.stream])[0]
        self.recognition_seconds += recognised - started
        self.translation_seconds += clock() - recognised
        return commits
