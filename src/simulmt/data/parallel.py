"""Parallel map over chunks of lines."""

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
    """Yield each chunk of items with the result of `work`, in order.

    A single chunk is processed in this process, more are shared by several. `work` must be picklable.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, size)), [])
    head = list(islice(chunks, 2)) if processes > 1 else []
    if len(head) < 2:
        yield from ((chunk, work(chunk)) for chunk in chain(head, chunks))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), _init_worker, (work,)) as pool:
        pending: deque[tuple[list[T], Future[R]]] = deque()
        for chunk in chain(head, chunks):
            pending.append((chunk, pool.submit(_run_chunk, chunk)))
            if len(pending) > 2 * processes:  # bounds memory
                first, result = pending.popleft()
                yield first, result.result()
        yield from ((chunk, result.result()) for chunk, result in pending)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker_function: list[Callable[[Any], Any]] = []  # set once in each worker


def _init_worker(work: Callable[[Any], Any]) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_function[:] = [work]


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise this process would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_chunk(chunk: list[Any]) -> Any:
    return _worker_function[0](chunk)
