from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Any

import pytest

from simulmt.errors import ConfigError, StreamError
from simulmt.runtime.aio import AsyncTranslator, Batch
from simulmt.runtime.decoding import Written
from simulmt.runtime.stream import Commit, Stream, StreamState, Translator
from tiny_models import facts

TEXTS = [
    "the old bridge over the river was closed.",
    "we waited at the station until the last train came",
    "河 and 大! the wind is getting colder",
    "",
    "nobody knows why. the clock runs backwards?",
]


class Watched(Translator):
    """Records which streams each step advanced."""

    def __init__(self, model: Translator) -> None:
        super().__init__(model.bundle, threads=1)
        self.steps: list[list[Stream]] = []

    def step(self, streams: Sequence[Stream]) -> None:
        self.steps.append(list(streams))
        time.sleep(0.005)  # long enough for others to come in
        super().step(streams)


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


def test_text_that_arrives_during_a_step_shares_the_next(model: Translator) -> None:
    watched = Watched(model)

    async def some_later() -> None:
        front = AsyncTranslator(watched)
        early = [asyncio.create_task(front.stream(1).push(9 * "the old bridge ")) for _ in range(2)]
        while not watched.steps:
            await asyncio.sleep(0)
        await asyncio.gather(*early, *(front.stream(1).push(9 * "the old bridge ") for _ in range(3)))

    asyncio.run(some_later())
    assert max(map(len, watched.steps)) == 5


def test_a_step_is_bounded_and_streams_take_turns(model: Translator) -> None:
    watched, sizes = Watched(model), list[int]()

    async def crowd() -> None:
        front = AsyncTranslator(watched, max_batch_size=3, on_step=sizes.append)
        await asyncio.gather(*(front.stream(1).push(20 * "the old bridge. ") for _ in range(7)))

    asyncio.run(crowd())
    assert sizes == [len(step) for step in watched.steps]
    assert max(sizes) == 3
    everyone = {stream for step in watched.steps for stream in step}
    for stream in everyone:
        turns = [number for number, step in enumerate(watched.steps) if stream in step]
        assert max(later - earlier for earlier, later in pairwise(turns)) <= 3  # 7 streams in threes


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_a_stream_is_not_used_while_it_is_computed(
    model: Translator, monkeypatch: pytest.MonkeyPatch, cancellations: int
) -> None:
    """Even if the caller of push is cancelled, once or repeatedly."""
    computing, given_up, touched = threading.Event(), threading.Event(), []
    step, accept = model.step, Stream.accept

    def slow(streams: Sequence[Stream]) -> None:
        computing.set()
        given_up.wait(60)
        step(streams)
        computing.clear()

    def watched(stream: Stream, text: str, arrived: float | None = None) -> None:
        touched.append(computing.is_set())
        accept(stream, text, arrived)

    async def impatient() -> list[Commit]:
        stream = AsyncTranslator(model).stream(1)
        first = asyncio.create_task(stream.push("the old "))
        await asyncio.to_thread(computing.wait)
        second = asyncio.create_task(stream.push("bridge "))
        for _ in range(cancellations):
            first.cancel()
            await asyncio.sleep(0.005)
        given_up.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second + await stream.finish()

    monkeypatch.setattr(model, "step", slow)
    monkeypatch.setattr(Stream, "accept", watched)
    commits = asyncio.run(impatient())
    monkeypatch.undo()
    assert touched == [False, False]
    alone = model.stream(1)
    assert facts(commits) == facts(alone.push("the old bridge ") + alone.finish())


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_cancelled_call_loses_nothing(model: Translator, monkeypatch: pytest.MonkeyPatch, is_computed: bool) -> None:
    """Each call is cancelled: in its second turn, before the step, or after the step and before its result."""
    take, calls, turns = AsyncTranslator._run, list[asyncio.Task[list[Commit]]](), list[int]()
    text = 9 * "the old bridge over the river. "

    async def leaving(front: AsyncTranslator, turn: Batch) -> None:
        turns.append(len(calls))
        is_second = turns.count(len(calls)) == 2
        if is_second and not is_computed:
            calls[-1].cancel()
        await take(front, turn)
        if is_second and is_computed:
            calls[-1].cancel()

    async def impatient() -> list[Commit]:
        stream = AsyncTranslator(model).stream(1)
        while not calls or calls[-1].cancelled():
            calls.append(asyncio.create_task(stream.push(text) if len(calls) < 2 else stream.finish()))
            await asyncio.wait(calls[-1:])
        return calls[-1].result()

    monkeypatch.setattr(AsyncTranslator, "_run", leaving)
    commits = asyncio.run(impatient())
    monkeypatch.undo()
    assert len(calls) > 3, "the end must be cancelled too"
    alone = model.stream(1)
    assert facts(commits) == facts(alone.push(text) + alone.push(text) + alone.finish())


def test_a_call_that_fails_loses_nothing(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, steps = model.decoder.advance, count(1)

    def faulty(sentences: Sequence[Any]) -> list[list[Written]]:
        if next(steps) % 3 == 0:
            raise RuntimeError("a fault of the engine")
        return advance(sentences)

    async def persistent(text: str) -> list[Commit]:
        stream, commits = AsyncTranslator(model).stream(1), list[Commit]()
        with pytest.raises(RuntimeError):
            await stream.push(text)
        while stream.stream.state is StreamState.OPEN or stream.stream.is_due:
            with suppress(RuntimeError):
                commits += await stream.finish()
        return commits

    text = 9 * "the old bridge over the river. "
    monkeypatch.setattr(model.decoder, "advance", faulty)
    commits = asyncio.run(persistent(text))
    monkeypatch.undo()
    alone = model.stream(1)
    assert facts(commits) == facts(alone.push(text) + alone.finish())


def test_calls_on_one_stream_are_served_in_order(model: Translator) -> None:
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


def test_an_error_reaches_the_caller(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sequence[Stream]) -> None:
        raise StreamError("out of order")

    async def push() -> None:
        await AsyncTranslator(model).stream(1).push("the old bridge ")

    monkeypatch.setattr(model, "step", fail)
    with pytest.raises(StreamError, match="out of order"):
        asyncio.run(push())


def test_only_the_faulty_stream_of_a_batch_fails(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    step, guilty = model.step, list[Stream]()

    def fail_with_the_guilty(streams: Sequence[Stream]) -> None:
        if set(guilty) & set(streams):
            raise RuntimeError("out of memory")
        step(streams)

    async def all_at_once() -> list[list[Commit] | BaseException]:
        front = AsyncTranslator(model)
        bad = front.stream(1)
        guilty.append(bad.stream)
        good = (live(front, text, 1 + index % 3) for index, text in enumerate(TEXTS))
        return await asyncio.gather(bad.push(TEXTS[0]), *good, return_exceptions=True)

    monkeypatch.setattr(model, "step", fail_with_the_guilty)
    failed, *found = asyncio.run(all_at_once())
    monkeypatch.undo()
    assert isinstance(failed, RuntimeError)
    for index, (text, commits) in enumerate(zip(TEXTS, found, strict=True)):
        assert isinstance(commits, list)
        stream = model.stream(1 + index % 3)
        assert facts(commits) == facts(stream.push(text) + stream.finish())


def test_an_error_in_on_step_does_not_stop_other_streams(model: Translator) -> None:
    told = []

    def fail_at_first(streams: int) -> None:
        told.append(streams)
        if len(told) == 1:
            raise RuntimeError("cannot be told")

    async def push_twice() -> list[Commit]:
        front = AsyncTranslator(model, on_step=fail_at_first)
        first = asyncio.create_task(front.stream(1).push(TEXTS[0]))
        await asyncio.wait([first], timeout=5)
        front._running.clear()  # what is in it could not be cancelled, and the test would not end
        with pytest.raises(RuntimeError, match="cannot be told"):
            await asyncio.wait_for(first, timeout=5)
        return await asyncio.wait_for(live(front, TEXTS[0], 1), timeout=10)

    alone = model.stream(1)
    assert facts(asyncio.run(push_twice())) == facts(alone.push(TEXTS[0]) + alone.finish())


def test_a_worker_that_was_cancelled_is_replaced(model: Translator) -> None:
    async def cancelled() -> list[Commit]:
        front = AsyncTranslator(model)
        lost = asyncio.create_task(front.stream(1).push(TEXTS[0]))
        while not front._running:
            await asyncio.sleep(0)
        assert front._worker is not None
        front._worker.cancel()
        await asyncio.gather(front._worker, return_exceptions=True)
        is_reset = front._worker is None and not front._running
        front._running.clear()  # what is in it could not be cancelled, and the test would not end
        lost.cancel()
        assert is_reset
        return await asyncio.wait_for(live(front, TEXTS[0], 1), timeout=10)

    alone = model.stream(1)
    assert facts(asyncio.run(cancelled())) == facts(alone.push(TEXTS[0]) + alone.finish())


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


def test_background_streams_leave_most_of_a_step_to_live_ones(model: Translator) -> None:
    async def run() -> list[tuple[int, int]]:
        front = AsyncTranslator(model, max_batch_size=8)
        live, background = ([model.stream(1) for _ in range(20)] for _ in range(2))
        for stream in live + background:
            stream.accept("kyo tsi myi za yok ")
        batches = []

        async def run_batch(batch: Batch) -> None:
            batches.append((len(batch.keys() & set(live)), len(batch.keys() & set(background))))
            for result in batch.values():
                result.set_result(None)

        front._run = run_batch  # type: ignore[method-assign]
        await asyncio.gather(
            *(front.advance(stream, background=True) for stream in background),
            *(front.advance(stream) for stream in live),
        )
        return batches

    assert asyncio.run(run()) == [(4, 4), (4, 4), (4, 4), (4, 4), (4, 4)]


def test_background_streams_have_the_whole_step_when_alone(model: Translator) -> None:
    async def run() -> list[int]:
        sizes: list[int] = []
        front = AsyncTranslator(model, max_batch_size=8, on_step=sizes.append)
        await asyncio.gather(*(front.stream(1, background=True).push("kyo tsi ") for _ in range(16)))
        return sizes

    assert asyncio.run(run())[:2] == [8, 8]


def test_inline_steps_give_the_same_text(model: Translator) -> None:
    async def run(inline: bool) -> list[str]:
        front = AsyncTranslator(model, inline=inline)
        streams = [front.stream(1) for _ in range(5)]
        commits = await asyncio.gather(*(stream.push("kyo tsi myi za yok jao. sho chai ") for stream in streams))
        commits += await asyncio.gather(*(stream.finish() for stream in streams))
        return ["".join(commit.text for commit in each) for each in commits]

    assert asyncio.run(run(inline=True)) == asyncio.run(run(inline=False))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_live_and_background_streams_progress_in_batches_of_any_size(model: Translator, size: int) -> None:
    async def run() -> list[str]:
        front = AsyncTranslator(model, max_batch_size=size)
        streams = [front.stream(1, background=number < 6) for number in range(8)]
        commits = await asyncio.gather(*(stream.push("kyo tsi myi za yok jao. ") for stream in streams))
        return ["".join(commit.text for commit in each) for each in commits]

    found = asyncio.run(asyncio.wait_for(run(), timeout=60))
    assert found == ["".join(commit.text for commit in model.stream(1).push("kyo tsi myi za yok jao. "))] * 8


def test_a_batch_needs_room_for_a_stream(model: Translator) -> None:
    with pytest.raises(ConfigError, match="max_batch_size must be at least 1, got 0"):
        AsyncTranslator(model, max_batch_size=0)
