"""Parse the JSON events of speech recognisers, one object per line.

    WhisperLiveKit   {"lines": [{"text", "speaker", ...}], "buffer_transcription": ...}
    Vosk             {"partial": ...}, then {"text": ...}
    Moonshine        {"text", "line_id", "is_complete", "start_time", "duration"}
    sherpa-onnx      {"text", "segment", "is_final"}
    plain            {"text", "final", "segment"?}

Status messages and other events without text are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from simulmt.errors import DataError
from simulmt.runtime.revisions import Hypothesis

SHAPES = "WhisperLiveKit, Vosk, Moonshine, sherpa-onnx or {text, final}"
LONGEST_QUOTE = 80  # characters of an invalid line


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
            raise DataError(f"expected a JSON object of {SHAPES}, got {_quote(line)}")
        for key, read in self._readers().items():
            if key in record:
                try:
                    return read(record)
                except (AttributeError, KeyError, TypeError, ValueError):
                    break
        if "text" not in record and ("type" in record or "status" in record):
            return []
        raise DataError(f"expected an event of {SHAPES}, got {_quote(line)}")

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
    return repr(short if len(short) <= LONGEST_QUOTE else f"{short[:LONGEST_QUOTE]}...")
