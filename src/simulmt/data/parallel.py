"""Work on the lines of a text in several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_chunks(
    work: Callable[[list[T]], R], items: Iterable[T], size: int, processes: int
) -> Iterator[tuple[list[T], R]]:
    """Yield chunks of items and what `work` makes of each, in order; several processes share more than one chunk.

    `work` must be picklable.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, size)), [])
    head = list(islice(chunks, 2)) if processes > 1 else []
    if len(head) < 2:
        yield from ((chunk, work(chunk)) for chunk in chain(head, chunks))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), _join_pool, (work,)) as pool:
        pending: deque[tuple[list[T], Future[R]]] = deque()
        for chunk in chain(head, chunks):
            pending.append((chunk, pool.submit(_do, chunk)))
            if len(pending) > 2 * processes:  # or the whole text would wait in memory
                first, result = pending.popleft()
                yield first, result.result()
        yield from ((chunk, result.result()) for chunk, result in pending)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_work: list[Callable[[Any], Any]] = []  # what a process of a pool does


def _join_pool(work: Callable[[Any], Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work[:] = [work]


def _end_with_parent() -> None:
    """Exit when the parent is killed; otherwise this process would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(chunk: list[Any]) -> Any:
    return _work[0](chunk)
