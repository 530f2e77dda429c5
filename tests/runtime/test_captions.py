from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.captions import (
    COLUMNS,
    LINES,
    NEVER_FIRST,
    NEVER_LAST,
    CaptionWriter,
    Format,
    JSONWriter,
    TextWriter,
    Writer,
    open_writer,
    width,
    wrap,
)
from simulmt.runtime.stream import Commit, Lag

MILLISECONDS = {"recognition": 0.0, "policy": 800.0, "queue": 0.25, "compute": 2.0004}
LATIN = ["the", " old", " bridge", "s", ",", " (", " Boston", "é", ".", " <&>", "12", " 3", " km"]
words = st.sampled_from([*LATIN, "河", "上", "。", "」", "桥", "的", "了解", "，", "《", "公里"])


def commit(text: str, seq: int = 1, source_words: int = 1) -> Commit:
    return Commit(seq, text, source_words, Lag(**MILLISECONDS), sentence=0)


@dataclass(frozen=True)
class Cue:
    start: float
    end: float
    lines: list[str]


def parse_srt(text: str) -> list[Cue]:
    """Parse SRT strictly."""
    cues = []
    for number, block in enumerate(text.split("\n\n")[:-1], start=1):
        index, times, *lines = block.split("\n")
        assert index == str(number)
        cues.append(Cue(*_times(times, ","), lines))
    assert text == "" or text.endswith("\n\n")
    return cues


def parse_vtt(text: str) -> list[Cue]:
    header, *blocks = text.split("\n\n")
    assert header == "WEBVTT"
    assert blocks.pop() == ""
    cues = []
    for block in blocks:
        times, *lines = block.split("\n")
        assert not any(re.search(r"[<>]|&(?!amp;|lt;|gt;)", line) for line in lines)
        plain = [line.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for line in lines]
        cues.append(Cue(*_times(times, "."), plain))
    return cues


def _times(line: str, mark: str) -> tuple[float, float]:
    found = re.fullmatch(
        rf"(\d\d+):([0-5]\d):([0-5]\d)\{mark}(\d{{3}}) --> (\d\d+):([0-5]\d):([0-5]\d)\{mark}(\d{{3}})", line
    )
    assert found, line
    numbers = [int(group) for group in found.groups()]
    start, end = (3600 * h + 60 * m + s + ms / 1000 for h, m, s, ms in (numbers[:4], numbers[4:]))
    return start, end


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def written(events: list[tuple[float, str]], style: Format = Format.SRT) -> str:
    """Return the subtitles of pieces committed at these seconds; a line feed ends a line."""
    clock, output = Clock(), io.StringIO()
    writer = CaptionWriter(output, style, clock)
    for seconds, text in events:
        clock.now = 100 + seconds
        if text == "\n":
            writer.end_line()
        else:
            writer.commit(commit(text))
    writer.close()
    return output.getvalue()


class TestText:
    def test_each_line_is_flushed_at_once(self) -> None:
        class Output(io.StringIO):
            flushed = ""

            def flush(self) -> None:
                self.flushed = self.getvalue()

        output = Output()
        writer = TextWriter(output)
        for text, expected in (("Die", "Die"), (" alte", "Die alte")):
            writer.commit(commit(text))
            assert output.flushed == expected
        writer.end_line()
        writer.end_line()
        assert output.flushed == "Die alte\n\n"


class TestJSON:
    def test_one_object_per_commit(self) -> None:
        output = io.StringIO()
        writer = JSONWriter(output)
        writer.commit(commit("河", 1, 2))
        writer.end_line()
        writer.end_line()
        writer.commit(commit("Die", 1, 3))
        lag = '"lag_ms": {"recognition": 0.0, "policy": 800.0, "queue": 0.25, "compute": 2.0}'
        assert output.getvalue().splitlines() == [
            '{"sentence": 0, "seq": 1, "text": "河", "source_words": 2, ' + lag + "}",
            '{"sentence": 2, "seq": 2, "text": "Die", "source_words": 3, ' + lag + "}",
        ]

    def test_a_line_break_inside_a_text_stays_inside(self) -> None:
        output = io.StringIO()
        JSONWriter(output).commit(commit("a\u2028\n\x85b"))
        (line,) = output.getvalue().split("\n")[:-1]
        assert json.loads(line)["text"] == "a\u2028\n\x85b"


class TestSubtitles:
    def test_a_line_is_a_cue_that_lingers_for_a_second(self) -> None:
        assert written([(1.5, "Die"), (2, " alte"), (2.25, " Brücke."), (2.25, "\n")]) == (
            "1\n00:00:01,500 --> 00:00:03,250\nDie alte Brücke.\n\n"
        )

    def test_vtt_has_a_header_and_escapes(self) -> None:
        assert written([(3661.001, "a < b & c --> d"), (3661.001, "\n")], Format.VTT) == (
            "WEBVTT\n\n01:01:01.001 --> 01:01:02.001\na &lt; b &amp; c --&gt; d\n\n"
        )
        assert written([], Format.VTT) == "WEBVTT\n\n"

    def test_text_at_once_is_laid_out_at_reading_speed(self) -> None:
        """Each line takes 40 columns, two seconds to read."""
        line = "ab cd fg hi " * 3 + "klmn"
        assert len(line) == 40
        assert parse_srt(written([(0, f"{line} {line} {line}"), (0, "\n"), (0, line), (0, "\n")])) == [
            Cue(0, 4, [line, line]),
            Cue(4, 6, [line]),
            Cue(6, 8, [line]),
        ]

    def test_short_texts_that_come_at_once_can_be_seen(self) -> None:
        events = [(0.0, "好。"), (0.0, "\n"), (0.0, "再见！"), (0.0, "\n"), (0.0, "Ja."), (0.0, "\n")]
        assert parse_srt(written(events)) == [Cue(0, 1, ["好。"]), Cue(1, 1.8, ["再见！"]), Cue(1.8, 2.6, ["Ja."])]

    def test_a_full_cue_gives_way_to_the_next_at_once(self) -> None:
        line = "ab cd fg hi " * 3 + "klmn"
        events = [(0.0, line), (3.0, f" {line}"), (5.0, " opq"), (5.1, "r"), (5.1, "\n")]
        assert parse_srt(written(events)) == [Cue(0, 4, [line, line]), Cue(5, 6.1, ["opqr"])]

    def test_a_cue_is_not_kept_open_for_long_nor_ended_within_a_word(self) -> None:
        events = [(0.0, "Die"), (7.0, "s"), (7.5, " ist"), (8.0, "\n")]
        assert parse_srt(written(events)) == [Cue(0, 7.5, ["Dies"]), Cue(7.5, 8.5, ["ist"])]

    def test_a_pause_does_not_keep_a_cue_on_the_screen(self) -> None:
        assert parse_srt(written([(0.0, "Die"), (60.0, " Tür"), (60.0, "\n")])) == [
            Cue(0, 1, ["Die"]),
            Cue(60, 61, ["Tür"]),
        ]

    def test_commits_are_written_even_if_their_line_never_ends(self) -> None:
        assert parse_srt(written([(2.0, "Die")])) == [Cue(2, 3, ["Die"])]

    @pytest.mark.parametrize("style", [Format.SRT, Format.VTT])
    @given(events=st.lists(st.tuples(st.floats(0, 4), words | st.just("\n")), max_size=80))
    @settings(max_examples=50, deadline=None)
    def test_files_are_valid_and_complete(self, style: Format, events: list[tuple[float, str]]) -> None:
        seconds, timed = 0.0, []
        for pause, text in events:
            seconds += pause
            timed.append((seconds, text))
        cues = (parse_srt if style is Format.SRT else parse_vtt)(written(timed, style))
        shown = 0.0
        for cue in cues:
            assert shown <= cue.start < cue.end
            assert 1 <= len(cue.lines) <= LINES
            assert all(line.strip() == line != "" for line in cue.lines)
            shown = cue.end
        squeezed = "".join("".join(cue.lines) for cue in cues).replace(" ", "")
        assert squeezed == "".join(text for _, text in events).replace(" ", "").replace("\n", "")
        first = [seconds for seconds, text in timed if text != "\n"][:1]
        assert [cue.start for cue in cues[:1]] == pytest.approx(first, abs=6e-4)


class TestWrap:
    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("Die alte Brücke", ["Die alte Brücke"]),
            ("x" * 40 + " yy", ["x" * 40, " yy"]),
            ("x" * 39 + " yy", ["x" * 39 + " yy"]),
            ("x" * 50 + " y", ["x" * 50, " y"]),
            ("x" * 38 + " yyy .", ["x" * 38, " yyy ."]),
            ("x" * 38 + " yyy .” z", ["x" * 38, " yyy .” z"]),
            ("河" * 21, ["河" * 21]),
            ("河" * 22, ["河" * 11, "河" * 11]),
            ("河" * 21 + "。", ["河" * 11, "河" * 10 + "。"]),
            ("河" * 43, ["河" * 21, "河" * 21, "河"]),
            ("河" * 18 + "Boston", ["河" * 18 + "Boston"]),
            ("河" * 17 + "San Francisco", ["河" * 17, "San Francisco"]),
            # after punctuation, even if the lines differ in length
            ("河" * 14 + "，" + "河" * 10, ["河" * 14 + "，", "河" * 10]),
            # not if a line were nearly empty and there is a particle in the middle
            ("河，" + "河" * 10 + "的" + "河" * 9, ["河，" + "河" * 10 + "的", "河" * 9]),
            ("河" * 12 + "的" + "河" * 12, ["河" * 12 + "的", "河" * 12]),
            ("河" * 10 + "了解" + "河" * 10, ["河" * 10 + "了", "解" + "河" * 10]),  # the least bad
            ("河" * 9 + "了解的" + "河" * 10, ["河" * 9 + "了解的", "河" * 10]),
            # more than two lines: each is filled up to its last punctuation mark
            ("河" * 14 + "，" + "河" * 30, ["河" * 14 + "，", "河" * 21, "河" * 9]),
            # never between a number and its unit
            ("河" * 10 + "3500公里" + "河" * 8, ["河" * 10, "3500公里" + "河" * 8]),
            ("河" * 11 + "3500年" + "河" * 9, ["河" * 11, "3500年" + "河" * 9]),
            ("x" * 36 + " 12 km" + " y" * 4, ["x" * 36, " 12 km" + " y" * 4]),
            ("x" * 30 + " is at 12:30 a.m. yes", ["x" * 30, " is at 12:30 a.m. yes"]),
            # never after an opening quotation mark or bracket
            ("河" * 11 + "《" + "河" * 10 + "》", ["河" * 11, "《" + "河" * 10 + "》"]),
            ("x" * 40 + "河.the", ["x" * 40, "河.the"]),
        ],
    )
    def test_breaks(self, text: str, lines: list[str]) -> None:
        assert wrap(text) == lines

    @given(text=st.lists(words, min_size=1, max_size=60).map("".join))
    @settings(max_examples=200, deadline=None)
    def test_lines_fit_and_are_the_text(self, text: str) -> None:
        lines = wrap(text)
        assert "".join(lines) == text
        for before, line in pairwise(lines):
            assert line[0] not in NEVER_FIRST
            assert line[0] == " " or width(before[-1] + line[0]) > 2, "a word is not broken"
            assert before[-1] not in NEVER_LAST
            assert not (before[-1].isdigit() and re.match("[公的了河上桥]| km", line)), "a number keeps its unit"
        assert all(width(line) <= COLUMNS for line in lines if not re.search("[0-9]{9}", line) and " " in line.strip())

    def test_width_counts_columns(self) -> None:
        assert width(" 河a。 ") == 5


@pytest.mark.parametrize(
    ("style", "kind"), [("text", TextWriter), ("jsonl", JSONWriter), ("srt", CaptionWriter), ("vtt", CaptionWriter)]
)
def test_every_format_has_a_writer(style: str, kind: type[Writer]) -> None:
    assert isinstance(open_writer(Format(style), io.StringIO()), kind)
