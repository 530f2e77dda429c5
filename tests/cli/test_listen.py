"""The commands listen, and translate --input revisions: one line per sentence from speech or recogniser events."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cli.helpers import call, simulmt
from runtime.test_captions import parse_srt
from simulmt.runtime.revisions import Hypothesis
from simulmt.runtime.stream import Translator
from simulmt.speech import audio, recogniser
from simulmt.speech.audio import RATE, Samples

SAID = ["the old bridge.", "nobody is listening."]


class FakeRecogniser:
    """Recognises a sentence every two seconds, and revises it once."""

    language: str | None = "en"

    def start(self) -> FakeRecogniser:
        self._samples = 0
        self._said = 0
        return self

    def push(self, samples: Samples) -> list[Hypothesis]:
        self._samples += len(samples)
        if self._samples < 2 * RATE * (self._said + 1) or self._said == len(SAID):
            return []
        self._said += 1
        return self._hear(self._said - 1)

    def finish(self) -> list[Hypothesis]:
        return []

    def close(self) -> None:
        pass

    def _hear(self, number: int) -> list[Hypothesis]:
        start, text = 2.0 * number, SAID[number]
        guess = text.split(" ", 1)[0] + " else"
        return [
            Hypothesis(guess, segment=number, start=start, end=start + 1),
            Hypothesis(text, True, number, start=start, end=start + 1.5),
        ]


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    path = tmp_path / "speech.wav"
    path.write_bytes(wav(np.zeros(RATE * 5, np.int16)))
    return path


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recogniser, "open_recogniser", lambda _: FakeRecogniser())


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    data = samples.astype("<i2").tobytes()
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
        + layout
        + struct.pack("<4sI", b"data", len(data))
        + data
    )


@pytest.mark.usefixtures("heard")
class TestListening:
    def test_one_line_per_sentence(
        self, model: Translator, bundle: Path, speech: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = tmp_path / "said.txt"
        done = call("listen", speech, "--model", bundle, "--delay", "2", "--transcript", said, capture=capsys)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "".join(f"{model.translate(text, 2)}\n" for text in SAID)
        assert said.read_text(encoding="utf-8").split("\n") == ["the old bridge.", "nobody is listening.", ""]

    def test_the_lag_counts_from_the_end_of_the_spoken_word(
        self, bundle: Path, speech: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        done = call("listen", speech, "--model", bundle, "--delay", "1", "--format", "jsonl", capture=capsys)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        lags = [record["lag_ms"]["recognition"] for record in records]
        assert all(lag == 0 or 500 <= lag < 2000 for lag in lags)  # heard at 2.0 s, spoken from 0.0 to 1.5 s
        assert any(lags)

    def test_subtitles_are_timed_by_the_audio(
        self, bundle: Path, speech: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        done = call("listen", speech, "--model", bundle, "--format", "srt", capture=capsys)
        cues = parse_srt(done.stdout)
        assert [round(cue.start) for cue in cues][:1] == [2]

    def test_standard_input(
        self,
        model: Translator,
        bundle: Path,
        speech: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        piped = SimpleNamespace(buffer=io.BytesIO(speech.read_bytes()), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", piped)
        done = call("listen", "-", "--model", bundle, "--delay", "2", capture=capsys)
        assert done.stdout == "".join(f"{model.translate(text, 2)}\n" for text in SAID)

    def test_a_microphone_until_ctrl_c(
        self, model: Translator, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def microphone(device: str | None):  # type: ignore[no-untyped-def]
            assert device == "1"
            yield np.zeros(2 * RATE, np.float32)
            raise KeyboardInterrupt

        monkeypatch.setattr(audio, "listen_to_microphone", microphone)
        done = call("listen", "--microphone", "--device", "1", "--model", bundle, "--delay", "2", capture=capsys)
        assert (done.returncode, done.stderr) == (130, "Listening; Ctrl-C to stop.\n")
        assert done.stdout == f"{model.translate(SAID[0], 2)}\n"

    def test_a_terminal_is_not_accepted_as_audio(
        self, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        done = call("listen", "-", "--model", bundle, capture=capsys)
        assert done.returncode == 2
        assert done.stderr.startswith("simulmt: standard input is a terminal: pipe audio into it")

    def test_a_recogniser_of_another_language(
        self, bundle: Path, speech: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(FakeRecogniser, "language", "fr")
        done = call("listen", speech, "--model", bundle, capture=capsys)
        assert done.returncode == 2
        assert done.stderr.startswith("simulmt: --recogniser moonshine is for fr, but ")

    def test_silence(self, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        quiet = tmp_path / "quiet.wav"
        quiet.write_bytes(wav(np.zeros(RATE, np.int16)))
        done = call("listen", quiet, "--model", bundle, capture=capsys)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "simulmt: no speech was recognised\n"

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (None, "No such file or directory"),
            (b"RIFF\0\0\0\0WAVE", "invalid WAV file: no data chunk"),
            (b"OggS" + b"\0" * 99, "expected a WAV file; convert it: ffmpeg"),
            (wav(np.zeros(9), rate=100), "100 samples per second: expected 4000 to 384000"),
        ],
    )
    def test_an_unreadable_file_is_refused(
        self, bundle: Path, tmp_path: Path, data: bytes | None, reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "broken.wav"
        if data is not None:
            path.write_bytes(data)
        done = call("listen", path, "--model", bundle, capture=capsys)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"simulmt: {path}: {reason}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["speech.wav", "--microphone"]])
def test_either_a_file_or_a_microphone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = call("listen", *arguments, capture=capsys)
    assert done.returncode == 2
    assert done.stderr == "simulmt: give a WAV file, - for standard input, or --microphone\n"


def test_an_unknown_recogniser_is_refused(bundle: Path, speech: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call("listen", speech, "--model", bundle, "--recogniser", "whisper", capture=capsys)
    assert done.returncode == 2
    assert "recogniser 'whisper': expected moonshine, moonshine:DIR, vosk:DIR or sherpa:DIR" in done.stderr


def test_a_real_recogniser(bundle: Path) -> None:
    library = pytest.importorskip("moonshine_voice")
    wav_file = Path(library.__file__).parent / "assets" / "beckett.wav"
    done = simulmt("listen", wav_file, "--model", bundle, "--format", "jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records
    assert all(record["lag_ms"]["recognition"] < 10_000 for record in records)


EVENTS = (
    '{"partial": "the old"}\n{"partial": "the old"}\n{"partial": "the old barn"}\n{"text": "the old bridge"}\n'
    '{"partial": "in"}\n{"text": "in winter"}\n'
)


def test_stable_words_are_translated_one_line_per_sentence(model: Translator, bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS)
    assert done.stderr == ""
    assert done.stdout == model.translate("the old bridge\nin winter\n", model.config.default_delay)


def test_an_invalid_event_is_an_error_with_its_line(bundle: Path) -> None:
    done = simulmt("translate", "--input", "revisions", "--model", bundle, stdin=EVENTS + "hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "simulmt: standard input: line 7: expected a JSON object of WhisperLiveKit, Vosk, Moonshine"
    )
    assert done.stderr.count("\n") == 1
