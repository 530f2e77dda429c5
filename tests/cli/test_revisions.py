"""simulmt translate --input revisions: a recogniser's events in, a line a sentence out."""

from __future__ import annotations

import io
import json
from pathlib import Path

from cli.helpers import simulmt
from simulmt.runtime.captions import Format, open_writer
from simulmt.runtime.pipe import Arrival, RevisionTranslator
from simulmt.runtime.stream import Translator
from simulmt.speech.events import EventReader

EVENTS = (
    '{"partial": "the old"}\n{"partial": "the old"}\n{"partial": "the old barn"}\n{"text": "the old bridge"}\n'
    '{"partial": "in"}\n{"text": "in winter"}\n'
)


def test_certain_words_are_translated_a_line_a_sentence(model: Translator, bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS)
    assert done.stderr == ""
    assert done.stdout == model.translate("the old bridge\nin winter\n", model.config.default_delay)


def test_the_lag_of_recognition_counts_from_the_first_appearance(model: Translator) -> None:
    output = io.StringIO()
    lines, now = RevisionTranslator(model, 1, open_writer(Format.JSONL, output), EventReader().read), model.clock()
    lines.push([Arrival('{"partial": "the old"}\n{"par', now - 0.5)])
    lines.push([Arrival('tial": "the old bridge"}\n', now - 0.3), Arrival('{"text": "the old bridge"}\n', now)])
    lines.finish()
    records = [json.loads(line) for line in output.getvalue().splitlines()]
    assert {record["lag_ms"]["recognition"] for record in records} <= {0, 200, 500, 300}
    assert "".join(record["text"] for record in records) == model.translate("the old bridge", 1)
    assert any(record["lag_ms"]["recognition"] for record in records)


def test_what_is_no_event_is_an_error_that_says_where(bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS + "hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("simulmt: line 7: expected a JSON object of WhisperLiveKit, Vosk, Moonshine")
    assert done.stderr.count("\n") == 1
