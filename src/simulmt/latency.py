"""Latency: how far a translation lags behind its source, as pure functions.

`delays` holds, for each target unit (a word, or a character where the target has no spaces), the number of
source words that were read when it was written. The definitions and their corner cases are those of
SimulEval 1.1.4 for text, but for two. The average proportion divides by the length of the hypothesis, as
it was defined, so that it stays within 0 and 1. And an empty hypothesis, which SimulEval leaves out of its
means, counts as one unit written when the whole source was read: silence must not pass for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from simulmt.errors import DataError


def average_lagging(delays: Sequence[int], source_length: int, reference_length: int) -> float:
    """AL: source words behind an ideal interpreter who writes the reference at the pace of the source.

    The mean runs up to and including the first unit written with the whole source read.
    """
    delays = _checked(delays, source_length)
    _require_length("reference_length", reference_length)
    return _lagging(delays, source_length, reference_length)


def length_adaptive_average_lagging(delays: Sequence[int], source_length: int, reference_length: int) -> float:
    """LAAL: average lagging that does not reward a hypothesis for being longer than the reference."""
    delays = _checked(delays, source_length)
    _require_length("reference_length", reference_length)
    return _lagging(delays, source_length, max(len(delays), reference_length))


def differentiable_average_lagging(delays: Sequence[int], source_length: int) -> float:
    """DAL: the mean lag over all units, if writing one takes the time it takes to hear its share of the source."""
    delays = _checked(delays, source_length)
    pace = source_length / len(delays)
    paced = accumulate(delays, lambda before, delay: max(delay, before + pace))
    return sum(written - unit * pace for unit, written in enumerate(paced)) / len(delays)


def average_proportion(delays: Sequence[int], source_length: int) -> float:
    """AP: the share of the source that was read when a unit was written, averaged over the units."""
    delays = _checked(delays, source_length)
    return sum(delays) / (source_length * len(delays))


def start_offset(delays: Sequence[int], source_length: int) -> int:
    """Source words read when the first unit was written."""
    return _checked(delays, source_length)[0]


def end_offset(delays: Sequence[int], source_length: int) -> int:
    """Source words read when the last unit was written, less all of them: 0, or negative if it came early."""
    return _checked(delays, source_length)[-1] - source_length


def average_lagging_computation_aware(
    elapsed_ms: Sequence[float], source_length: int, reference_length: int, source_duration_ms: float = 1.0
) -> float:
    """AL-CA in milliseconds: average lagging over the time at which each unit was written.

    `elapsed_ms` counts from the start of the sentence; every source word lasts `source_duration_ms`, and the
    mean runs up to and including the first unit written at or after the end of the source. With the
    customary duration of 1 ms nearly every unit comes after that end, so the figure is little more than the
    time to the first unit; `paced_lags` tells what a listener would notice.
    """
    _require_length("source_length", source_length)
    _require_length("reference_length", reference_length)
    if source_duration_ms <= 0:
        raise DataError(f"source_duration_ms = {source_duration_ms}: expected a duration above 0")
    duration = source_length * source_duration_ms
    elapsed_ms = elapsed_ms if len(elapsed_ms) else [duration]
    _require_ascending("elapsed_ms", elapsed_ms)
    return _lagging(elapsed_ms, duration, reference_length)


@dataclass(frozen=True)
class PacedLag:
    """Why a target unit was late, in seconds: the policy waited for words, work queued up, work was done."""

    waiting: float
    queueing: float
    computing: float

    @property
    def total(self) -> float:
        """Seconds behind an ideal interpreter."""
        return self.waiting + self.queueing + self.computing


def paced_lags(
    delays: Sequence[int],
    compute_seconds: Sequence[float],
    reference_length: int,
    words_per_second: float = 2.5,
) -> list[PacedLag]:
    """The lag of each target unit if the source were spoken at a steady rate.

    `compute_seconds` holds the time that each source word costs once it is heard; words are worked on in turn,
    so that a slow one delays those after it. The ideal interpreter is that of LAAL: `waiting` is what LAAL
    averages, in seconds, and may be negative where the translation runs ahead.
    """
    source_length = len(compute_seconds)
    _checked(delays, source_length)
    _require_length("reference_length", reference_length)
    if words_per_second <= 0:
        raise DataError(f"words_per_second = {words_per_second}: expected a rate above 0")
    if any(cost < 0 for cost in compute_seconds):
        raise DataError("compute_seconds: a word cannot cost less than 0 seconds")
    pace = source_length / max(len(delays), reference_length)
    queueing = [0.0, *_queueing_times(compute_seconds, words_per_second)]
    computing = [0.0, *compute_seconds]
    return [
        PacedLag((delay - unit * pace) / words_per_second, queueing[delay], computing[delay])
        for unit, delay in enumerate(delays)
    ]


def character_delays(units: Sequence[str], delays: Sequence[int]) -> list[int]:
    """One delay per character, spaces not counted: for targets that are written without spaces."""
    if len(units) != len(delays):
        raise DataError(f"{len(units)} target units but {len(delays)} delays: expected one delay a unit")
    return [delay for unit, delay in zip(units, delays, strict=True) for _ in range(len("".join(unit.split())))]


def _lagging(written: Sequence[float], source_end: float, target_length: int) -> float:
    pace = source_end / target_length
    lags = []
    for unit, moment in enumerate(written):
        lags.append(moment - unit * pace)
        if moment >= source_end:
            break
    return sum(lags) / len(lags)


def _queueing_times(compute_seconds: Sequence[float], words_per_second: float) -> list[float]:
    """For each source word, the time between hearing it and beginning to work on it."""
    times = []
    free = 0.0
    for word, cost in enumerate(compute_seconds, start=1):
        heard = word / words_per_second
        begin = max(heard, free)
        times.append(begin - heard)
        free = begin + cost
    return times


def _checked(delays: Sequence[int], source_length: int) -> Sequence[int]:
    _require_length("source_length", source_length)
    delays = delays if len(delays) else [source_length]
    _require_ascending("delays", delays)
    if delays[-1] > source_length:
        raise DataError(f"delays: {delays[-1]} words read, but the source has {source_length}")
    return delays


def _require_ascending(name: str, values: Sequence[float]) -> None:
    if values[0] < 0:
        raise DataError(f"{name}: starts at {values[0]}, expected 0 or more")
    for unit, (before, after) in enumerate(pairwise(values), start=2):
        if after < before:
            raise DataError(f"{name}: falls from {before} to {after} at unit {unit}; output is append-only")


def _require_length(name: str, length: int) -> None:
    if length < 1:
        raise DataError(f"{name} = {length}: expected 1 or more")
