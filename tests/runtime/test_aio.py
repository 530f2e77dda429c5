from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from simulmt.errors import StreamError
from simulmt.runtime.aio import AsyncTranslator
from simulmt.stream import Commit, Stream, Translator
from simulmt.text import Tokenizer
from tiny_models import facts, trained, translator

TEXTS = [
    "the old bridge over the river was closed.",
    "we waited at the station until the last train came",
    "河 and 大! the wind is getting colder",
    "",
    "nobody knows why. the clock runs backwards?",
]


@pytest.fixture(scope="module")
def model(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    network = trained("ctc", source_tokenizer, target_tokenizer)
    return translator(network, "ctc", "int8", tmp_path_factory.mktemp("bundles"))


class Counting(Translator):
    """Remembers how many streams each step advanced."""

    def __init__(self, model: Translator) -> None:
        super().__init__(model.bundle, threads=1)
        self.sizes: list[int] = []

    def step(self, streams: Sequence[Stream]) -> list[list[Commit]]:
        self.sizes.append(len(streams))
        return super().step(streams)


async def live(front: AsyncTranslator, text: str, delay: int) -> list[Commit]:
    stream = front.stream(delay)
    commits = []
    for character in text:
        commits += await stream.push(character)
    return commits + await stream.finish()


def test_streams_on_an_event_loop_write_what_they_write_alone(model: Translator) -> None:
    async def all_at_once() -> list[list[Commit]]:
        front = AsyncTranslator(model)
        return await asyncio.gather(*(live(front, text, 1 + index % 3) for index, text in enumerate(TEXTS)))

    found = asyncio.run(all_at_once())
    for index, (text, commits) in enumerate(zip(TEXTS, found, strict=True)):
        stream = model.stream(1 + index % 3)
        assert facts(commits) == facts(stream.push(text) + stream.finish())


def test_what_arrives_during_a_step_shares_the_next(model: Translator) -> None:
    counting = Counting(model)

    async def all_at_once() -> None:
        front = AsyncTranslator(counting)
        await asyncio.gather(*(front.stream(1).push("the old bridge ") for _ in range(5)))

    asyncio.run(all_at_once())
    assert max(counting.sizes) == 5


def test_calls_on_one_stream_are_taken_in_their_order(model: Translator) -> None:
    async def hasty() -> list[Commit]:
        stream = AsyncTranslator(model).stream(2)
        parts = await asyncio.gather(stream.push("the old "), stream.push("bridge "), stream.finish())
        return [commit for part in parts for commit in part]

    alone = model.stream(2)
    assert facts(asyncio.run(hasty())) == facts(alone.push("the old bridge ") + alone.finish())


def test_a_cancelled_call_does_not_disturb_the_others(model: Translator) -> None:
    async def one_leaves() -> list[Commit]:
        front = AsyncTranslator(model)
        leaving = asyncio.create_task(front.stream(1).push(" ".join(TEXTS)))
        staying = asyncio.create_task(live(front, TEXTS[0], 1))
        await asyncio.sleep(0)
        leaving.cancel()
        return await asyncio.wait_for(staying, timeout=60)

    alone = model.stream(1)
    assert facts(asyncio.run(one_leaves())) == facts(alone.push(TEXTS[0]) + alone.finish())


def test_an_error_reaches_whoever_waits(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sequence[Stream]) -> list[list[Commit]]:
        raise StreamError("out of order")

    async def push() -> None:
        await AsyncTranslator(model).stream(1).push("the old bridge ")

    monkeypatch.setattr(model, "step", fail)
    with pytest.raises(StreamError, match="out of order"):
        asyncio.run(push())


def test_a_finished_stream_refuses_more(model: Translator) -> None:
    async def too_late() -> None:
        stream = AsyncTranslator(model).stream(1)
        await stream.finish()
        await stream.push("more")

    with pytest.raises(StreamError, match="finished"):
        asyncio.run(too_late())


def test_the_delay_can_be_changed(model: Translator) -> None:
    async def slower() -> int | None:
        stream = AsyncTranslator(model).stream(1)
        await stream.set_delay(3)
        await stream.end_sentence()
        return stream.stream.delay

    assert asyncio.run(slower()) == 3
