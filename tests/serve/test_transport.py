"""Token buckets, and the outbox compared with a list that keeps everything."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.serve.protocol import Commit, Done, LagMs, Sentence
from simulmt.serve.transport import Outbox, Output, Throttle

FULL, KEPT = 3, 5


def commit(seq: int) -> Commit:
    return Commit(seq, 0, "a", seq, LagMs(0, 0, 0))


async def taken(outbox: Outbox) -> list[Output]:
    """Take all available messages."""
    found: list[Output] = []
    while outbox._has_messages.is_set():
        await outbox.wait_for_message()
        message = outbox.take()
        if message is not None:
            found.append(message)
    return found


actions = st.lists(st.sampled_from(["commit", "commit", "commit", "sentence", "take", "rewind"]), max_size=40)


@settings(max_examples=200, deadline=None)
@given(actions, st.data())
def test_a_client_gets_every_commit_once_wherever_it_was_cut_off(kinds: list[str], data: st.DataObject) -> None:
    async def run() -> None:
        outbox, numbers = Outbox(FULL, KEPT), itertools.count(1)
        written: list[Output] = []
        seen = 0  # the last commit that the client has
        sent = 0  # messages that were taken, once or more often
        for kind in kinds:
            if kind == "commit":
                written.append(commit(next(numbers)))
                outbox.put(written[-1])
            elif kind == "sentence":
                written.append(Sentence(last_of(written), 0))
                outbox.put(written[-1])
            elif kind == "take":
                found = await taken(outbox)
                commits = [message.seq for message in found if isinstance(message, Commit)]
                assert commits == list(range(seen + 1, last_of(written) + 1))
                seen, sent = last_of(written), len(written)
            else:
                forgotten = last_of(written[: max(0, sent - KEPT)])
                wanted = data.draw(st.integers(0, last_of(written[:sent])))
                assert outbox.rewind(wanted) == (wanted >= forgotten)
                seen = max(wanted, forgotten)
                assert outbox.rewind(seen)

    asyncio.run(run())


def last_of(messages: list[Output]) -> int:
    return max((message.seq for message in messages if isinstance(message, Commit)), default=0)


def test_messages_sent_long_ago_cannot_be_replayed() -> None:
    async def run() -> None:
        outbox = Outbox(FULL, KEPT)
        for seq in range(1, 11):
            outbox.put(commit(seq))
        assert len(await taken(outbox)) == 10
        assert len(outbox._entries) == KEPT
        assert not outbox.rewind(4)
        assert outbox.rewind(5)
        assert await taken(outbox) == [commit(seq) for seq in range(6, 11)]

    asyncio.run(run())


def test_a_sentence_may_be_repeated_but_never_lost() -> None:
    async def run() -> None:
        outbox = Outbox(FULL, KEPT)
        for message in (commit(1), Sentence(1, 0), commit(2), Done()):
            outbox.put(message)
        await taken(outbox)
        outbox.rewind(1)
        assert await taken(outbox) == [Sentence(1, 0), commit(2), Done()]
        outbox.rewind(2)
        assert await taken(outbox) == [Done()]

    asyncio.run(run())


def test_a_client_can_be_ahead_of_a_restarted_session() -> None:
    async def run() -> None:
        outbox = Outbox(FULL, KEPT)
        assert outbox.rewind(3)
        for seq in range(1, 6):
            outbox.put(commit(seq))
        assert await taken(outbox) == [commit(4), commit(5)]

    asyncio.run(run())


def test_a_full_outbox_makes_the_writer_wait() -> None:
    async def run() -> None:
        outbox = Outbox(FULL, KEPT)
        for seq in (1, 2, 3):
            await outbox.wait_for_space()
            outbox.put(commit(seq))
        waiting = asyncio.create_task(outbox.wait_for_space())
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.take()
        await asyncio.wait_for(waiting, timeout=180)

    asyncio.run(run())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 10)), max_size=30))
def test_rate_and_burst_are_limited(requests: list[tuple[int, float]]) -> None:
    clock = Clock()
    throttle = Throttle(rate=10, burst=100, clock=clock)
    taken = 0
    for characters, pause in requests:
        clock.now += pause + throttle.take(characters)
        taken += characters
        assert taken <= 100 + 10 * clock.now + 1e-6


def test_a_burst_is_not_throttled_and_refills() -> None:
    clock = Clock()
    throttle = Throttle(rate=10, burst=100, clock=clock)
    assert throttle.take(100) == 0
    assert throttle.take(5) == pytest.approx(0.5)
    clock.now = 1_000.0
    assert throttle.take(100) == 0
