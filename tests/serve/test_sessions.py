"""Eviction of sessions, which must leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from simulmt.serve.access import Counters, Limits
from simulmt.serve.models import Metrics, load_models
from simulmt.serve.protocol import RefusedError, Remedy, Source
from simulmt.serve.sessions import Session, Sessions

STREAMS, ROUNDS = 4, 20


def test_evicted_sessions_hold_no_memory() -> None:
    async def churn() -> tuple[int, int]:
        metrics = Metrics()
        model = load_models(["toy"], metrics, threads=1, inline=False)["toy"]
        sessions = Sessions(Limits(streams=STREAMS), metrics, Counters())
        seen: weakref.WeakSet[Session] = weakref.WeakSet()
        gc.freeze()  # else every collection goes through all that the test process has loaded
        for _ in range(ROUNDS):
            await leave_half_way(sessions, sessions.open(model, 3, "127.0.0.1"), seen)
            gc.collect()
        rows = sum(pool.block.shape[1] for pool in model.translator.decoder.caches.pools.values())
        gc.unfreeze()
        sessions.close()
        return len(seen), rows

    async def leave_half_way(sessions: Sessions, session: Session, seen: weakref.WeakSet[Session]) -> None:
        seen.add(session)
        attachment = sessions.attach(session)
        await session.receive(Source("kyo tsi myi za yok "), attachment)
        await session.outbox.wait_for_message()  # so it takes up a row of caches
        sessions.detach(session, attachment, Remedy.RESUME)

    alive, rows = asyncio.run(churn())
    assert alive == STREAMS
    assert rows <= 2 * STREAMS


def test_a_refused_start_evicts_no_session() -> None:
    async def refuse() -> None:
        metrics = Metrics()
        model = load_models(["toy"], metrics, threads=1, inline=False)["toy"]
        sessions = Sessions(Limits(streams=1), metrics, Counters())
        waiting = sessions.open(model, 3, "127.0.0.1")
        with pytest.raises(RefusedError, match="delay 2"):
            sessions.open(model, 2, "127.0.0.1")
        assert sessions.find(waiting.name, 0) is waiting
        sessions.close()

    asyncio.run(refuse())
