"""Audio over the WebSocket: recognised, translated, acknowledged, resumed and bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from simulmt.errors import ConfigError, SpeechError
from simulmt.runtime.revisions import Hypothesis, Word
from simulmt.runtime.stream import Translator
from simulmt.serve import audio
from simulmt.serve.app import Settings, create_app
from simulmt.serve.audio import ACKNOWLEDGED_EVERY, find_recognisers
from simulmt.speech.audio import RATE, Samples

from .helpers import PATIENCE, Served, Talk, eventually, get, synthetic_text, text_of

LANGUAGE = "synthetic"  # of the toy model
WORDS = [word for word in synthetic_text(3, seed=5).split() if word.isalpha()]
FRAME = RATE // 10


def speak(first: int, count: int) -> bytes:
    """Return frames of 0.1 s, filled with their number; the fake recogniser hears word n in frame n."""
    return np.repeat(np.arange(first, first + count), FRAME).astype("<i2").tobytes()


class FakeRecogniser:
    """Recognises a word in every frame, by the frame's number, and revises the last one."""

    language: str | None = LANGUAGE
    started: list[FakeRecogniser] = []  # noqa: RUF012, a record for the tests
    gate = threading.Event()  # nothing is heard while it is clear

    def start(self) -> FakeRecogniser:
        speaker = FakeRecogniser()
        speaker.heard, speaker.is_closed = [], False
        FakeRecogniser.started.append(speaker)
        return speaker

    heard: list[int]
    is_closed: bool

    def push(self, samples: Samples) -> list[Hypothesis]:
        assert FakeRecogniser.gate.wait(PATIENCE)
        numbers = np.rint(samples * (1 << 15)).astype(int).tolist()
        self.heard += [number for number in dict.fromkeys(numbers) if number not in self.heard]
        said = " ".join(WORDS[number] for number in self.heard[:-1])
        return [Hypothesis(f"{said} {WORDS[self.heard[-1]]}?", start=0.0, end=len(self.heard) / 10)]

    def finish(self) -> list[Hypothesis]:
        return [Hypothesis(" ".join(WORDS[number] for number in self.heard), is_final=True)] if self.heard else []

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def recognisers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRecogniser.started.clear()
    FakeRecogniser.gate.set()
    monkeypatch.setattr(audio, "open_recogniser", lambda _: FakeRecogniser())


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve(recognisers={LANGUAGE: "fake"})


def said(messages: list[dict[str, Any]]) -> str:
    return "".join(message["text"] for message in messages if message["type"] == "transcript")


def open_audio(talk: Talk, **fields: Any) -> dict[str, Any]:
    return talk.start(input="audio", **fields)


def test_speech_is_recognised_translated_and_acknowledged(served: Served, translator: Translator) -> None:
    with served.talk() as talk:
        assert open_audio(talk)["samples"] == 0
        for number in range(len(WORDS)):
            talk.socket.send(speak(number, 1))
        talk.send("finish")
        messages = talk.receive_all()
    assert said(messages).split() == WORDS
    assert text_of(messages) == translator.translate(" ".join(WORDS), 3)
    assert messages[-1]["type"] == "done"
    acknowledged = [message["samples"] for message in messages if message["type"] == "ack"]
    assert acknowledged == list(range(ACKNOWLEDGED_EVERY, len(WORDS) * FRAME + 1, ACKNOWLEDGED_EVERY))
    seqs = [message["seq"] for message in messages if message["type"] == "transcript"]
    assert seqs == list(range(1, len(seqs) + 1))
    assert any(message["tentative"].endswith("?") for message in messages if message["type"] == "transcript")
    assert any("recognition" in message["lag_ms"] for message in messages if message["type"] == "commit")
    eventually(lambda: FakeRecogniser.started[0].is_closed)


def test_a_lost_connection_loses_no_speech(served: Served, translator: Translator) -> None:
    with served.talk() as talk:
        session = open_audio(talk)["session"]
        for number in range(7):
            talk.socket.send(speak(number, 1))
        talk.receive_until("ack")
    with served.talk() as talk:
        ready = talk.send("resume", session=session, seq=0).receive()
        assert ready["samples"] % FRAME == 0
        assert ready["received"] == 0
        for number in range(ready["samples"] // FRAME, len(WORDS)):
            talk.socket.send(speak(number, 1))
        talk.send("finish")
        messages = talk.receive_all()
    transcripts = {message["seq"]: message["text"] for message in messages if message["type"] == "transcript"}
    assert "".join(transcripts[seq] for seq in sorted(transcripts)).split() == WORDS
    assert text_of(messages) == translator.translate(" ".join(WORDS), 3)
    assert FakeRecogniser.started[0].heard == list(range(len(WORDS)))


def test_speech_is_only_recognised_on_request(served: Served) -> None:
    with served.talk() as talk:
        session = open_audio(talk, output="transcript")["session"]
        talk.socket.send(speak(0, 5))
        before = talk.receive_until("transcript")
    with served.talk() as talk:  # each transcript comes once
        ready = talk.send("resume", session=session, seq=before[-1]["seq"]).receive()
        for number in range(ready["samples"] // FRAME, len(WORDS)):
            talk.socket.send(speak(number, 1))
        talk.send("finish")
        after = talk.receive_all()
    transcripts = [message for message in before + after if message["type"] == "transcript"]
    assert [message["seq"] for message in transcripts] == list(range(1, len(transcripts) + 1))
    assert said(transcripts).split() == WORDS
    assert [message.get("ends_sentence", False) for message in transcripts] == [False] * (len(transcripts) - 1) + [True]
    assert {message["type"] for message in after} == {"ack", "transcript", "done"}
    assert served.service.models["toy"].translator.decoder.caches.pools == {}  # nothing was translated


@pytest.mark.parametrize("fields", [{}, {"input": "audio", "room": "hall"}])
def test_a_transcript_needs_audio_and_no_room(served: Served, fields: dict[str, str]) -> None:
    with served.talk() as talk:
        talk.send("start", model="toy", output="transcript", **fields)
        assert talk.receive_error() == ("bad_message", 1008)


def test_transcripts_end_with_their_sentences() -> None:
    words = [Word("a", 0.0), Word("", 0.1, ends_sentence=True), Word("b", 0.2), Word("c", 0.3, ends_sentence=True)]
    assert audio._by_sentence(words) == [("a ", True), ("b c ", True)]
    assert audio._by_sentence([*words, Word("d", 0.4)])[2:] == [("d ", False)]


def test_the_delay_can_be_changed_while_speaking(served: Served) -> None:
    with served.talk() as talk:
        open_audio(talk)
        talk.socket.send(speak(0, 3))
        talk.send("delay", k=1).send("finish")
        assert talk.receive_all()[-1]["type"] == "done"


def test_audio_that_is_not_recognised_yet_is_bounded(serve: Callable[..., Served]) -> None:
    served = serve(recognisers={LANGUAGE: "fake"}, audio_seconds=1.0)
    FakeRecogniser.gate.clear()
    with served.talk() as talk:
        session = open_audio(talk)["session"]
        for number in range(len(WORDS)):
            talk.socket.send(speak(number, 1))
        (live,) = [each for each in served.sessions._sessions.values() if each.name == session]
        eventually(lambda: live.speech.received >= RATE)
        assert live.speech.received <= RATE + FRAME
        FakeRecogniser.gate.set()
        talk.send("finish")
        assert said(talk.receive_all()).split() == WORDS


@pytest.mark.parametrize("samples", [0, 1])
def test_frames_that_hold_hardly_any_audio_are_bounded_too(serve: Callable[..., Served], samples: int) -> None:
    served = serve(recognisers={LANGUAGE: "fake"}, audio_seconds=0.5)
    FakeRecogniser.gate.clear()
    with served.talk() as talk:
        open_audio(talk)
        (session,) = served.sessions._sessions.values()
        talk.socket.send(speak(0, 1))
        for _ in range(1_000):
            talk.socket.send(speak(0, 1)[: 2 * samples])
        eventually(lambda: session._inbox.qsize() >= 40)
        time.sleep(0.2)  # would it take more?
        queued = session._inbox.qsize()
        FakeRecogniser.gate.set()
        assert queued <= 50
        talk.send("finish")
        assert said(talk.receive_all()).split() == WORDS[:1]


def test_a_session_that_ends_while_its_recogniser_starts_leaves_nothing_open(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = FakeRecogniser.start

    def start_late(recogniser: FakeRecogniser) -> FakeRecogniser:
        assert FakeRecogniser.gate.wait(PATIENCE)
        return start(recogniser)

    monkeypatch.setattr(FakeRecogniser, "start", start_late)
    FakeRecogniser.gate.clear()
    served = serve(recognisers={LANGUAGE: "fake"}, grace_seconds=0.01)
    with served.talk() as talk:
        open_audio(talk)
        (session,) = served.sessions._sessions.values()
        talk.socket.send(speak(0, 1))
        eventually(lambda: session.is_busy and session._inbox.empty())
    eventually(lambda: not served.sessions._sessions)
    FakeRecogniser.gate.set()
    eventually(lambda: bool(FakeRecogniser.started))
    eventually(lambda: FakeRecogniser.started[0].is_closed)


def test_audio_streams_are_limited(serve: Callable[..., Served]) -> None:
    served = serve(recognisers={LANGUAGE: "fake"}, audio_streams=1)
    with served.talk() as first, served.talk() as second, served.talk() as text:
        open_audio(first)
        second.send("start", model="toy", input="audio")
        assert second.receive_error() == ("too_many_streams", 1013)
        assert text.start()["type"] == "ready"
        first.send("finish").receive_all()
    with served.talk() as third:
        assert open_audio(third)["type"] == "ready"


def test_a_language_without_a_recogniser_is_refused(serve: Callable[..., Served]) -> None:
    with serve(recognisers={"xx": "fake"}).talk() as talk:
        talk.send("start", model="toy", input="audio")
        assert talk.receive_error() == ("no_recogniser", 1008)


@pytest.mark.parametrize(
    ("opening", "message", "code"),
    [
        ({"input": "audio"}, b"abc", "bad_message"),
        ({"input": "audio"}, b"\0" * 70_000, "too_big"),
        ({"input": "audio"}, '{"type":"source","text":"hello "}', "out_of_order"),
        ({"input": "audio", "output": "transcript"}, '{"type":"delay","k":1}', "out_of_order"),
        ({"input": "text"}, b"\0\0", "bad_message"),
    ],
)
def test_messages_that_do_not_fit_the_input_are_refused(
    served: Served, opening: dict[str, str], message: str | bytes, code: str
) -> None:
    with served.talk() as talk:
        talk.start(**opening)
        talk.socket.send(message)
        assert talk.receive_error()[0] == code


def test_a_recogniser_that_fails_ends_the_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(FakeRecogniser, "push", fail)
    with served.talk() as talk:
        open_audio(talk)
        talk.socket.send(speak(0, 1))
        assert talk.receive_error() == ("internal", 1011)
    with served.talk() as talk:
        assert talk.start()["type"] == "ready"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(SpeechError("no model"), "no model"), (OSError("no library\nin 5 places"), "no library"), (OSError(), "OSError")],
)
def test_a_recogniser_that_cannot_be_loaded_is_reported_at_the_start(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    monkeypatch.setattr(audio, "open_recogniser", Mock(side_effect=failure))
    with pytest.raises(SpeechError, match=f"^cannot load the recogniser for {LANGUAGE}: {reason}; to serve text only"):
        create_app(Settings(("toy",), threads=1, recognisers={LANGUAGE: "fake"}))


def test_a_recogniser_that_cannot_be_loaded_later_is_reported_too(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served.service.recognisers._threads[LANGUAGE], "_recogniser", None)  # as in another worker
    monkeypatch.setattr(audio, "open_recogniser", Mock(side_effect=SpeechError("no model")))
    with served.talk() as talk:
        open_audio(talk)
        talk.socket.send(speak(0, 1))
        assert talk.receive_error() == ("no_recogniser", 1008)
    assert f"cannot load the recogniser for {LANGUAGE}: no model" in caplog.text


def test_a_server_that_shuts_down_translates_what_it_has_acknowledged(served: Served) -> None:
    with served.talk() as talk:
        open_audio(talk)
        for number in range(5):
            talk.socket.send(speak(number, 1))
        messages = talk.receive_until("ack")
        threading.Thread(target=served.stop).start()
        messages += talk.receive_all()
    assert said(messages).split() == WORDS[:5]
    assert messages[-1]["code"] == "draining"


def test_metrics_and_models_report_audio(served: Served) -> None:

    (model,) = get(f"{served.http}/v1/models").json()["models"]
    assert model["audio"] is True
    with served.talk() as talk:
        open_audio(talk)
        talk.socket.send(speak(0, 3))
        assert "simulmt_audio_streams 1.0" in get(f"{served.http}/metrics").text
        talk.send("finish").receive_all()
    metrics = get(f"{served.http}/metrics").text
    assert "simulmt_audio_streams 0.0" in metrics
    assert f'simulmt_audio_seconds_total{{language="{LANGUAGE}"}} 0.3' in metrics


class TestOptions:
    def test_the_default_is_moonshine_where_it_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(audio, "is_default_installed", lambda: True)
        assert find_recognisers([]) == {"en": "moonshine"}
        monkeypatch.setattr(audio, "is_default_installed", lambda: False)
        assert find_recognisers([]) == {}
        assert find_recognisers(["none"]) == {}

    def test_names_by_language(self, tmp_path: Any) -> None:
        (tmp_path / "base-es").mkdir()
        options = ["moonshine", f"de=vosk:{tmp_path}", f"moonshine:{tmp_path}/base-es"]
        assert find_recognisers(options) == {
            "en": "moonshine",
            "de": f"vosk:{tmp_path}",
            "es": f"moonshine:{tmp_path}/base-es",
        }

    def test_mistakes(self, tmp_path: Any) -> None:
        with pytest.raises(ConfigError, match="unknown language; give LANGUAGE=vosk:"):
            find_recognisers([f"vosk:{tmp_path}"])
        with pytest.raises(ConfigError, match="duplicate recogniser for en"):
            find_recognisers(["moonshine", f"en=vosk:{tmp_path}"])
        with pytest.raises(SpeechError, match="no such directory"):
            find_recognisers(["de=vosk:/nowhere"])
        with pytest.raises(ConfigError, match="recogniser 'whisper': expected"):
            find_recognisers(["whisper"])
