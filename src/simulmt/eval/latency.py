"""Delays, and the latency metrics computed from them.

`delays` holds the number of source words read when each target unit was written. A unit is a word, or a character for
targets without spaces (not counting spaces). A word counts as written once it is complete, that is, when the next one
begins or the sentence ends.

Definitions and corner cases follow SimulEval 1.1.4 for text, with two exceptions: average proportion divides by the
hypothesis length, as originally defined, so it stays between 0 and 1; and an empty hypothesis, which SimulEval skips,
counts as one unit written after the whole source, so that empty output is not rewarded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from simulmt.errors import DataError
from simulmt.text import split_words
from simulmt.text.words import Unit


@dataclass(frozen=True)
class Instance:
    """A sentence, its translation, and the number of source words read for each target unit."""

    index: int
    source: str
    references: tuple[str, ...]  # empty if missing
    prediction: str
    delays: tuple[int, ...]
    source_length: int

    @property
    def reference(self) -> str:
        """First reference, which defines the length for latency metrics."""
        return next(filter(None, self.references), "")


class CompleteWords:
    """Buffers incomplete words of append-only text; text without spaces passes unchanged."""

    def __init__(self, spaced: bool) -> None:
        self._spaced = spaced
        self._held = ""

    def push(self, text: str) -> str:
        """Return the completed text, up to and including the last space."""
        if not self._spaced:
            return text
        complete, space, self._held = (self._held + text).rpartition(" ")
        return complete + space

    def finish(self) -> str:
        """Return the rest at the end of the sentence."""
        rest, self._held = self._held, ""
        return rest


def split_units(text: str, unit: Unit) -> list[str]:
    """Split a hypothesis into units."""
    return text.split() if unit == "word" else list(text.replace(" ", ""))


def unit_delays(written: Iterable[tuple[str, int]], source_length: int, unit: Unit, spaced: bool) -> list[int]:
    """Return the delay of each target unit of text written in pieces, given with the source words read.

    `spaced` is False for targets written without spaces.
    """
    words = CompleteWords(spaced)
    delays = [delay for text, delay in written for _ in split_units(words.push(text), unit)]
    return delays + [source_length] * len(split_units(words.finish(), unit))


def spaced_words_read(source: str, words: Iterable[int]) -> Iterator[int]:
    """Convert counts of runtime words, which are also split at ideographs, to counts of space-separated words."""
    ends = list(accumulate(len(split_words(word)) for word in source.split()))
    for count in words:
        yield bisect_left(ends, count) + 1


def detect_unit(instances: Sequence[Instance], origin: str) -> Unit:
    """Detect the unit of a log: the one with as many units as there are delays."""
    are_words = True
    for number, instance in enumerate(instances, start=1):
        delays, text = len(instance.delays), instance.prediction
        has_words = delays == len(split_units(text, "word"))
        if not has_words and delays != len(split_units(text, "char")):
            raise DataError(f"{origin}:{number}: expected one delay per word or per character of the prediction")
        are_words &= has_words
    return "word" if are_words else "char"


def average_lagging(delays: Sequence[int], source_length: int, reference_length: int) -> float:
    """Return average lagging (AL): source words behind an ideal interpreter at the pace of the source.

    Averaged up to and including the first unit written after the whole source.
    """
    return lagging(_validated_delays(delays, source_length), source_length, reference_length)


def length_adaptive_average_lagging(delays: Sequence[int], source_length: int, reference_length: int) -> float:
    """Return length-adaptive average lagging (LAAL): AL that does not reward long hypotheses."""
    delays = _validated_delays(delays, source_length)
    return lagging(delays, source_length, max(len(delays), reference_length))


def differentiable_average_lagging(delays: Sequence[int], source_length: int) -> float:
    """Return differentiable average lagging (DAL): mean lag if writing a unit takes its share of the source time."""
    delays = _validated_delays(delays, source_length)
    pace = source_length / len(delays)
    paced = accumulate(delays, lambda before, delay: max(delay, before + pace))
    return sum(written - unit * pace for unit, written in enumerate(paced)) / len(delays)


def average_proportion(delays: Sequence[int], source_length: int) -> float:
    """Return average proportion (AP): mean share of the source read when a unit was written."""
    delays = _validated_delays(delays, source_length)
    return sum(delays) / (source_length * len(delays))


def start_offset(delays: Sequence[int], source_length: int) -> int:
    """Return the source words read before the first unit."""
    return _validated_delays(delays, source_length)[0]


def end_offset(delays: Sequence[int], source_length: int) -> int:
    """Return the source words read before the last unit minus the source length: 0, or negative if early."""
    return _validated_delays(delays, source_length)[-1] - source_length


def average_lagging_computation_aware(elapsed_ms: Sequence[float], source_length: int, reference_length: int) -> float:
    """Return computation-aware average lagging (AL-CA) in milliseconds.

    `elapsed_ms` counts from the start of the sentence; every source word lasts the customary 1 ms. Averaged up to and
    including the first unit written at or after the end of the source, which is nearly always the first unit;
    `paced_lags` is closer to what a listener notices. Like AL it is negative where the translation runs ahead of the
    source, here if computing takes less than 1 ms per word.
    """
    return lagging(elapsed_ms or [source_length], source_length, reference_length)


@dataclass(frozen=True)
class PacedLag:
    """Lag of a target unit in seconds, split into waiting for words, queueing and computing."""

    waiting: float
    queueing: float
    computing: float

    @property
    def total(self) -> float:
        """Total seconds behind an ideal interpreter."""
        return self.waiting + self.queueing + self.computing


def paced_lags(
    delays: Sequence[int],
    compute_seconds: Sequence[float],
    reference_length: int,
    words_per_second: float = 2.5,
) -> list[PacedLag]:
    """Return the lag of each target unit for a source spoken at a steady rate.

    `compute_seconds` is the time each source word takes; words are processed in turn, so a slow one delays the next.
    `waiting` is what LAAL averages, in seconds, and negative where the translation runs ahead.
    """
    pace = len(compute_seconds) / max(len(delays), reference_length)
    queueing = [0.0, *_queueing_times(compute_seconds, words_per_second)]
    computing = [0.0, *compute_seconds]
    return [
        PacedLag((delay - unit * pace) / words_per_second, queueing[delay], computing[delay])
        for unit, delay in enumerate(delays)
    ]


def lagging(written: Sequence[float], source_end: float, target_length: int) -> float:
    """Return the mean lag behind an ideal interpreter, up to the first unit written at or after the end of the source.

    `written` holds when each unit was written, in words or in time; the interpreter writes `target_length` units.
    """
    pace = source_end / target_length
    lags = []
    for unit, moment in enumerate(written):
        lags.append(moment - unit * pace)
        if moment >= source_end:
            break
    return sum(lags) / len(lags)


def _queueing_times(compute_seconds: Sequence[float], words_per_second: float) -> list[float]:
    """Return the time between hearing each source word and starting to process it."""
    times = []
    free = 0.0
    for word, cost in enumerate(compute_seconds, start=1):
        heard = word / words_per_second
        begin = max(heard, free)
        times.append(begin - heard)
        free = begin + cost
    return times


def _validated_delays(delays: Sequence[int], source_length: int) -> Sequence[int]:
    """Return the delays, or one unit written at the end if there are none; raise DataError if they are impossible."""
    if source_length < 1:
        raise DataError(f"source_length = {source_length}: expected 1 or more")
    delays = delays or [source_length]
    if delays[0] < 0:
        raise DataError(f"delays: starts at {delays[0]}, expected 0 or more")
    for unit, (before, after) in enumerate(pairwise(delays), start=2):
        if after < before:
            raise DataError(f"delays: decrease from {before} to {after} at unit {unit}; output is append-only")
    if delays[-1] > source_length:
        raise DataError(f"delays: {delays[-1]} words read, but the source has {source_length}")
    return delays


def reference_length(reference: str, unit: Unit) -> int:
    """Return the length of a reference; as in SimulEval, spaces inside it count as characters."""
    return len(reference.split(" ")) if unit == "word" else max(1, len(reference.strip()))


def latency(instances: Sequence[Instance], unit: Unit) -> dict[str, float]:
    """Return the mean latency metrics of a system, by field of `Result`."""
    metrics = [_sentence_latency(instance, unit) for instance in instances]
    return {name: float(np.mean([sentence[name] for sentence in metrics])) for name in metrics[0]}


def _sentence_latency(instance: Instance, unit: Unit) -> dict[str, float]:
    delays, source, reference = instance.delays, instance.source_length, reference_length(instance.reference, unit)
    return {
        "AL": average_lagging(delays, source, reference),
        "LAAL": length_adaptive_average_lagging(delays, source, reference),
        "DAL": differentiable_average_lagging(delays, source),
        "AP": average_proportion(delays, source),
        "start_offset": start_offset(delays, source),
        "end_offset": end_offset(delays, source),
    }


@dataclass(frozen=True)
class TimedSentence:
    """A sentence with the number of pieces and the compute time of each source word in one run."""

    instance: Instance
    pieces: Sequence[int]
    seconds: Sequence[float]


def computation(timed: Sequence[TimedSentence], unit: Unit, words_per_second: float) -> dict[str, float]:
    """Return computation-aware metrics, by field of `Result`, over all timed runs."""
    per_piece = np.concatenate([_piece_milliseconds(sentence) for sentence in timed])
    lags = [lag for sentence in timed for lag in _sentence_paced_lags(sentence, unit, words_per_second)]
    median, p95, p99 = np.percentile(per_piece, [50, 95, 99])
    metrics = {
        "AL_CA": np.mean([_computation_aware_lagging(sentence, unit) for sentence in timed]),
        "compute_ms_median": median,
        "compute_ms_p95": p95,
        "compute_ms_p99": p99,
        "words_per_second": words_per_second,
        "paced_lag": np.mean([lag.total for lag in lags]),
        "paced_lag_p95": np.percentile([lag.total for lag in lags], 95),
        "paced_waiting": np.mean([lag.waiting for lag in lags]),
        "paced_queueing": np.mean([lag.queueing for lag in lags]),
        "paced_computing": np.mean([lag.computing for lag in lags]),
    }
    return {name: float(value) for name, value in metrics.items()}


def _piece_milliseconds(timed: TimedSentence) -> NDArray[np.float64]:
    """Return the time of each source piece: an equal share of its word's."""
    pieces = np.array(timed.pieces)
    return np.repeat(np.array(timed.seconds) / pieces * 1000, pieces)


def _computation_aware_lagging(timed: TimedSentence, unit: Unit) -> float:
    done = [0.0, *accumulate(timed.seconds)]
    elapsed = [done[delay] * 1000 for delay in _delays(timed.instance)]
    reference = reference_length(timed.instance.reference, unit)
    return average_lagging_computation_aware(elapsed, timed.instance.source_length, reference)


def _sentence_paced_lags(timed: TimedSentence, unit: Unit, words_per_second: float) -> list[PacedLag]:
    reference = reference_length(timed.instance.reference, unit)
    return paced_lags(_delays(timed.instance), timed.seconds, reference, words_per_second)


def _delays(instance: Instance) -> Sequence[int]:
    """Return the delays; an empty hypothesis counts as one unit written at the end."""
    return instance.delays or [instance.source_length]
