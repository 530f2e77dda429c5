"""Translate text, or the events of a speech recogniser, from a pipe as it arrives."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from queue import Empty, Queue
from threading import Thread
from typing import NamedTuple

from simulmt.errors import DataError
from simulmt.runtime.captions import Writer
from simulmt.runtime.revisions import EventReader, Stabiliser, feed
from simulmt.runtime.stream import LINES_PER_BATCH, Commit, Stream, StreamState, Translator

CHUNK = 4096  # bytes per read
UNDECODED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, as `surrogateescape` decodes it
GZIP, XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"  # first bytes of a file
POLL = 0.1  # seconds between checks for time-outs of words that a recogniser may revise
MAX_EVENT_LENGTH = 1 << 20  # characters
AHEAD = 4  # chunks read ahead of translation; the rest stays in the pipe (back-pressure)


class Arrival(NamedTuple):
    """A chunk of text and its arrival time."""

    text: str  # U+FFFD replaces bytes that are not UTF-8
    time: float
    bad_line: int | None = None  # number of the first line of the chunk with such bytes


def arrivals(descriptor: int, clock: Callable[[], float], poll: float | None = None) -> Iterator[list[Arrival]]:
    """Yield the text that has arrived since the previous yield, at the latest after `poll` seconds.

    A thread reads and timestamps the text, also while the caller computes.
    """
    queue: Queue[Arrival | OSError | DataError | None] = Queue(AHEAD)
    Thread(target=_read, args=(descriptor, clock, queue), daemon=True).start()
    while True:
        try:
            waiting = [queue.get(timeout=poll)]
        except Empty:
            yield []
            continue
        waiting += [queue.get() for _ in range(queue.qsize())]
        yield [item for item in waiting if isinstance(item, Arrival)]
        if isinstance(waiting[-1], OSError):
            raise DataError(f"the input cannot be read: {waiting[-1].strerror}")
        if isinstance(waiting[-1], DataError):
            raise waiting[-1]
        if waiting[-1] is None:
            return


def _read(descriptor: int, clock: Callable[[], float], queue: Queue[Arrival | OSError | DataError | None]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    line, is_first = 1, True
    try:
        while True:
            data = os.read(descriptor, CHUNK)
            if is_first:
                _refuse_binary(data)
                is_first = False
            text = decoder.decode(data, final=not data)
            bad = UNDECODED.search(text)
            bad_line = line + text.count("\n", 0, bad.start()) if bad else None
            line += text.count("\n")
            if bad:
                text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            queue.put(Arrival(text, clock(), bad_line))
            if not data:
                break
        queue.put(None)
    except (OSError, DataError) as error:
        queue.put(error)


def _refuse_binary(start: bytes) -> None:
    """Raise DataError if input that starts like this is not plain text."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("UTF-16 text; convert it with `iconv -f UTF-16 -t UTF-8`")
    if start.startswith(GZIP):
        raise DataError("gzip data; decompress it first, such as with `zcat FILE | simulmt translate`")
    if start.startswith(XZ):
        raise DataError("xz data; decompress it first, such as with `xzcat FILE | simulmt translate`")
    if b"\0" in start:
        raise DataError("not a text file: it contains NUL bytes")


class LineTranslator:
    """Translates lines to a writer; lines that arrive together are batched."""

    def __init__(self, translator: Translator, delay: int | None, writer: Writer, beam: int = 1) -> None:
        self._translator = translator
        self._delay = delay
        self._beam = beam
        self._writer = writer
        self._streams = [translator.stream(delay, beam)]  # one per line; the last is for the line being read
        self._is_begun = False  # whether that line has any characters, even whitespace

    def push(self, arrived: Iterable[Arrival]) -> None:
        """Translate chunks of text; lines end with a line feed."""
        for text, time, _ in arrived:
            first, *others = text.split("\n")
            self._accept(first, time)
            for line in others:
                self._end_line(time)
                self._accept(line, time)
        self._advance()

    def finish(self) -> None:
        """Translate the rest at the end of input."""
        if self._is_begun:
            self._end_line(self._translator.clock())
        self._advance()

    def _accept(self, text: str, time: float) -> None:
        self._is_begun |= bool(text)
        self._streams[-1].accept(text, time)

    def _end_line(self, time: float) -> None:
        self._streams[-1].accept_finish(time)
        self._streams.append(self._translator.stream(self._delay, self._beam))
        self._is_begun = False

    def _advance(self) -> None:
        for start in range(0, len(self._streams), LINES_PER_BATCH):
            lines = self._streams[start : start + LINES_PER_BATCH]
            for line, commits in zip(lines, self._translator.drain(lines), strict=True):
                for commit in commits:
                    self._writer.commit(commit)
                if line.state is StreamState.FINISHED:
                    self._writer.end_line()
        del self._streams[:-1]


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
    """Translates the events of a speech recogniser: its words, as they become stable."""

    def __init__(self, translator: Translator, delay: int | None, writer: Writer, beam: int = 1) -> None:
        self._translator = translator
        self._stream = translator.stream(delay, beam)
        self._stabiliser = Stabiliser()
        self._events = EventReader()
        self._lines = SentenceLines(writer)
        self._open = ""  # an incomplete event
        self._number = 0  # of the last event

    def push(self, arrived: Iterable[Arrival]) -> None:
        """Translate new events, one JSON object per line, and words that have timed out."""
        try:
            for text, time, _ in arrived:
                self._read_lines(text, time)
        finally:  # events before one that cannot be read are translated
            now = self._translator.clock()
            feed(self._stream, self._stabiliser.tick(now), now)
            self._lines.write(self._stream, self._translator.drain([self._stream])[0])

    def finish(self) -> None:
        """Translate the rest at the end of input."""
        now = self._translator.clock()
        self._read(self._open, now)
        feed(self._stream, self._stabiliser.flush(now), now)
        self._lines.write(self._stream, self._stream.finish())

    def _read_lines(self, text: str, time: float) -> None:
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            self._read(line, time)
        if len(self._open) > MAX_EVENT_LENGTH:
            number = self._number + 1
            raise DataError(f"line {number}: longer than {MAX_EVENT_LENGTH} characters; expected one event per line")

    def _read(self, line: str, time: float) -> None:
        self._number += 1
        try:
            hypotheses = self._events.read(line)
        except DataError as error:
            raise DataError(f"line {self._number}: {error}") from None
        for hypothesis in hypotheses:
            # Its times are on an unknown clock; without them, lag is measured from the first appearance of a word.
            timeless = replace(hypothesis, start=None, end=None)
            feed(self._stream, self._stabiliser.push(timeless, time), time, time)
