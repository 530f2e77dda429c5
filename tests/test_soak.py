"""A stream of a million words, at constant time per word and constant memory. Run with -m slow."""

from __future__ import annotations

import resource
import time
from itertools import islice

import pytest

import simulmt
from simulmt.data.synthetic import generate

WORDS = 1_000_000
TENTHS = 10
GROWTH_ALLOWED = 16 * 1024  # KiB, after the first tenth


@pytest.mark.slow
def test_a_million_words_through_one_stream() -> None:
    stream = simulmt.load("toy", threads=1).stream()
    words = (word for pair in generate(WORDS, reorder=0.0, seed=7) for word in pair.source.split())
    seconds, memory, written = [], [], 0
    for _ in range(TENTHS):
        begun = time.perf_counter()
        for word in islice(words, WORDS // TENTHS):
            written += len(stream.push(word + " "))
        seconds.append(time.perf_counter() - begun)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert written > WORDS / 4
    assert memory[-1] - memory[0] < GROWTH_ALLOWED
    # Not how fast it is, but that it gets no slower: the second half against the first.
    assert sum(seconds[TENTHS // 2 :]) < 1.5 * sum(seconds[: TENTHS // 2])
