"""Turn revised text, such as the hypotheses of a speech recogniser, into append-only text.

    stabiliser = Stabiliser()
    for hypothesis, now in hypotheses:
        feed(stream, stabiliser.push(hypothesis, now), now)

A word is stable when two consecutive updates agree on it (local agreement), when the recogniser declares it final, or
when it has not changed for a while. The last word of an open segment is held back: it may be incomplete, and its
punctuation is a guess.

Hypotheses also come as JSON events of a recogniser, one object per line, which `EventReader` parses:

    WhisperLiveKit   {"lines": [{"text", "speaker", ...}], "buffer_transcription": ...}
    Vosk             {"partial": ...}, then {"text": ...}
    Moonshine        {"text", "line_id", "is_complete", "start_time", "duration"}
    sherpa-onnx      {"text", "segment", "is_final"}
    plain            {"text", "final", "segment"?}

Status messages and other events without text are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, NamedTuple

from simulmt.config import require
from simulmt.errors import DataError
from simulmt.runtime.stream import Stream
from simulmt.text.words import CLOSING, SENTENCE_ENDS

MARKS = f"{SENTENCE_ENDS},;:，、；："
_ENDS, _MARKS = tuple(SENTENCE_ENDS), tuple(MARKS)
_DOUBLED = re.compile(",{2,}")
_MAX_DROPPED = 2  # stable words that a revised hypothesis may lack; allowing more would repeat words
WINDOW = 48  # stable words that a revised hypothesis is aligned with
_SHAPES = "WhisperLiveKit, Vosk, Moonshine, sherpa-onnx or {text, final}"
MAX_QUOTE_LENGTH = 80  # characters of an invalid line


@dataclass(frozen=True)
class Hypothesis:
    """The text of a segment as recognised so far, always from its beginning."""

    text: str
    is_final: bool = False
    segment: int | str = 0  # a new value starts a new segment
    stable: int = 0  # number of leading words declared final
    start: float | None = None  # of the audio, on the clock of `Stabiliser.push`
    end: float | None = None


class Word(NamedTuple):
    """A stable word; an empty one only ends the sentence."""

    text: str
    spoken: float  # when it ended in the audio, or if unknown, when it first appeared
    ends_sentence: bool = False


class Stabiliser:
    """Returns every word of revised text once, when it is stable; `now` is in seconds on any monotonic clock."""

    def __init__(self, timeout: float = 2.5, pause: float = 2.0) -> None:
        require(timeout > 0, f"timeout must be above 0, got {timeout}")
        require(pause > 0, f"pause must be above 0, got {pause}")
        self._timeout = timeout  # seconds without a change until open words are stable
        self._pause = pause  # seconds without an open segment until the sentence ends
        self._segment: int | str | None = None
        self._stable_keys: list[str] = []  # keys of the stable words of the segment
        self._open: list[Word] = []  # its other words, as in the latest hypothesis
        self._changed = 0.0  # when they last changed
        self._is_punctuated = False  # whether the recogniser writes punctuation
        self._in_sentence = False

    @property
    def tentative(self) -> str:
        """Words that may still be revised."""
        return " ".join(word.text for word in self._open)

    def push(self, hypothesis: Hypothesis, now: float) -> list[Word]:
        """Add a hypothesis; return the words that are now stable."""
        stable = self._end_segment(now) if self._segment not in (None, hypothesis.segment) else []
        self._segment = hypothesis.segment
        words = _words(hypothesis.text)
        done = _count_stable(self._stable_keys, [_key(word) for word in words])
        before = self._open
        agreed = _agreement(before, words[done:])
        self._open = _timed(words, done, hypothesis, before[:agreed], now)
        if len(self._open) != len(before) or agreed < len(before):
            self._changed = now
        if hypothesis.is_final:
            return stable + self._end_segment(now, hypothesis.text)
        declared = max(0, hypothesis.stable - len(self._stable_keys))
        agreed = max(0, min(agreed, len(self._open) - 1))
        return stable + self._stabilise(declared, verbatim=True) + self._stabilise(agreed - declared, before[declared:])

    def tick(self, now: float) -> list[Word]:
        """Return words that have timed out, or the end of the sentence after a pause; call regularly."""
        if self._open and now - self._changed >= self._timeout:
            stable = self._stabilise(len(self._open))
            self._changed = now
            return stable
        if self._segment is None and self._in_sentence and now - self._changed >= self._pause:
            self._in_sentence = False
            return [Word("", now, ends_sentence=True)]
        return []

    def flush(self, now: float) -> list[Word]:
        """End the text; return the remaining words."""
        stable = self._end_segment(now)
        if self._in_sentence:
            stable.append(Word("", now, ends_sentence=True))
        self._in_sentence = False
        return stable

    def _stabilise(self, count: int, before: Sequence[Word] = (), verbatim: bool = False) -> list[Word]:
        """Make open words stable; unless `verbatim`, drop punctuation on which the last two updates disagree."""
        words = []
        for index, word in enumerate(self._open[: max(0, count)]):
            following = self._open[index + 1].text if index + 1 < len(self._open) else ""
            is_agreed = index < len(before) and before[index].text == word.text
            keeps_mark = is_agreed and not (word.text.endswith(_ENDS) and following[:1].islower())
            words.append(word if verbatim or keeps_mark else word._replace(text=word.text.rstrip(MARKS)))
        self._mark_stable(len(words))
        return words

    def _end_segment(self, now: float, text: str | None = None) -> list[Word]:
        """Make all open words stable; `text` is the final text of the segment, or None if it was abandoned."""
        words = list(self._open)
        self._mark_stable(len(words))
        self._stable_keys, self._segment = [], None
        self._changed = now
        if not self._in_sentence:
            return words
        self._is_punctuated |= text is not None and any(word.endswith(_MARKS) for word in text.split())
        if (text or "").rstrip(CLOSING).endswith(_ENDS) or (text is not None and not self._is_punctuated):
            self._in_sentence = False
            words.append(Word("", words[-1].spoken if words else now, ends_sentence=True))
        return words

    def _mark_stable(self, count: int) -> None:
        self._stable_keys += [_key(word.text) for word in self._open[:count]]
        self._in_sentence |= count > 0
        del self._open[:count]


def feed(stream: Stream, words: Sequence[Word], now: float, arrived: float | None = None) -> None:
    """Push stable words into a stream; `now` is on the clock of their times, `arrived` on that of the translator."""
    for word in words:
        if word.text:
            stream.accept(f"{word.text} ", arrived, recognition=max(0.0, now - word.spoken))
        if word.ends_sentence:
            stream.accept_end(arrived)


def _words(text: str) -> list[str]:
    """Split a hypothesis into words; drop stray punctuation and doubled commas."""
    return [_DOUBLED.sub(",", word) for word in text.split() if word.strip(MARKS)]


def _key(word: str) -> str:
    """Normalise a word for comparison."""
    return word.rstrip(MARKS).casefold()


def _agreement(before: Sequence[Word], words: Sequence[str]) -> int:
    """Count the leading words that agree."""
    same = (_key(old.text) == _key(new) for old, new in zip(before, words, strict=False))
    return sum(takewhile(bool, same))


def _timed(words: Sequence[str], done: int, hypothesis: Hypothesis, before: Sequence[Word], now: float) -> list[Word]:
    """Estimate when each word from `done` on was spoken, by its position in the audio of the segment."""
    if hypothesis.start is None or hypothesis.end is None:
        times = (word.spoken for word in before)
        return [Word(word, next(times, now)) for word in words[done:]]
    characters = sum(len(word) + 1 for word in words)
    pace = (hypothesis.end - hypothesis.start) / max(1, characters)
    position = sum(len(word) + 1 for word in words[:done])
    timed = []
    for word in words[done:]:
        position += len(word) + 1
        timed.append(Word(word, hypothesis.start + pace * position))
    return timed


def _count_stable(stable: Sequence[str], keys: Sequence[str]) -> int:
    """Count the words of a hypothesis that correspond to the stable ones, which it may have revised."""
    count = len(stable)
    if list(keys[:count]) == list(stable):
        return count
    anchor = max(0, count - WINDOW)
    tail, rest = stable[anchor:], keys[anchor : count + WINDOW]
    costs = [float(n) for n in range(len(rest) + 1)]  # edit distance of the tail so far to the first n keys
    for key in tail:
        diagonal, costs[0] = costs[0], costs[0] + 1
        for n, other in enumerate(rest, start=1):
            cost = min(diagonal + _difference(key, other), costs[n] + 1, costs[n - 1] + 1)
            diagonal, costs[n] = costs[n], cost
    fewest = min(max(0, len(tail) - _MAX_DROPPED), len(rest))
    candidates = range(fewest, len(costs))
    return anchor + min(candidates, key=lambda n: (costs[n], rest[n - 1 : n] != tail[-1:], abs(n - len(tail))))


def _difference(one: str, other: str) -> float:
    """Return the substitution cost: less than a deletion for similar words, more for others."""
    return 0.0 if one == other else 1.5 - SequenceMatcher(None, one, other).ratio()


class EventReader:
    """Converts events to hypotheses; numbers the segments of recognisers that do not."""

    def __init__(self) -> None:
        self._segment = 0
        self._complete: int | str | None = None  # the line that was completed last
        self._words = 0  # of WhisperLiveKit, in finished segments

    def read(self, line: str) -> list[Hypothesis]:
        """Parse one event; raise DataError if its format is unknown."""
        if not line.strip():
            return []
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise DataError(f"expected a JSON object of {_SHAPES}, got {_quote(line)}")
        for key, read in self._readers().items():
            if key in record:
                try:
                    return read(record)
                except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                    break
        if "text" not in record and ("type" in record or "status" in record):
            return []
        raise DataError(f"expected an event of {_SHAPES}, got {_quote(line)}")

    def _readers(self) -> Mapping[str, Callable[[dict[str, Any]], list[Hypothesis]]]:
        """Return the parsers by a key that identifies the recogniser; the first match counts."""
        return {
            "line_id": self._read_moonshine,
            "lines": self._read_whisper,
            "partial": self.read_vosk,
            "is_final": self._read_sherpa,
            "final": self._read_plain,
            "text": self.read_vosk,
        }

    def _read_moonshine(self, record: Mapping[str, Any]) -> list[Hypothesis]:
        """Parse a transcript line; lines that were already completed are ignored."""
        line, is_final = record["line_id"], bool(record["is_complete"])
        if line == self._complete:
            return []
        if is_final:
            self._complete = line
        start = float(record["start_time"])
        end = start + float(record["duration"])
        return [Hypothesis(_text(record["text"]), is_final, line, start=start, end=end)]

    def read_vosk(self, record: Mapping[str, Any]) -> list[Hypothesis]:
        """Parse a partial or final result; either may be empty."""
        if "partial" in record:
            text = _text(record["partial"])
            return [Hypothesis(text, segment=self._segment)] if text else []
        text = _text(record["text"])
        words = record.get("result") or []
        start, end = (float(words[0]["start"]), float(words[-1]["end"])) if words else (None, None)
        self._segment += 1
        return [Hypothesis(text, True, self._segment - 1, start=start, end=end)] if text else []

    def _read_whisper(self, record: Mapping[str, Any]) -> list[Hypothesis]:
        """Parse a full update: all confirmed lines so far, and the unconfirmed buffer.

        Lines are joined, since diarization may split them differently later; a line without text is a silence, which
        ends the segment.
        """
        lines = [_text(line.get("text")) for line in record["lines"]]
        confirmed = " ".join(lines).split()[self._words :]
        buffer = _text(record.get("buffer_transcription")).split()
        is_final = bool(lines) and not lines[-1] and not buffer
        segment = self._segment
        if is_final:
            self._words += len(confirmed)
            self._segment += bool(confirmed)
        text = " ".join(confirmed + buffer)
        return [Hypothesis(text, is_final, segment, stable=len(confirmed))] if text else []

    def _read_sherpa(self, record: Mapping[str, Any]) -> list[Hypothesis]:
        text = _text(record["text"])
        return [Hypothesis(text, bool(record["is_final"]), int(record.get("segment", 0)))] if text else []

    def _read_plain(self, record: Mapping[str, Any]) -> list[Hypothesis]:
        is_final = bool(record["final"])
        segment = record.get("segment", self._segment)
        if not isinstance(segment, int | str):
            raise TypeError(segment)
        self._segment += is_final
        return [Hypothesis(_text(record["text"]), is_final, segment)]


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise TypeError(value)
    return " ".join((value or "").split())


def _quote(line: str) -> str:
    short = line.strip()
    return repr(short if len(short) <= MAX_QUOTE_LENGTH else f"{short[:MAX_QUOTE_LENGTH]}...")
