"""Recognisers behind one interface: Moonshine itself if installed, fakes of the others as documented."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulmt.errors import ConfigError, MissingExtraError, SpeechError
from simulmt.runtime.revisions import Hypothesis
from simulmt.speech import recogniser as recognisers
from simulmt.speech.audio import RATE, Samples, read_audio, read_whole
from simulmt.speech.live import Listener
from simulmt.speech.recogniser import MoonshineRecognition, open_recogniser

SECOND: Samples = np.zeros(RATE, np.float32)


class TestNames:
    @pytest.mark.parametrize("name", ["", "whisper", "vosk", "sherpa:"])
    def test_an_invalid_name_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match="expected"):
            open_recogniser(name)

    @pytest.mark.parametrize("kind", ["moonshine", "vosk", "sherpa"])
    def test_a_missing_directory_is_refused(self, kind: str, tmp_path: Path) -> None:
        with pytest.raises(SpeechError, match="no such directory"):
            open_recogniser(f"{kind}:{tmp_path / 'nowhere'}")

    @pytest.mark.parametrize(
        ("module", "name", "install"),
        [
            ("moonshine_voice", "moonshine", r"simulmt\[speech\]"),
            ("vosk", "vosk", "pip install vosk"),
            ("sherpa_onnx", "sherpa", "pip install sherpa-onnx"),
        ],
    )
    def test_a_library_that_is_not_installed(
        self, module: str, name: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises((SpeechError, MissingExtraError), match=install):
            open_recogniser(name if name == "moonshine" else f"{name}:{tmp_path}")


class FakeVosk(ModuleType):
    """Recognises one more word every second, and ends a sentence after three."""

    def __init__(self) -> None:
        super().__init__("vosk")
        self.SetLogLevel = lambda _: None

    @staticmethod
    def Model(path: str) -> str:  # noqa: N802
        if "broken" in path:
            raise Exception("Failed to create a model")
        return path

    class KaldiRecognizer:
        def __init__(self, model: str, rate: float) -> None:
            assert (bool(model), rate) == (True, RATE)
            self.seconds = 0.0
            self.words = False

        def SetWords(self, wanted: bool) -> None:  # noqa: N802
            self.words = wanted

        def AcceptWaveform(self, data: bytes) -> int:  # noqa: N802
            self.seconds += len(data) / 2 / RATE
            return int(self.seconds >= 3)

        def PartialResult(self) -> str:  # noqa: N802
            return json.dumps({"partial": " ".join(["guten", "tag", "zusammen"][: int(self.seconds)])})

        def Result(self) -> str:  # noqa: N802
            self.seconds = 0
            words = [{"word": "guten", "start": 0.0, "end": 1.0}, {"word": "tag", "start": 1.0, "end": 2.5}]
            return json.dumps({"text": "guten tag", "result": words})

        def FinalResult(self) -> str:  # noqa: N802
            return json.dumps({"text": "ende" if self.seconds else ""})


class TestVosk:
    @pytest.fixture(autouse=True)
    def model(self, tmp_path: Path) -> None:
        (tmp_path / "am").mkdir()
        (tmp_path / "am" / "final.mdl").touch()

    def test_partial_and_final_results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vosk", FakeVosk())
        recognition = open_recogniser(f"vosk:{tmp_path}").start()
        assert recognition.push(SECOND[: RATE // 10]) == []  # too soon for another
        assert recognition.push(SECOND) == [Hypothesis("guten")]
        assert recognition.push(SECOND) == [Hypothesis("guten tag")]
        assert recognition.push(SECOND) == [Hypothesis("guten tag", True, 0, start=0.0, end=2.5)]
        assert recognition.push(SECOND) == [Hypothesis("guten", segment=1)]
        assert recognition.finish() == [Hypothesis("ende", True, 1)]
        recognition.close()

    def test_a_directory_without_a_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vosk", FakeVosk())
        (tmp_path / "conf").mkdir()
        with pytest.raises(SpeechError, match=r"no am/final\.mdl"):
            open_recogniser(f"vosk:{tmp_path / 'conf'}")

    def test_a_model_that_is_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vosk", FakeVosk())
        (tmp_path / "am").rename(tmp_path / "broken")
        with pytest.raises(SpeechError, match="Vosk cannot load it"):
            open_recogniser(f"vosk:{tmp_path / 'broken'}")


class FakeSherpa:
    """Recognises one more word every second, and reaches an endpoint after three."""

    def __init__(self, **settings: Any) -> None:
        assert settings["enable_endpoint_detection"]
        assert all(Path(settings[name]).is_file() for name in ("tokens", "encoder", "decoder", "joiner"))
        assert settings["encoder"].endswith("encoder-1.int8.onnx")

    def create_stream(self) -> Any:
        stream = SimpleNamespace(seconds=0.0, waiting=0.0, input_finished=lambda: None)

        def accept(rate: int, samples: Sequence[float]) -> None:
            stream.waiting += len(samples) / rate

        stream.accept_waveform = accept
        return stream

    def is_ready(self, stream: Any) -> bool:
        return bool(stream.waiting)

    def decode_stream(self, stream: Any) -> None:
        stream.seconds, stream.waiting = stream.seconds + stream.waiting, 0

    def get_result(self, stream: Any) -> str:
        return " ".join(["GOOD", "DAY", "ALL"][: int(stream.seconds)])

    def is_endpoint(self, stream: Any) -> bool:
        return bool(stream.seconds >= 3)

    def reset(self, stream: Any) -> None:
        stream.seconds = 0


class TestSherpa:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        for name in ("tokens.txt", "encoder-1.onnx", "encoder-1.int8.onnx", "decoder-1.onnx", "joiner-1.onnx"):
            (tmp_path / name).touch()
        return tmp_path

    def test_endpoints_end_a_segment(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library: Any = ModuleType("sherpa_onnx")
        library.OnlineRecognizer = SimpleNamespace(from_transducer=FakeSherpa)
        monkeypatch.setitem(sys.modules, "sherpa_onnx", library)
        recognition = open_recogniser(f"sherpa:{directory}").start()
        assert recognition.push(SECOND[: RATE // 10]) == []
        assert recognition.push(SECOND) == [Hypothesis("good")]
        assert recognition.push(SECOND) == [Hypothesis("good day")]
        assert recognition.push(SECOND) == [Hypothesis("good day all", True)]
        assert recognition.push(SECOND) == [Hypothesis("good", segment=1)]
        assert recognition.finish() == [Hypothesis("good", True, 1)]
        recognition.close()

    def test_files_of_a_model(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sherpa_onnx", ModuleType("sherpa_onnx"))
        (directory / "joiner-1.onnx").unlink()
        with pytest.raises(SpeechError, match=r"no joiner\*\.onnx"):
            open_recogniser(f"sherpa:{directory}")
        (directory / "tokens.txt").unlink()
        with pytest.raises(SpeechError, match=r"no tokens\.txt"):
            open_recogniser(f"sherpa:{directory}")


class FakeDetector:
    """Its streams detect a line of two seconds every six, and keep everything."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    def open_stream(self) -> Any:
        self.opened += 1
        return _FakeStream(self)


class _FakeStream:
    def __init__(self, detector: FakeDetector) -> None:
        self._detector = detector
        self._seconds = 0.0
        self._is_over = False

    def add_audio(self, samples: Sequence[float], rate: int) -> None:
        self._seconds += len(samples) / rate

    def stop(self) -> None:
        self._is_over = True

    def close(self) -> None:
        self._detector.closed += 1

    def update_transcription(self) -> Any:
        return SimpleNamespace(lines=[self._line(6.0 * number) for number in range(int(self._seconds / 6) + 1)])

    def _line(self, start: float) -> Any:
        duration = min(2.0, self._seconds - start)
        return SimpleNamespace(
            start_time=start, duration=duration, is_complete=self._seconds > start + 2 or self._is_over
        )


class FakeModel(recognisers.MoonshineModel):
    """Recognises one word per second, and records the length of each draft."""

    def __init__(self) -> None:
        self.drafts: list[int] = []

    def transcribe(self, samples: Samples, draft: Sequence[int] = ()) -> list[int]:
        self.drafts.append(len(draft))
        return list(range(len(samples) // RATE))

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(f"word{token}" for token in tokens)


class TestMoonshine:
    def test_streams_are_restarted_in_a_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recognisers, "RESTART_AFTER", 10.0)
        detector = FakeDetector()
        recognition = MoonshineRecognition(FakeModel(), detector.open_stream)
        finals = [found for _ in range(60) for found in recognition.push(SECOND) if found.is_final]
        finals += [found for found in recognition.finish() if found.is_final]
        assert detector.opened == detector.closed > 3
        starts = [found.start or 0.0 for found in finals]
        assert starts == sorted(starts)
        assert len({found.segment for found in finals}) == len(finals)
        assert 50 < starts[-1] < 60

    def test_a_stream_is_finally_restarted_in_mid_speech(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recognisers, "RESTART_AT_LATEST", 5.0)
        detector = FakeDetector()
        recognition = MoonshineRecognition(FakeModel(), detector.open_stream)
        for _ in range(30):
            recognition.push(SECOND)
        recognition.close()
        recognition.close()
        assert detector.opened == detector.closed > 4

    def test_a_line_grows_from_its_last_hypothesis_and_a_new_one_from_nothing(self) -> None:
        model = FakeModel()
        recognition = MoonshineRecognition(model, FakeDetector().open_stream)
        found = [each for _ in range(9) for each in recognition.push(SECOND)]
        assert [each.text for each in found] == [
            *["word0", "word0 word1", "word0 word1"],
            *["", "word0", "word0 word1", "word0 word1"],
        ]
        assert [each.is_final for each in found] == [False, False, True, False, False, False, True]
        assert model.drafts == [0, 1, 2, 0, 0, 1, 2]

    def test_a_directory_without_a_model(self, tmp_path: Path) -> None:
        pytest.importorskip("moonshine_voice")
        with pytest.raises(SpeechError, match=r"no encoder_model\.ort; expected the directory of a Moonshine model"):
            open_recogniser(f"moonshine:{tmp_path}")

    def test_a_model_that_is_broken(self, tmp_path: Path) -> None:
        pytest.importorskip("moonshine_voice")
        for name in (recognisers.ENCODER, recognisers.DECODER, recognisers.TOKENS):
            (tmp_path / name).write_bytes(b"broken")
        with pytest.raises(SpeechError, match="ONNX Runtime cannot load it"):
            open_recogniser(f"moonshine:{tmp_path}")

    def test_any_draft_gives_the_same_tokens(self) -> None:
        library = pytest.importorskip("moonshine_voice")
        assets = Path(library.__file__).parent / "assets"
        model = recognisers.MoonshineModel(assets / "tiny-en", "en")
        samples = read_whole(assets / "two_cities.wav")[RATE : 4 * RATE]
        tokens = model.transcribe(samples)
        assert model.text(tokens).startswith("It was the best of times")
        for draft in (tokens, tokens[:4], [*tokens, *tokens], [7, 8, 9]):
            assert model.transcribe(samples, draft) == tokens
        assert len(model.transcribe(samples[:10])) <= 1  # shorter than the encoder can read

    def test_the_model_in_the_wheel_recognises_words_and_silence(self) -> None:
        library = pytest.importorskip("moonshine_voice")
        recogniser = open_recogniser()
        assert recogniser.language == "en"
        wav = Path(library.__file__).parent / "assets" / "two_cities.wav"
        listener = Listener(recogniser.start())
        words = []
        with wav.open("rb") as file:
            for samples in read_audio(file, wav.name):
                words += listener.push(samples)
                if listener.seconds > 5.5:
                    break
        words += listener.finish()
        said = " ".join(word.text.strip(".,").lower() for word in words if word.text)
        assert said.startswith("it was the best of times it was the worst of times")
        assert all(0.5 < word.spoken < 6 for word in words)
        silence = Listener(recogniser.start())
        assert silence.push(np.zeros(3 * RATE, np.float32)) == []
        assert silence.finish() == []
