"""Write a live translation as text, JSON lines, SRT or WebVTT.

Commits are written and flushed at once. Only subtitles are buffered until they are full or their line has ended, since
a cue's end time is written before its text.
"""

from __future__ import annotations

import json
import math
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TextIO

from simulmt.text.words import CLOSING, HAN, SENTENCE_ENDS

if TYPE_CHECKING:
    from simulmt.runtime.stream import Commit

COLUMNS = 42  # per subtitle line; an ideograph takes two
LINES = 2
READING_SPEED = 20.0  # columns per second
MIN_DURATION = 0.8  # of a subtitle, in seconds
LINGER = 1.0  # seconds that a subtitle stays after its last word
MAX_DURATION = 6.0  # seconds after which no more words are added to a subtitle
NEVER_FIRST = frozenset(f"{CLOSING}{SENTENCE_ENDS},;:、，；：")  # never starts a line
NEVER_LAST = frozenset("“‘„«‹([{「『（【《〈")  # never ends a line
PARTICLES = frozenset("的了着过")  # end a Chinese word ...
NOT_PARTICLES = frozenset(  # ... except here
    ("的确", "的话", "的地", "了解", "着急", "着手", "着重", "着陆", "过程", "过去", "过来", "过度")
)
UNIT_LENGTH = 4  # characters of a word that may be the unit of a number
_NUMBER = re.compile(rf"\d[{HAN}]?\Z")  # a number, perhaps with the first ideograph of its unit


class Format(StrEnum):
    TEXT = "text"
    JSONL = "jsonl"
    SRT = "srt"
    VTT = "vtt"


class Writer(Protocol):
    """Receives every commit and the end of every line; `close` is always called last, even after an error."""

    def commit(self, commit: Commit) -> None: ...

    def end_line(self) -> None: ...

    def close(self) -> None: ...


def open_writer(style: Format, output: TextIO, clock: Callable[[], float] = time.monotonic) -> Writer:
    """Return a writer of the given format; subtitles are timed by `clock`, in seconds."""
    if style is Format.TEXT:
        return TextWriter(output)
    if style is Format.JSONL:
        return JSONWriter(output)
    return CaptionWriter(output, style, clock)


class TextWriter:
    """Writes a line for each source line, growing as it is translated."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def commit(self, commit: Commit) -> None:
        print(commit.text, end="", file=self._output, flush=True)

    def end_line(self) -> None:
        print(file=self._output, flush=True)

    def close(self) -> None:
        """Do nothing: output is not buffered."""


class JSONWriter:
    """Writes one JSON object per commit; `sentence` counts lines from 0, `seq` counts all commits from 1."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._sentence = 0
        self._seq = 0

    def commit(self, commit: Commit) -> None:
        self._seq += 1
        parts = ("recognition", "policy", "queue", "compute")
        record = {
            "sentence": self._sentence,
            "seq": self._seq,
            "text": commit.text,
            "source_words": commit.source_words,
            "lag_ms": {part: round(getattr(commit.lag, part), 3) for part in parts},
        }
        print(json.dumps(record, ensure_ascii=False), file=self._output, flush=True)

    def end_line(self) -> None:
        self._sentence += 1

    def close(self) -> None:
        """Do nothing: output is not buffered."""


class CaptionWriter:
    """Writes subtitles, timed by the commits of their text, relative to the creation of the writer.

    A subtitle starts with its first word, or when the previous one ends, and is shown long enough to be read. So
    subtitles never overlap, and text that arrives all at once is paced at reading speed.
    """

    def __init__(self, output: TextIO, style: Format, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._style = style
        self._clock = clock
        self._origin = clock()
        self._text = ""  # of the current subtitle
        self._begun = self._added = 0.0  # times of its first and last commit
        self._shown_until = 0.0
        self._count = 0
        if style is Format.VTT:
            print("WEBVTT\n", file=output, flush=True)

    def commit(self, commit: Commit) -> None:
        now = self._clock() - self._origin
        if self._text and now - self._begun > MAX_DURATION and _can_break_before(commit.text, self._text):
            self._show(wrap(self._text), now)
            self._text = ""
        if not self._text:
            self._begun = self._added = now
        lines = wrap(self._text + commit.text)
        while len(lines) > LINES:
            self._show(lines[:LINES], now)
            lines = lines[LINES:]
            self._begun = self._added = now
        self._text = "".join(lines)
        self._added = now

    def end_line(self) -> None:
        if self._text:
            self._show(wrap(self._text))
        self._text = ""

    def close(self) -> None:
        self.end_line()

    def _show(self, lines: list[str], next_begins: float = math.inf) -> None:
        start = max(self._begun, self._shown_until)
        reading_time = max(MIN_DURATION, sum(map(width, lines)) / READING_SPEED)
        end = max(min(self._added + LINGER, next_begins), start + reading_time)
        self._count += 1
        self._shown_until = end
        text = "\n".join(line.strip() for line in lines)
        if self._style is Format.VTT:
            text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            head = f"{_timestamp(start, '.')} --> {_timestamp(end, '.')}"
        else:
            head = f"{self._count}\n{_timestamp(start, ',')} --> {_timestamp(end, ',')}"
        print(f"{head}\n{text}\n", file=self._output, flush=True)


def wrap(text: str) -> list[str]:
    """Wrap text into subtitle lines, which join to the same text; only a long word may exceed the width.

    Lines are filled, and broken after punctuation or else between words, where that leaves them half full. Two lines
    are balanced.
    """
    units = _units(text)
    ends = [0]
    while ends[-1] < len(units):
        ends.append(ends[-1] + _fill(units[ends[-1] :]))
    if len(ends) == 3:
        ends[1] = _balance(units) or ends[1]
    return ["".join(units[start:end]) for start, end in pairwise(ends)]


def _fill(units: Sequence[str]) -> int:
    """Return how many units to put on a line."""
    most = 1
    while most < len(units) and width("".join(units[: most + 1])) <= COLUMNS:
        most += 1
    if most == len(units):
        return most
    counts = [count for count in range(1, most) if width("".join(units[:count])) >= COLUMNS / 2]
    return min([*counts, most], key=lambda count: (_break_penalty(*units[count - 1 : count + 1]), -count))


def _balance(units: Sequence[str]) -> int | None:
    """Return how many units to put on the first of two lines, or None if they do not fit on two."""
    costs = {}
    for count in range(1, len(units)):
        first, second = width("".join(units[:count])), width("".join(units[count:]))
        if max(first, second) <= COLUMNS:
            costs[count] = abs(first - second) + _break_penalty(*units[count - 1 : count + 1]) * COLUMNS / 2
    return min(costs, key=costs.__getitem__, default=None)


def _break_penalty(before: str, after: str) -> int:
    """Return the penalty of a break between units: 0 after punctuation, 1 between words, 2 perhaps inside a word."""
    last, first = before[-1], after[0]
    if last in NEVER_FIRST:
        return 0
    if not (_is_wide(last) and _is_wide(first)):
        return 1
    return 1 if last in PARTICLES and last + first not in NOT_PARTICLES else 2


def width(text: str) -> int:
    """Return the display width of a text without surrounding spaces."""
    return sum(2 if _is_wide(character) else 1 for character in text.strip())


def _units(text: str) -> list[str]:
    """Split text into unbreakable units: words with the preceding space, ideographs, numbers with their unit.

    Closing punctuation belongs to the unit before it, opening punctuation to the unit after it.
    """
    units: list[str] = []
    for part in _parts(text):
        if units and _is_inseparable(units[-1], part):
            units[-1] += part
        else:
            units.append(part)
    return units


def _parts(text: str) -> list[str]:
    """Split text into words with the preceding space, and ideographs."""
    parts: list[str] = []
    previous = " "
    for character in text:
        is_apart = (_is_wide(character) or _is_wide(previous)) and character not in NEVER_FIRST
        is_word_start = character == " " or is_apart
        if not parts or (is_word_start and previous != " "):
            parts.append("")
        parts[-1] += character
        previous = character
    return parts


def _is_inseparable(before: str, part: str) -> bool:
    """Return whether no line may be broken between two parts."""
    if NEVER_FIRST.issuperset(part.strip()) or before[-1] in NEVER_LAST:
        return True
    if _is_wide(part[0]):
        return _NUMBER.search(before) is not None
    return before[-1].isdecimal() and len(part.strip()) <= UNIT_LENGTH


def _can_break_before(text: str, before: str) -> bool:
    """Return whether a line may be broken between `before` and `text`."""
    last = len(_units(before)) - 1
    return _units(before + text)[last] == _units(before)[last]


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def _timestamp(seconds: float, decimal_mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{decimal_mark}{milliseconds % 1000:03}"
