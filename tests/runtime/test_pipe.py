"""Translation of text and of recogniser events from a pipe."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import time
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import DataError
from simulmt.runtime import pipe
from simulmt.runtime.captions import Format, open_writer
from simulmt.runtime.pipe import Arrival, LineTranslator, RevisionTranslator, arrivals
from simulmt.runtime.stream import Commit, Translator


def translation(model: Translator, text: str, delay: int | None = None) -> str:
    """Return the expected output: one line per input line, each ending with a line feed."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return "".join(f"{model.translate(line, delay or model.config.default_delay)}\n" for line in lines)


class Collector:
    """A writer that records commits and line ends."""

    def __init__(self) -> None:
        self.lines: list[list[Commit]] = [[]]
        self.is_closed = False

    def commit(self, commit: Commit) -> None:
        self.lines[-1].append(commit)

    def end_line(self) -> None:
        self.lines.append([])

    def close(self) -> None:
        self.is_closed = True

    @property
    def text(self) -> str:
        return "\n".join("".join(commit.text for commit in line) for line in self.lines)


@given(
    text=st.lists(st.sampled_from(["the ", "old", " river.", "河", "é", "\n", "\r\n", "🙂", " "])).map("".join),
    chunk=st.integers(1, 7),
)
@settings(max_examples=25, deadline=None)
def test_chunks_may_split_characters(
    model: Translator, tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int
) -> None:
    file, collected = tmp_path_factory.getbasetemp() / "cut.txt", Collector()
    file.write_bytes(text.encode())
    lines = LineTranslator(model, None, collected)
    with patch.object(pipe, "CHUNK", chunk), file.open("rb") as opened:
        for arrived in arrivals(opened.fileno(), model.clock):
            lines.push(arrived)
    lines.finish()
    assert collected.text == translation(model, text)


def test_many_lines_at_once(model: Translator) -> None:
    text, collected = "".join(f"river {number}\n" for number in range(100)), Collector()
    lines = LineTranslator(model, None, collected)
    lines.push([Arrival(text[:300], 0.0), Arrival(text[300:], 0.0)])
    assert collected.text == translation(model, text)


def test_waiting_counts_as_queue_time(model: Translator) -> None:
    """Words arrive at seconds 10 and 12 and are computed from second 25 to 26."""
    ticks = iter([25.0, 26.0])
    slow = Translator(model.bundle, threads=1, clock=lambda: next(ticks))
    collected = Collector()
    LineTranslator(slow, 2, collected).push([Arrival("the ", 10.0), Arrival("river ", 12.0)])
    lags = [commit.lag for commit in collected.lines[0]]
    assert lags
    assert {(lag.policy, lag.queue, lag.compute) for lag in lags} == {(2000, 13000, 1000)}


def test_waiting_text_is_yielded_together(tmp_path: Path) -> None:
    class EagerThread(Thread):
        """A reader thread that has read everything before the first yield."""

        def start(self) -> None:
            self.run()

    file = tmp_path / "text"
    file.write_bytes(b"abc")
    with patch.object(pipe, "CHUNK", 2), patch.object(pipe, "Thread", EagerThread), file.open("rb") as opened:
        turns = list(arrivals(opened.fileno(), iter([10.0, 11.0, 12.0]).__next__))
    assert turns == [[Arrival("ab", 10.0), Arrival("c", 11.0), Arrival("", 12.0)]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4096])
def test_bytes_become_text(tmp_path: Path, chunk: int) -> None:
    """A byte order mark is dropped, and invalid UTF-8 becomes a replacement character."""
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 \xff\xe6\xb2 \xe6\xb2\xb3\n\xe6")
    with patch.object(pipe, "CHUNK", chunk), file.open("rb") as opened:
        found = [arrival for turn in arrivals(opened.fileno(), time.monotonic) for arrival in turn]
    assert "".join(arrival.text for arrival in found) == "café \ufffd\ufffd 河\n\ufffd"
    assert {arrival.bad_line for arrival in found} - {None} == {1, 2}


def test_a_replacement_character_in_valid_text_is_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a \ufffd b", encoding="utf-8")
    with file.open("rb") as opened:
        found = [arrival for turn in arrivals(opened.fileno(), time.monotonic) for arrival in turn]
    assert "".join(arrival.text for arrival in found) == "a \ufffd b"
    assert not any(arrival.bad_line for arrival in found)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("Hallo".encode("utf-16"), "^UTF-16 text; convert it"),
        (gzip.compress(b"hello", mtime=0), "^gzip data; decompress it first"),
        (lzma.compress(b"hello"), "^xz data; decompress it first"),
        (b"\x7fELF\x02\x01\x01\0\0", "^not a text file: it contains NUL bytes"),
    ],
)
def test_input_that_is_not_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "data"
    file.write_bytes(data)
    with file.open("rb") as opened, pytest.raises(DataError, match=message):
        list(arrivals(opened.fileno(), time.monotonic))


def test_input_that_cannot_be_read(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        list(arrivals(directory, time.monotonic))
    os.close(directory)


def test_the_lag_of_recognition_counts_from_the_first_appearance(model: Translator) -> None:
    output = io.StringIO()
    lines, now = RevisionTranslator(model, 1, open_writer(Format.JSONL, output)), model.clock()
    lines.push([Arrival('{"partial": "the old"}\n{"par', now - 0.5)])
    lines.push([Arrival('tial": "the old bridge"}\n', now - 0.3), Arrival('{"text": "the old bridge"}\n', now)])
    lines.finish()
    records = [json.loads(line) for line in output.getvalue().splitlines()]
    assert {record["lag_ms"]["recognition"] for record in records} <= {0, 200, 500, 300}
    assert "".join(record["text"] for record in records) == model.translate("the old bridge", 1)
    assert any(record["lag_ms"]["recognition"] for record in records)
