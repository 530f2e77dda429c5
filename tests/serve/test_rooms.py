"""Rooms: what viewers see, whenever they join and whatever happens to the speaker; and undo."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from simulmt.runtime.stream import Translator
from simulmt.serve import rooms
from simulmt.serve.access import ApiKeys, Counted
from simulmt.serve.protocol import (
    Commit,
    Error,
    ErrorCode,
    LagMs,
    RefusedError,
    Retract,
    Room,
    Sentence,
    parse_room,
    write,
)
from simulmt.serve.rooms import KEPT_MESSAGES, Publisher, RoomLog

from .helpers import Served, eventually, get, synthetic_text, text_of

TEXT = synthetic_text(sentences=4, seed=81)
SENTENCES = [f"{sentence.strip()}. " for sentence in TEXT.split(".") if sentence.strip()]
Serve = Callable[..., Served]


def spoken(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["type"] in ("commit", "sentence")]


def test_viewers_read_what_the_speaker_reads(served: Served) -> None:
    with served.watch("hall") as early, served.talk() as speaker:
        assert early.receive() == {"type": "waiting", "room": "hall"}
        ready = speaker.start(room="hall", room_key="a")
        assert (ready["room"], ready["captions"]) == ("hall", "/captions/hall")
        room = early.receive()
        assert {**room, "speech": ""} == {
            "type": "room",
            "room": "hall",
            "model": "toy",
            "source": "synthetic",
            "target": "synthetic",
            "speech": "",
        }
        speaker.send("source", text=TEXT).send("finish")
        heard = speaker.receive_all()
        assert early.receive_until("closed")[:-1] == heard[:-1]
        assert early.receive() == {"type": "waiting", "room": "hall"}
    assert get(f"{served.http}{ready['captions']}").status_code == 200


def test_late_viewers_get_the_last_sentences(serve: Serve) -> None:
    served = serve(kept_sentences=2)
    with served.talk() as speaker:
        speaker.start(room="hall")
        speaker.send("source", text=f"{TEXT} ")
        heard = [message for _ in range(4) for message in speaker.receive_until("sentence")]
        with served.watch("hall") as late:
            assert late.receive()["type"] == "room"
            kept = [message for message in heard if message["sentence"] >= 1]
            assert [late.receive() for _ in kept] == kept


def test_a_room_has_one_speaker(served: Served) -> None:
    with served.talk() as speaker, served.talk() as other:
        speaker.start(room="hall", room_key="a")
        assert other.send("start", model="toy", room="hall", room_key="b").receive_error() == ("room_taken", 1008)
        speaker.send("finish")
        speaker.receive_all()
    with served.talk() as other:
        assert other.start(room="hall", room_key="b")["type"] == "ready"
        other.send("finish").receive_all()


def test_a_session_whose_room_fails_is_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError("the worker of this room is gone")

    monkeypatch.setattr(served.service.rooms, "open", fail)
    before = len(served.sessions._sessions)
    with served.talk() as speaker:
        assert speaker.send("start", model="toy", room="hall").receive_all() == []
    assert len(served.sessions._sessions) == before
    eventually(lambda: served.service.counters.total(Counted.STREAMS) == 0)


def test_a_session_is_counted_and_kept_while_its_room_is_opened(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(streams=1)
    opening, is_answered = served.service.rooms.open, threading.Event()

    async def open_late(*arguments: Any) -> Publisher:
        while not is_answered.is_set():
            await asyncio.sleep(0.01)
        return await opening(*arguments)

    monkeypatch.setattr(served.service.rooms, "open", open_late)
    with served.talk() as speaker, served.talk() as other:
        speaker.send("start", model="toy", room="hall")
        eventually(lambda: bool(served.sessions._sessions))
        error = other.send("start", model="toy").receive_error()
        is_answered.set()
        assert error == ("too_many_streams", 1013)
        assert speaker.receive()["type"] == "ready"
        speaker.send("source", text=TEXT).send("finish")
        assert speaker.receive_all()[-1] == {"type": "done"}


class LatePeers:
    """A second worker, home to all rooms, that refuses to open any, once it answers at all."""

    worker, has_answered = 0, threading.Event()

    def home(self, _: str) -> int:
        return 1

    @asynccontextmanager
    async def connect(self, *_: object) -> AsyncIterator[LatePeers]:
        yield self

    async def send(self, _: str) -> None:
        pass

    async def recv(self) -> str:
        while not self.has_answered.is_set():
            await asyncio.sleep(0.01)
        return write(Error(ErrorCode.ROOM_TAKEN, "another speaker has opened the room"))


def test_a_room_that_turns_out_to_be_taken_ends_the_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    monkeypatch.setattr(rooms, "OPENING_SECONDS", 0.01)
    monkeypatch.setattr(served.service.rooms, "_peers", LatePeers())
    with served.talk() as speaker:
        assert speaker.start(room="hall")["type"] == "ready"
        LatePeers.has_answered.set()
        assert speaker.receive_error() == ("room_taken", 1008)


def test_a_speech_that_is_started_again_is_not_repeated(served: Served, translator: Translator) -> None:
    with served.watch("hall") as viewer:
        with served.talk() as speaker:
            speaker.start(room="hall", room_key="a")
            speaker.send("source", text=TEXT[:100])
            speaker.receive()
        with served.talk() as speaker:
            speaker.start(room="hall", room_key="a")
            speaker.send("source", text=TEXT).send("finish")
            speaker.receive_all()
        messages = viewer.receive_until("closed")
    assert [message["type"] for message in messages[:2]] == ["waiting", "room"]
    commits = [message for message in messages if message["type"] == "commit"]
    assert [commit["seq"] for commit in commits] == list(range(1, len(commits) + 1))
    assert text_of(commits) == translator.translate(TEXT, 3)
    assert sum(message["type"] == "room" for message in messages) == 1


def test_a_room_closes_if_its_lost_speaker_does_not_reconnect(serve: Serve) -> None:
    served = serve(grace_seconds=0.1)
    with served.watch("hall") as viewer:
        with served.talk() as speaker:
            speaker.start(room="hall")
        assert [message["type"] for message in viewer.receive_until("closed")] == ["waiting", "room", "closed"]


def test_a_session_that_is_resumed_keeps_its_room(served: Served) -> None:
    with served.talk() as speaker:
        session = speaker.start(room="hall")["session"]
    with served.watch("hall") as viewer, served.talk() as speaker:
        assert viewer.receive()["type"] == "room"
        assert speaker.send("resume", session=session, seq=0).receive()["captions"] == "/captions/hall"
        speaker.send("finish").receive_all()
        assert viewer.receive()["type"] == "closed"


def test_viewers_need_a_key_if_the_server_requires_it(serve: Serve) -> None:
    served = serve(keys=ApiKeys(["sesame"]), room_keys=True)
    with served.watch("hall") as viewer:
        assert viewer.send("watch", api_key="sesame").receive() == {"type": "waiting", "room": "hall"}
    with served.watch("hall") as viewer:
        assert viewer.send("watch").receive_error() == ("unauthorized", 1008)
    with serve(keys=ApiKeys(["sesame"])).watch("hall") as viewer:
        assert viewer.receive() == {"type": "waiting", "room": "hall"}


def test_viewers_are_bounded_and_only_read(serve: Serve) -> None:
    served = serve(viewers=1, rooms=1)
    with served.watch("hall") as viewer:
        viewer.receive()
        with served.watch("hall") as second:
            assert second.receive_error() == ("too_many_streams", 1013)
        assert viewer.send("source", text="hello").receive_error() == ("out_of_order", 1008)
    for name in ("No_such_room", "hall%0A"):
        with served.watch(name) as viewer:
            assert viewer.receive_error() == ("bad_message", 1008)
    with served.talk() as first, served.talk() as second:
        first.start(room="one")
        assert second.send("start", model="toy", room="two").receive_error() == ("too_many_streams", 1013)


def test_viewers_that_come_after_the_end_read_it_for_some_time(serve: Serve) -> None:
    served = serve(kept_sentences=2)
    with served.talk() as speaker:
        speaker.start(room="hall", room_key="a")
        speaker.send("source", text=TEXT).send("finish")
        heard = speaker.receive_all()[:-1]
    with served.watch("hall") as viewer:
        messages = viewer.receive_until("closed")
        assert messages[0]["type"] == "room"
        assert messages[1:-1] == [message for message in heard if message["sentence"] >= heard[-1]["sentence"] - 2]
        assert viewer.receive()["type"] == "waiting"
        with served.talk() as speaker:
            speaker.start(room="hall", room_key="b")
            assert viewer.receive()["speech"] != messages[0]["speech"]


def test_a_speech_continued_after_its_end_is_not_repeated() -> None:
    log = RoomLog("hall", kept_sentences=2)
    speech = Room("hall", "toy", "a", "b", "1")
    for _ in range(2):
        log.begin(speech)
        log.put(Commit(1, 0, "a", 1, LagMs(0, 0, 0)))
        log.end()
    kinds = [type(parse_room(text)).__name__ for text in log.recent()]
    assert kinds == ["Room", "Commit", "Closed", "Waiting", "Room", "Closed", "Waiting"]


def test_a_speaker_gives_one_speech_after_another_with_the_same_key(served: Served) -> None:
    speeches = []
    with served.watch("hall") as viewer:
        assert viewer.receive()["type"] == "waiting"
        for text in SENTENCES[:3]:
            with served.talk() as speaker:
                speaker.start(room="hall", room_key="a")
                speaker.send("source", text=text).send("finish")
                heard = speaker.receive_all()
            room, *messages = viewer.receive_until("closed")
            assert messages[:-1] == heard[:-1]
            assert viewer.receive()["type"] == "waiting"
            speeches.append(room["speech"])
    assert len(set(speeches)) == 3


def test_a_speech_has_a_number_that_changes_only_after_a_complete_one() -> None:
    log = RoomLog("hall", kept_sentences=2)

    def begin(speech: str, is_complete: bool) -> str:
        room = log.numbered(Room("hall", "toy", "a", "b", speech))
        log.begin(room)
        log.end(is_complete)
        return room.speech

    assert begin("1", is_complete=False) == begin("1", is_complete=True) == "1.1"
    assert begin("1.1", is_complete=True) == "1.1"  # forwarded again
    assert begin("1", is_complete=True) == "1.2"
    assert begin("2", is_complete=True) == "2.1"


def test_rooms_leave_nothing_behind(serve: Serve) -> None:
    served = serve(kept_seconds=0.01)
    with served.watch("hall") as viewer, served.talk() as speaker:
        viewer.receive()
        speaker.start(room="hall")
        speaker.send("finish").receive_all()
    eventually(lambda: not served.service.rooms._logs and not served.service.rooms._owners)


def test_workers_publish_over_unix_sockets_only(served: Served) -> None:
    with pytest.raises(Exception, match="403"), served.talk("/internal/publish"):
        pass


def test_a_slow_viewer_is_disconnected() -> None:
    async def read() -> tuple[str, ErrorCode]:
        log = RoomLog("hall", kept_sentences=2)
        log.begin(Room("hall", "toy", "a", "b", "1"))
        reader = log.read()
        first = await anext(reader)
        for seq in range(1, KEPT_MESSAGES + 10):
            log.put(Commit(seq, 0, "a", 1, LagMs(0, 0, 0)))
        with pytest.raises(RefusedError) as caught:
            await anext(reader)
        return first, caught.value.code

    first, code = asyncio.run(read())
    assert isinstance(parse_room(first), Room)
    assert code is ErrorCode.SLOW_READER


def test_the_last_messages_reach_viewers_before_the_end() -> None:
    async def read() -> list[str]:
        log = RoomLog("hall", kept_sentences=2)
        log.begin(Room("hall", "toy", "a", "b", "1"))
        reader = log.read()
        await anext(reader)
        log.put(Commit(1, 0, "a", 1, LagMs(0, 0, 0)))
        log.put(Sentence(1, 0))
        log.put(Retract(0))
        log.end()
        log.begin(Room("hall", "toy", "a", "b", "2"))
        return [type(parse_room(await anext(reader))).__name__ for _ in range(6)]

    assert asyncio.run(read()) == ["Commit", "Sentence", "Retract", "Closed", "Waiting", "Room"]


def test_undo_starts_with_the_open_sentence_then_goes_back(served: Served, translator: Translator) -> None:
    first, second, third = SENTENCES[:3]
    opened = " ".join(third.split()[:3])
    with served.watch("hall") as viewer, served.talk() as speaker:
        speaker.start(room="hall", delay=1)
        speaker.send("source", text=first + second + opened).send("undo").send("undo").send("undo").send("undo")
        undone = [speaker.receive_until("undone")[-1] for _ in range(4)]
        assert [(each["sentence"], each["source"]) for each in undone] == [
            (2, opened),
            (1, second.strip()),
            (0, first.strip()),
            (None, ""),
        ]
        speaker.send("source", text=second).send("finish")
        rest = spoken(speaker.receive_all())
        assert {message["sentence"] for message in rest} == {3}
        assert text_of(rest).strip() == translator.translate(second.strip(), 1)
        messages = viewer.receive_until("closed")
    assert [message["sentence"] for message in messages if message["type"] == "retract"] == [2, 1, 0]
    assert 2 not in [message["sentence"] for message in messages if message["type"] == "sentence"]


@pytest.mark.parametrize("chunk", [3, 1000])
def test_undo_gives_the_same_commits_however_the_text_comes(served: Served, chunk: int) -> None:
    text = SENTENCES[0] + " ".join(SENTENCES[1].split()[:5])

    def commits(size: int) -> list[tuple[int, int, str]]:
        with served.talk() as talk:
            talk.start(delay=1)
            for start in range(0, len(text), size):
                talk.send("source", text=text[start : start + size])
            talk.send("undo").send("source", text=SENTENCES[2]).send("finish")
            return [(m["seq"], m["sentence"], m["text"]) for m in talk.receive_all() if m["type"] == "commit"]

    assert commits(chunk) == commits(7)


def test_a_viewer_of_a_stopped_server_is_disconnected(serve: Serve) -> None:
    served = serve()
    with served.watch("hall") as viewer:
        viewer.receive()
        served.stop()
        assert viewer.receive()["code"] == "draining"
        with pytest.raises(ConnectionClosed):
            viewer.receive()
