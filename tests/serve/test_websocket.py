"""Every message and every error of the WebSocket, as seen by a plain JSON client."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus

from simulmt.runtime.decoding import POSITIONS
from simulmt.runtime.stream import Translator
from simulmt.serve import access
from simulmt.serve.access import ApiKeys, Limits
from simulmt.serve.app import Settings, create_app
from simulmt.serve.websocket import StreamConnection

from .helpers import Served, eventually, frame, raw_websocket, received, synthetic_text, text_of

TEXT = synthetic_text(sentences=4, seed=11)
Serve = Callable[..., Served]


def test_a_stream_from_start_to_done(served: Served, translator: Translator) -> None:
    with served.talk() as talk:
        ready = talk.start(delay=1)
        for word in TEXT.split():
            talk.send("source", text=f"{word} ")
        talk.send("finish")
        messages = talk.receive_all()
    assert {**ready, "session": ""} == {"type": "ready", "session": "", "model": "toy", "delay": 1, "received": 0}
    assert talk.socket.close_code == 1000
    assert messages[-1] == {"type": "done"}
    commits = [message for message in messages if message["type"] == "commit"]
    assert [commit["seq"] for commit in commits] == list(range(1, len(commits) + 1))
    assert text_of(messages) == translator.translate(TEXT, delay=1)
    assert commits[-1]["source_words"] == len(TEXT.split())
    assert all(set(commit["lag_ms"]) == {"policy", "queue", "compute"} for commit in commits)
    assert all(value >= 0 for commit in commits for value in commit["lag_ms"].values())


def test_a_sentence_is_reported_behind_its_last_commit(served: Served) -> None:
    with served.talk() as talk:
        talk.start()
        talk.send("source", text=TEXT).send("finish")
        messages = talk.receive_all()
    ends = [index for index, message in enumerate(messages) if message["type"] == "sentence"]
    assert len(ends) == 4
    for index in ends:
        assert messages[index - 1]["type"] == "commit"
        assert messages[index]["seq"] == messages[index - 1]["seq"]


def test_end_and_delay_do_what_the_runtime_does(served: Served, translator: Translator) -> None:
    first, second = "kyo tsi myi za", "yok jao sho chai yo"
    stream = translator.stream(5)
    commits = stream.push(first) + stream.end_sentence()
    stream.set_delay(1)
    commits += stream.push(second) + stream.finish()
    with served.talk() as talk:
        talk.start(delay=5)
        talk.send("source", text=first).send("end").send("delay", k=1).send("source", text=second).send("finish")
        messages = talk.receive_all()
    found = [(each["seq"], each["text"], each["source_words"]) for each in messages if each["type"] == "commit"]
    assert found == [(commit.seq, commit.text, commit.source_words) for commit in commits]


def test_a_commit_comes_while_the_sentence_is_open(served: Served) -> None:
    with served.talk() as talk:
        talk.start(delay=1)
        talk.send("source", text="kyo tsi myi za yok ")
        assert talk.receive()["type"] == "commit"


def test_the_model_chooses_the_delay_if_the_client_does_not(served: Served) -> None:
    with served.talk() as talk:
        assert talk.start(delay=None)["delay"] == 3


@pytest.mark.parametrize("lost_after", [0, 1, 7])
def test_a_lost_connection_is_resumed(served: Served, translator: Translator, lost_after: int) -> None:
    words = [f"{word} " for word in TEXT.split()]
    with served.talk() as talk:
        session = talk.start()["session"]
        for word in words[:40]:
            talk.send("source", text=word)
        seen = [message for message in (talk.receive() for _ in range(lost_after)) if message["type"] == "commit"]
        talk.socket.socket.shutdown(socket.SHUT_RDWR)
    with served.talk() as talk:
        seq = seen[-1]["seq"] if seen else 0
        ready = talk.send("resume", session=session, seq=seq).receive()
        assert ready["session"] == session
        assert 0 <= ready["received"] <= 40
        for word in words[ready["received"] :]:
            talk.send("source", text=word)
        talk.send("finish")
        rest = talk.receive_all()
    commits = seen + [message for message in rest if message["type"] == "commit"]
    assert [commit["seq"] for commit in commits] == list(range(1, len(commits) + 1))
    assert text_of(commits) == translator.translate(TEXT, 3)
    assert sum(message["type"] == "done" for message in rest) == 1


def test_done_can_be_fetched_by_a_client_that_missed_it(served: Served) -> None:
    with served.talk() as talk:
        session = talk.start()["session"]
        talk.send("source", text=TEXT).send("finish")
        last = [message for message in talk.receive_all() if message["type"] == "commit"][-1]["seq"]
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=last).receive()["received"] == 2
        assert [message["type"] for message in talk.receive_all()] == ["sentence", "done"]


def test_a_connection_that_resumes_takes_over(served: Served) -> None:
    with served.talk() as old, served.talk() as new:
        session = old.start()["session"]
        assert new.send("resume", session=session, seq=0).receive()["type"] == "ready"
        assert old.receive_error() == ("taken_over", 1008)
        new.send("finish")
        assert new.receive_all()[-1] == {"type": "done"}


def test_connections_that_take_over_in_quick_succession_lose_nothing(served: Served, translator: Translator) -> None:
    text = " ".join([TEXT] * 20)
    with ExitStack() as stack:
        talk = stack.enter_context(served.talk())
        session = talk.start()["session"]
        talk.send("source", text=text).send("finish")
        commits: list[dict[str, Any]] = []
        earlier = []
        for _ in range(4):
            commits += [message for message in (talk.receive() for _ in range(5)) if message["type"] == "commit"]
            earlier.append(talk)
            talk = stack.enter_context(served.talk())
            assert talk.send("resume", session=session, seq=commits[-1]["seq"]).receive()["type"] == "ready"
        commits += [message for message in talk.receive_all() if message["type"] == "commit"]
        assert {each.receive_error() for each in earlier} == {("taken_over", 1008)}
    assert [commit["seq"] for commit in commits] == list(range(1, len(commits) + 1))
    assert text_of(commits) == translator.translate(text, 3)


def test_after_an_unknown_session_the_client_can_start_on_the_same_connection(served: Served) -> None:
    with served.talk() as talk:
        error = talk.send("resume", session="nobody", seq=3).receive()
        assert (error["type"], error["code"]) == ("error", "unknown_session")
        assert talk.start()["type"] == "ready"


def test_a_second_unknown_session_ends_the_connection(served: Served) -> None:
    with served.talk() as talk:
        talk.send("resume", session="nobody", seq=0).receive()
        assert talk.send("resume", session="nobody", seq=0).receive_error() == ("unknown_session", 1008)


def test_a_session_is_forgotten_after_the_grace_period(serve: Serve) -> None:
    served = serve(grace_seconds=0.05)
    with served.talk() as talk:
        session = talk.start()["session"]
    eventually(lambda: session not in served.sessions._sessions)
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=0).receive()["code"] == "unknown_session"


def test_a_resumed_session_outlives_the_grace_period(serve: Serve) -> None:
    served = serve()
    with served.talk() as talk:
        session = talk.start()["session"]
    with served.talk() as talk:
        talk.send("resume", session=session, seq=0).receive()
        assert served.sessions._sessions[session].expiry.cancelled()
        talk.send("finish")
        assert talk.receive_all()[-1] == {"type": "done"}


def test_commits_that_are_no_longer_kept_cannot_be_resumed(serve: Serve) -> None:
    served = serve(kept_messages=5)
    with served.talk() as talk:
        session = talk.start()["session"]
        talk.send("source", text=TEXT).send("finish")
        messages = talk.receive_all()
    last = max(message["seq"] for message in messages if message["type"] == "commit")
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=1).receive()["code"] == "unknown_session"
        assert talk.send("resume", session=session, seq=last - 1).receive()["type"] == "ready"
        assert [message["type"] for message in talk.receive_all()] == ["commit", "sentence", "done"]


BAD_MESSAGES: list[Any] = [
    "",
    "{",
    "[]",
    "null",
    '"start"',
    "[" * 20_000,
    "{}",
    '{"type": "begin"}',
    '{"type": ["start"]}',
    '{"type": "source"}',
    '{"type": "source", "text": 5}',
    '{"type": "source", "text": "a", "txt": "b"}',
    '{"type": "delay", "k": 0}',
    '{"type": "delay", "k": 1.5}',
    '{"type": "delay", "k": true}',
    '{"type": "end", "\\ud800": 1}',
    b"\x00\x01",
    b'{"type": "finish"}',
]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=lambda message: repr(message[:40]))
def test_an_invalid_message_ends_only_the_stream_that_sent_it(served: Served, message: str | bytes) -> None:
    with served.talk() as bystander, served.talk() as talk:
        bystander.start()
        session = talk.start()["session"]
        talk.socket.send(message)
        assert talk.receive_error() == ("bad_message", 1008)
        with served.talk() as again:
            assert again.send("resume", session=session, seq=0).receive()["code"] == "unknown_session"
        bystander.send("source", text="kyo tsi myi.").send("finish")
        assert bystander.receive_all()[-1] == {"type": "done"}


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=lambda message: repr(message[:40]))
def test_an_invalid_first_message_is_refused(served: Served, message: str | bytes) -> None:
    with served.talk() as talk:
        talk.socket.send(message)
        assert talk.receive_error() == ("bad_message", 1008)


def test_invalid_utf8_closes_the_connection(served: Served) -> None:
    with served.talk() as talk:
        talk.start()
        talk.socket.send(b"\xff\xfe", text=True)
        assert talk.receive_error() == ("bad_message", 1007)


@pytest.mark.parametrize("kind", ["source", "delay", "end", "finish"])
def test_a_stream_begins_with_start_or_resume(served: Served, kind: str) -> None:
    fields: dict[str, dict[str, Any]] = {"source": {"text": "a"}, "delay": {"k": 1}}
    with served.talk() as talk:
        assert talk.send(kind, **fields.get(kind, {})).receive_error() == ("out_of_order", 1008)


def test_a_connection_has_one_session(served: Served) -> None:
    with served.talk() as talk:
        talk.start()
        assert talk.send("start", model="toy").receive_error() == ("out_of_order", 1008)


def test_nothing_follows_finish(served: Served) -> None:
    long, more = ({"type": "source", "text": text} for text in (20 * TEXT, "more "))
    messages = ({"type": "start", "model": "toy"}, long, {"type": "finish"}, more)
    with raw_websocket(served) as client:
        client.sendall(b"".join(frame(json.dumps(message).encode()) for message in messages))  # before it is done
        error = b'"code":"out_of_order"'
        assert error in received(client, until=error)


def test_an_unknown_model_is_refused(served: Served) -> None:
    with served.talk() as talk:
        assert talk.send("start", model="nobody").receive_error() == ("unknown_model", 1008)


@pytest.mark.parametrize("delay", [2, 4, 10**30])
def test_a_delay_that_was_not_trained_is_refused(served: Served, delay: int) -> None:
    with served.talk() as talk:
        assert talk.send("start", model="toy", delay=delay).receive_error() == ("bad_delay", 1008)
    with served.talk() as talk:
        talk.start()
        assert talk.send("delay", k=delay).receive_error() == ("bad_delay", 1008)


def test_a_long_message_is_refused_and_so_is_a_huge_one_that_is_not_even_kept(serve: Serve) -> None:
    served = serve(message_bytes=1_000)
    with served.talk() as talk:
        talk.start()
        assert talk.send("source", text="a" * 1_000).receive_error() == ("too_big", 1009)
    with served.talk() as talk:
        talk.start()
        assert talk.send("source", text="a" * 10_000_000).receive_error() == ("too_big", 1009)
    with served.talk() as talk:
        assert talk.start()["type"] == "ready"


def test_api_keys(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FIRST_PENALTY", 0.01)
    served = serve(keys=ApiKeys(["first key", "second"]))
    for wrong in ({}, {"api_key": "third"}, {"api_key": ""}):
        with served.talk() as talk:
            assert talk.send("start", model="toy", **wrong).receive_error() == ("unauthorized", 1008)
    with served.talk() as talk:
        session = talk.start(api_key="second")["session"]
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=0).receive_error() == ("unauthorized", 1008)
    with served.talk(additional_headers={"Authorization": "Bearer first key"}) as talk:
        assert talk.start()["type"] == "ready"


def test_pages_of_other_origins_are_refused(serve: Serve) -> None:
    served = serve(origins=("https://friend.example/",))
    for origin in (None, served.http, "https://friend.example"):
        with served.talk(origin=origin) as talk:
            assert talk.start()["type"] == "ready"
    for origin in ("https://stranger.example", "null", f"http://localhost:{served.port}", "https://friend.example:1"):
        with pytest.raises(InvalidStatus, match="403"), served.talk(origin=origin):
            pass


def test_streams_are_limited_and_a_place_comes_free(serve: Serve) -> None:
    served = serve(streams=2)
    with served.talk() as first, served.talk() as second:
        first.start()
        second.start()
        with served.talk() as third:
            assert third.send("start", model="toy").receive_error() == ("too_many_streams", 1013)
        first.socket.close()
        eventually(lambda: len(served.sessions._attached()) == 1)
        with served.talk() as third:
            assert third.start()["type"] == "ready"


def test_streams_of_one_address_are_limited(serve: Serve) -> None:
    served = serve(streams_per_address=1)
    with served.talk() as first, served.talk() as second:
        first.start()
        error = second.send("start", model="toy").receive()
        assert error["code"] == "too_many_streams"
        assert "address" in error["message"]


def test_an_idle_connection_is_closed_before_its_session(serve: Serve) -> None:
    served = serve(idle_seconds=0.1)
    with served.talk() as talk:
        session = talk.start()["session"]
        assert talk.receive_error() == ("idle", 1008)
    with served.talk() as talk:
        assert talk.send("resume", session=session, seq=0).receive()["type"] == "ready"


def test_a_silent_connection_is_closed(serve: Serve) -> None:
    with serve(opening_seconds=0.1).talk() as talk:
        assert talk.receive_error() == ("idle", 1008)


def test_a_session_has_a_maximum_duration(serve: Serve) -> None:
    with serve(session_seconds=0.2).talk() as talk:
        session = talk.start()
        assert session["type"] == "ready"
        assert talk.receive_error() == ("too_long", 1008)


def test_text_above_the_rate_limit_waits_and_is_translated(serve: Serve, translator: Translator) -> None:
    text = TEXT[:200]
    served = serve(characters_per_second=1_000, burst_characters=10)
    begun = time.monotonic()
    with served.talk() as talk:
        talk.start()
        for start in range(0, len(text), 50):
            talk.send("source", text=text[start : start + 50])
        talk.send("finish")
        messages = talk.receive_all()
    assert text_of(messages) == translator.translate(text, 3)
    assert time.monotonic() - begun > 0.15  # the limit is a lower bound on time, whatever the machine


def test_a_client_that_reads_nothing_is_disconnected_and_frees_its_memory(serve: Serve) -> None:
    served = serve(sending_seconds=0.3, unsent_messages=8, unread_characters=20_000)
    flood = frame(json.dumps({"type": "source", "text": 50 * TEXT}).encode())
    with raw_websocket(served, receive_buffer=4096) as client:
        client.sendall(frame(b'{"type": "start", "model": "toy"}'))
        eventually(lambda: len(served.sessions._attached()) == 1)
        (session,) = served.sessions._attached()
        client.settimeout(0.1)
        while served.sessions._attached():
            with suppress(OSError):  # nobody takes it any more
                client.sendall(flood)
    assert len(session.outbox._entries) - session.outbox._sent <= 8 + POSITIONS
    assert sum(session._budget(each.message)[1] for each in session._inbox._queue) <= 20_000 + len(flood)


class Deaf:
    """A WebSocket whose client sends invalid messages and reads nothing."""

    headers = Headers()
    client = None
    code: int | None = None

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, str]:
        return {"type": "websocket.receive", "text": "nonsense"}

    async def send_text(self, _: str) -> None:
        await asyncio.Event().wait()

    async def close(self, code: int) -> None:
        self.code = code


def test_a_client_that_does_not_read_the_error_is_still_disconnected() -> None:
    settings = Settings(("toy",), limits=Limits(sending_seconds=0.01), threads=1)
    client, service = Deaf(), create_app(settings).state.service
    asyncio.run(StreamConnection(client, service).run())  # type: ignore[arg-type]
    assert client.code == 1008


def test_a_client_that_claims_too_many_commits_still_gets_done(served: Served) -> None:
    with served.talk() as talk:
        session = talk.start()["session"]
        talk.send("source", text=TEXT)
    with served.talk() as talk:
        ready = talk.send("resume", session=session, seq=10**9).receive()
        assert ready["type"] == "ready"
        if ready["received"] == 0:
            talk.send("source", text=TEXT)
        talk.send("finish")
        assert talk.receive_all() == [{"type": "done"}]


def test_half_open_connections_are_noticed(serve: Serve) -> None:
    served = serve(ping_seconds=0.5)
    with raw_websocket(served) as client:  # it never answers a ping
        client.sendall(frame(b'{"type": "start", "model": "toy"}'))
        answer = received(client)
    assert b'"type":"ready"' in answer
    assert b'"code":"unresponsive"' in answer
    eventually(lambda: len(served.sessions._attached()) == 0)
