"""simulmt translate --input revisions: a recogniser's events in, a line a sentence out."""

from __future__ import annotations

from pathlib import Path

from cli.helpers import simulmt
from simulmt.runtime.stream import Translator

EVENTS = (
    '{"partial": "the old"}\n{"partial": "the old"}\n{"partial": "the old barn"}\n{"text": "the old bridge"}\n'
    '{"partial": "in"}\n{"text": "in winter"}\n'
)


def test_certain_words_are_translated_a_line_a_sentence(model: Translator, bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS)
    assert done.stderr == ""
    assert done.stdout == model.translate("the old bridge\nin winter\n", model.config.default_delay)


def test_what_is_no_event_is_an_error_that_says_where(bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS + "hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("simulmt: line 7: expected a JSON object of WhisperLiveKit, Vosk, Moonshine")
    assert done.stderr.count("\n") == 1
