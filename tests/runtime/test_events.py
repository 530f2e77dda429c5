"""Events of recognisers, recorded or as documented, and invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulmt.errors import DataError
from simulmt.runtime.revisions import EventReader, Hypothesis, Stabiliser

EVENTS = Path(__file__).parent / "events"


def sentences(name: str) -> list[str]:
    """Return the stable words of a recording, one string per sentence."""
    reader, stabiliser = EventReader(), Stabiliser()
    lines: list[str] = [""]
    recording = (EVENTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    for now, line in enumerate(recording):
        for hypothesis in reader.read(line):
            for word in stabiliser.push(hypothesis, now):
                lines[-1] = f"{lines[-1]} {word.text}".strip()
                lines += [""] if word.ends_sentence else []
    lines[-1] = " ".join([lines[-1], *(word.text for word in stabiliser.flush(99))]).strip()
    return [line for line in lines if line]


@pytest.mark.parametrize(
    ("recogniser", "certain"),
    [
        (
            "moonshine",
            [
                "It was the best of times it was the worst of times.",
                "It was the age of wisdom, It was the age of foolishness.",
                "It was the epoch of belief, That was the epoch of incredulity.",
            ],
        ),
        ("vosk", ["good morning everyone", "it is not far"]),
        ("whisperlivekit", ["Good morning, everyone. It is not far.", "Thank you."]),
    ],
)
def test_a_recording_of_each_recogniser(recogniser: str, certain: list[str]) -> None:
    assert sentences(recogniser) == certain


def test_a_completed_line_of_moonshine_counts_once() -> None:
    reader = EventReader()
    event = {"text": "Hello.", "line_id": 7, "is_complete": True, "start_time": 1.0, "duration": 0.5}
    assert reader.read(json.dumps(event)) == [Hypothesis("Hello.", True, 7, start=1.0, end=1.5)]
    assert reader.read(json.dumps(event)) == []


def test_final_results_of_vosk_end_a_segment() -> None:
    reader = EventReader()
    assert reader.read('{"partial": "good mo"}') == [Hypothesis("good mo", segment=0)]
    final = '{"text": "good morning", "result": [{"word": "good", "start": 1, "end": 2}, {"start": 2, "end": 2.5}]}'
    assert reader.read(final) == [Hypothesis("good morning", True, 0, start=1.0, end=2.5)]
    assert reader.read('{"partial": "it"}') == [Hypothesis("it", segment=1)]


def test_lines_of_whisperlivekit_may_be_split_differently_later() -> None:
    reader, stabiliser = EventReader(), Stabiliser()
    updates: list[tuple[list[str | None], str]] = [
        (["Good morning", "everyone, it"], "is not"),
        (["Good morning everyone, it is"], "not far."),
        (["Good morning everyone,", "it is", "not far.", None], ""),
        (["Good morning everyone, it is not far.", None, "Thank"], "you."),
        (["Good morning everyone, it is not far.", None, "Thank you.", None], ""),
    ]
    words = []
    for now, (lines, buffer) in enumerate(updates):
        event = {"lines": [{"text": text} for text in lines], "buffer_transcription": buffer}
        for hypothesis in reader.read(json.dumps(event)):
            words += stabiliser.push(hypothesis, now)
    assert " ".join(word.text for word in words if word.text) == "Good morning everyone, it is not far. Thank you."


def test_events_of_sherpa_and_plain_ones() -> None:
    reader = EventReader()
    assert reader.read('{"text": "GOOD ", "segment": 3, "is_final": false}') == [Hypothesis("GOOD", segment=3)]
    assert reader.read('{"text": "good", "final": false}') == [Hypothesis("good", segment=0)]
    assert reader.read('{"text": "good day", "final": true}') == [Hypothesis("good day", True, 0)]
    assert reader.read('{"text": "good", "final": false, "segment": "b"}') == [Hypothesis("good", segment="b")]
    assert reader.read('{"text": "good", "final": false}') == [Hypothesis("good", segment=1)]


@pytest.mark.parametrize("line", ["", "  ", '{"type": "ready_to_stop"}', '{"status": "no_audio_detected"}'])
def test_events_without_text_are_ignored(line: str) -> None:
    assert EventReader().read(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "good morning",
        "[1]",
        "{}",
        '{"partial": 3}',
        '{"text": ["a"]}',
        '{"lines": [3]}',
        '{"lines": 3}',
        '{"text": "a", "final": true, "segment": []}',
        '{"text": "a", "is_final": true, "segment": 1e999}',
        '{"line_id": 1, "text": "a"}',
        '{"text": "a", "segment": "x", "is_final": true}',
        "[" * 100_000,
        '{"text": "a", "result": [1]}',
    ],
)
def test_an_unknown_event_is_a_one_line_error(line: str) -> None:
    with pytest.raises(DataError, match="expected a") as refused:
        EventReader().read(line)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
