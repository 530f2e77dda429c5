"""Scores of translated speech: tables worked by hand, and a recording from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cli.helpers import call
from simulmt.errors import DataError
from simulmt.eval import speech
from simulmt.eval.latency import lagging
from simulmt.eval.speech import (
    PAUSE,
    Recording,
    Segment,
    resegment,
    score_speech,
    stream_laal,
    word_error_rate,
)
from simulmt.runtime.revisions import Hypothesis
from simulmt.runtime.stream import Translator
from simulmt.speech.audio import RATE, Samples, synthesise
from simulmt.speech.live import SpeechClock

SAID = ("the old bridge was closed.", "nobody is listening.")


class FakeRecogniser:
    """Recognises each sentence when it ends, every two seconds plus a pause."""

    language: str | None = "en"

    def start(self) -> FakeRecogniser:
        self._heard = 0.0
        self._said = 0
        return self

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._heard += len(samples) / RATE
        start = self._said * (2 + PAUSE)
        if self._said == len(SAID) or self._heard < start + 2:
            return []
        self._said += 1
        return [Hypothesis(SAID[self._said - 1], True, self._said, start=start, end=start + 2)]

    def finish(self) -> list[Hypothesis]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("hypothesis", "reference", "rate"),
    [
        ("Good morning, everyone.", "good morning everyone", 0),
        ("good evening everyone", "good morning everyone", 100 / 3),
        ("good everyone", "good morning everyone", 100 / 3),
        ("a good good morning everyone", "good morning everyone", 200 / 3),
        ("", "good morning", 100),
    ],
)
def test_word_error_rate(hypothesis: str, reference: str, rate: float) -> None:
    assert word_error_rate(hypothesis, reference) == pytest.approx(rate)


def test_word_error_rate_needs_words() -> None:
    with pytest.raises(DataError, match="the reference has no words"):
        word_error_rate("a", "...")


@pytest.mark.parametrize(
    ("units", "references", "parts"),
    [
        ("abcd", ["ab", "cd"], ["ab", "cd"]),
        ("abXcd", ["ab", "cd"], ["abX", "cd"]),  # unaligned units go with the unit before them
        ("acd", ["ab", "cd"], ["a", "cd"]),
        ("Xabcd", ["ab", "cd"], ["Xab", "cd"]),
        ("cd", ["ab", "cd"], ["", "cd"]),
        ("ABCD", ["ab", "cd"], ["AB", "CD"]),
        ("", ["ab", "cd"], ["", ""]),
        ("ab", ["ab", "", "cd"], ["ab", "", ""]),
    ],
)
def test_output_is_cut_into_the_sentences_of_the_reference(units: str, references: list[str], parts: list[str]) -> None:
    found = resegment(units, references)
    assert ["".join(units[index] for index in part) for part in found] == parts
    assert sorted(index for part in found for index in part) == list(range(len(units)))


@pytest.mark.parametrize(
    ("delays", "duration", "length", "lag"),
    [
        ([1, 2, 3, 4], 4, 4, 1.0),  # one second behind an interpreter of one unit a second
        ([1, 2, 3, 4], 4, 8, (1 + 1.5 + 2 + 2.5) / 4),  # a longer reference: the ideal is faster
        ([2, 4, 5, 6], 4, 4, (2 + 3) / 2),  # up to the first unit after the end
        ([5, 6], 4, 2, 5.0),  # all after the end: the first alone counts
    ],
)
def test_laal_of_a_sentence(delays: Sequence[float], duration: float, length: int, lag: float) -> None:
    segment = Segment("", ("",), 10.0, duration)
    assert stream_laal([[10 + delay for delay in delays]], [segment], [length]) == pytest.approx(1000 * lag)


def test_laal_is_that_of_omnisteval() -> None:
    scoring = pytest.importorskip("omnisteval.scoring")
    data = pytest.importorskip("omnisteval.data")
    for delays in ([500.0, 900.0, 1700.0, 2500.0], [1200.0, 1300.0], [2100.0, 2200.0]):
        instance = data.Instance("x", "a b c", "word", 0, 2000.0, delays, delays, 2000.0, True)
        assert lagging(delays, 2000.0, max(len(delays), 3)) == pytest.approx(scoring.LAALScorer().compute(instance))


def test_stream_laal_counts_from_the_start_of_each_sentence() -> None:
    segments = [Segment("a", ("a",), 0.0, 4.0), Segment("b", ("b",), 5.0, 2.0), Segment("c", ("c",), 8.0, 2.0)]
    assert stream_laal([[1, 2, 3, 4], [6.0, 7.0], []], segments, [4, 2, 3]) == pytest.approx(1000 * (1 + 1) / 2)


def test_sentences_are_joined_with_pauses() -> None:
    second = np.ones(RATE, np.float32)
    recording = Recording.join([(second, "a", ("b",)), (second, "c", ("d",))])
    assert [segment.start for segment in recording.segments] == [0.0, 1 + PAUSE]
    assert recording.seconds == pytest.approx(2 * (1 + PAUSE))
    with pytest.raises(DataError, match="no audio"):
        Recording.join([])


def test_a_recording_from_end_to_end(model: Translator) -> None:
    references = [model.translate(text, 2) for text in SAID]
    silence = np.zeros(2 * RATE, np.float32)
    recording = Recording.join([(silence, text, (ref,)) for text, ref in zip(SAID, references, strict=True)])
    scores = score_speech(model, FakeRecogniser(), recording, 2, "word")
    assert scores.word_error_rate == 0
    assert pytest.approx(scores.BLEU_clean) == scores.BLEU
    assert max(scores.BLEU_whole, scores.BLEU_bare) < scores.BLEU  # the recogniser starts anew with each sentence
    # Everything is written when a sentence has been heard: for each, the first unit alone counts.
    assert scores.stream_laal == pytest.approx(2000, abs=110)
    assert scores.stream_laal_ca >= scores.stream_laal
    assert scores.lag["total"] >= scores.lag["recognition"] >= 0
    assert scores.recognition_rtf > 0
    assert scores.translation_rtf > 0
    assert scores.cpu_rtf > 0
    assert scores.peak_memory_mb > 10


def test_the_clock_advances_with_the_audio() -> None:
    clock = SpeechClock()
    clock.advance_to(100.0)
    assert 100 <= clock() < 101
    clock.advance_to(50.0)  # computation took longer than the audio
    assert 100 <= clock() < 101


def test_the_command(
    model: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speech, "open_recogniser", lambda _: FakeRecogniser())
    monkeypatch.setattr(speech, "synthesise", lambda _: np.zeros(2 * RATE, np.float32))
    source, reference = tmp_path / "dev.en", tmp_path / "dev.de"
    source.write_text("\n".join(SAID) + "\n", encoding="utf-8")
    reference.write_text("\n".join(model.translate(text, 2) for text in SAID) + "\n", encoding="utf-8")
    common = ("--source", source, "--reference", reference, "--output", tmp_path / "results")
    bundle = ("--model", f"mine={model.bundle.directory}", "--delay", "2")
    done = call("evaluate", *common, *bundle, "--audio", "espeak-ng", capture=capsys)
    assert done.returncode == 0
    written = json.loads((tmp_path / "results" / "speech.json").read_text(encoding="utf-8"))
    (scores,) = written["results"]
    assert (scores["system"], scores["delay"], scores["word_error_rate"]) == ("mine", 2, 0)
    assert set(scores["lag"]) == {"total", *speech.CAUSES}
    assert "mine" in done.stdout
    refused = call("evaluate", *common, *bundle, "--audio", tmp_path, capture=capsys)
    assert refused.returncode == 2
    assert "0 WAV files for 2 sentences" in refused.stderr


def test_synthesis_names_a_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.speech.audio.ESPEAK", "espeak-that-is-not-there")
    with pytest.raises(Exception, match="espeak-that-is-not-there is not installed"):
        synthesise("hello")
