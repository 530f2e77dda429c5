"""Translate the events of a speech recogniser, one line per sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simulmt.cli.pipe import Arrival
from simulmt.errors import DataError
from simulmt.runtime.captions import Writer
from simulmt.runtime.revisions import Hypothesis, Stabiliser, feed
from simulmt.runtime.stream import Commit, Stream, Translator
from simulmt.speech.events import EventReader

POLL = 0.1  # seconds between checks for time-outs
LONGEST_EVENT = 1 << 20  # characters


class SentenceLines:
    """Writes the commits of one long stream, one line per sentence."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._sentence = 0
        self._has_text = False

    def write(self, stream: Stream, commits: Iterable[Commit]) -> None:
        """Write commits, and end the lines of finished sentences."""
        for commit in commits:
            self._end_lines(commit.sentence)
            text = commit.text if self._has_text else commit.text.lstrip()
            self._writer.commit(replace(commit, text=text))
            self._has_text = True
        self._end_lines(stream.sentences_finished)

    def _end_lines(self, sentence: int) -> None:
        while self._sentence < sentence:
            self._writer.end_line()
            self._sentence += 1
            self._has_text = False


class RevisionTranslator:
    """Translates words of revised text as they become stable."""

    def __init__(self, translator: Translator, delay: int | None, writer: Writer) -> None:
        self._translator = translator
        self._stream = translator.stream(delay)
        self._stabiliser = Stabiliser()
        self._events = EventReader()
        self._lines = SentenceLines(writer)
        self._open = ""  # an incomplete event
        self._number = 0  # of the last event

    def push(self, arrived: Iterable[Arrival]) -> None:
        """Translate new events, one JSON object per line, and words that have timed out."""
        for text, time in arrived:
            *lines, self._open = (self._open + text).split("\n")
            if len(self._open) > LONGEST_EVENT:
                raise DataError(f"line {self._number + len(lines) + 1}: longer than {LONGEST_EVENT} characters")
            for line in lines:
                self._read(line, time)
        now = self._translator.clock()
        feed(self._stream, self._stabiliser.tick(now), now)
        self._lines.write(self._stream, self._translator.drain([self._stream])[0])

    def finish(self) -> None:
        """Translate the rest."""
        now = self._translator.clock()
        self._read(self._open, now)
        feed(self._stream, self._stabiliser.flush(now), now)
        self._lines.write(self._stream, self._stream.finish())

    def _read(self, line: str, time: float) -> None:
        self._number += 1
        try:
            hypotheses = self._events.read(line)
        except DataError as error:
            raise DataError(f"line {self._number}: {error}") from None
        for hypothesis in hypotheses:
            feed(self._stream, self._stabiliser.push(_without_times(hypothesis), time), time, time)


def _without_times(hypothesis: Hypothesis) -> Hypothesis:
    """Drop times on an unknown clock: the lag of a word is then measured from its first appearance."""
    return replace(hypothesis, start=None, end=None)
