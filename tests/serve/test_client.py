from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import InvalidURI

from simulmt.runtime.stream import Stream, Translator
from simulmt.serve import client
from simulmt.serve.client import LiveTranslation
from simulmt.serve.protocol import Commit, Delay, End, ErrorCode, Finish, Input, RefusedError, Sentence, Source, Undone

from .helpers import PATIENCE, Served, free_port, synthetic_text

TEXT = synthetic_text(sentences=3, seed=31)
Serve = Callable[..., Served]


async def translation(live: LiveTranslation, text: str) -> str:
    live.source(text)
    live.finish()
    return "".join([message.text async for message in live if isinstance(message, Commit)])


def test_the_client_yields_commits_and_sentence_ends(served: Served, translator: Translator) -> None:
    async def run() -> list[Commit | Sentence | Undone]:
        async with LiveTranslation(served.url, "toy", 1) as live:
            live.source(TEXT)
            live.delay(5)
            live.end()
            live.finish()
            return [message async for message in live]

    messages = asyncio.run(run())
    text = "".join(message.text for message in messages if isinstance(message, Commit))
    assert text == translator.translate(TEXT, 1)
    assert sum(isinstance(message, Sentence) for message in messages) == 3


def test_an_error_without_a_remedy_is_raised(served: Served) -> None:
    async def run() -> None:
        async with LiveTranslation(served.url, "no-such-model") as live:
            await translation(live, TEXT)

    with pytest.raises(RefusedError, match="no-such-model") as caught:
        asyncio.run(run())
    assert caught.value.code is ErrorCode.UNKNOWN_MODEL


def test_an_invalid_address_is_raised() -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE), LiveTranslation("http://127.0.0.1", "toy") as live:
            await translation(live, TEXT)

    with pytest.raises(InvalidURI):
        asyncio.run(run())


def test_a_text_that_cannot_be_sent_is_raised(served: Served) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE), LiveTranslation(served.url, "toy") as live:
            await translation(live, "half a character: \ud83d")

    with pytest.raises(UnicodeEncodeError):
        asyncio.run(run())


def test_patience_with_a_server_that_always_fails_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    attempts = []

    def fail(streams: Sequence[Stream]) -> None:
        attempts.append(streams)
        raise RuntimeError

    model = served.server.config.app.state.service.models["toy"]  # type: ignore[union-attr]
    monkeypatch.setattr(model.translator, "step", fail)

    async def run() -> None:
        async with asyncio.timeout(PATIENCE), LiveTranslation(served.url, "toy", reconnect_timeout=0.3) as live:
            await translation(live, TEXT)

    with pytest.raises(RefusedError) as caught:
        asyncio.run(run())
    assert caught.value.code is ErrorCode.INTERNAL
    assert len(attempts) > 1


def test_patience_ends() -> None:
    async def run() -> None:
        async with LiveTranslation(f"ws://127.0.0.1:{free_port()}/v1/stream", "toy", reconnect_timeout=0.1) as live:
            await translation(live, TEXT)

    with pytest.raises(OSError, match="Connect"):
        asyncio.run(run())


def test_it_retries_on_a_full_server(serve: Serve, translator: Translator) -> None:
    served = serve(streams=1)

    async def run() -> str:
        async with LiveTranslation(served.url, "toy") as first:
            first.source("kyo ")
            while not served.sessions._sessions:
                await asyncio.sleep(0.01)
            async with LiveTranslation(served.url, "toy") as second:
                waiting = asyncio.create_task(translation(second, TEXT))
                await asyncio.sleep(0.2)
                assert not waiting.done()
                await translation(first, "tsi")
                return await waiting

    assert asyncio.run(run()) == translator.translate(TEXT, translator.config.default_delay)


def test_after_an_idle_timeout_it_reconnects_with_the_next_message(serve: Serve, translator: Translator) -> None:
    served = serve(idle_seconds=0.1, grace_seconds=0.1)

    async def run() -> str:
        async with LiveTranslation(served.url, "toy") as live:
            live.source(TEXT)
            idle = served.service.metrics.errors.labels(ErrorCode.IDLE)
            while not idle._value.get() or served.sessions._sessions:  # until even the session is forgotten
                await asyncio.sleep(0.01)
            return await translation(live, f" {TEXT}")

    assert asyncio.run(run()) == translator.translate(f"{TEXT} {TEXT}", translator.config.default_delay)


@pytest.mark.parametrize("grace_seconds", [60.0, 0.1], ids=["resumed", "started again"])
def test_after_a_reconnection_no_reply_to_undo_is_repeated(serve: Serve, grace_seconds: float) -> None:
    served = serve(idle_seconds=0.1, grace_seconds=grace_seconds)

    async def run() -> list[Commit | Sentence | Undone]:
        async with asyncio.timeout(PATIENCE), LiveTranslation(served.url, "toy") as live:
            live.undo()
            live.undo()
            live.source("kyo")
            live.undo()
            live.undo()
            idle = served.service.metrics.errors.labels(ErrorCode.IDLE)
            while not idle._value.get() or (grace_seconds < 1 and served.sessions._sessions):
                await asyncio.sleep(0.01)
            live.undo()
            live.finish()
            return [message async for message in live]

    assert asyncio.run(run()) == 2 * [Undone(None, "")] + [Undone(0, "kyo")] + 2 * [Undone(None, "")]


def test_the_end_of_an_empty_sentence_is_reported() -> None:
    async def run() -> list[Commit | Sentence | Undone]:
        live = LiveTranslation("ws://127.0.0.1", "toy")
        for end in (Sentence(0, 0), Sentence(0, 1), Sentence(0, 0), Sentence(3, 2)):
            await live._deliver(end)
        return [live._output.get_nowait() for _ in range(live._output.qsize())]  # type: ignore[misc]

    assert asyncio.run(run()) == [Sentence(0, 0), Sentence(0, 1), Sentence(3, 2)]


inputs = st.one_of(st.builds(Source, st.text("ab ", max_size=9)), st.just(End()), st.just(Delay(3)), st.just(Finish()))


@settings(max_examples=100, deadline=None)
@given(st.lists(inputs))
def test_joining_texts_keeps_all_other_messages(messages: list[Input]) -> None:
    joined = list(client._join_texts(messages))
    assert _spelt_out(joined) == _spelt_out(messages)
    assert all(len(message.text) <= client.MAX_SOURCE_LENGTH for message in joined if isinstance(message, Source))
    assert not any(isinstance(one, Source) and isinstance(two, Source) for one, two in pairwise(joined))


def _spelt_out(messages: list[Input]) -> list[Input | str]:
    return [part for message in messages for part in (list(message.text) if isinstance(message, Source) else [message])]
