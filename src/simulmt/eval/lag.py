"""The latency of a system over a test set, with and without the time that computation takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from simulmt.eval.instances import Instance, reference_length
from simulmt.eval.results import Unit
from simulmt.latency import (
    PacedLag,
    average_lagging,
    average_lagging_computation_aware,
    average_proportion,
    differentiable_average_lagging,
    end_offset,
    length_adaptive_average_lagging,
    paced_lags,
    start_offset,
)


def latency(instances: Sequence[Instance], unit: Unit) -> dict[str, float]:
    """The latency figures of a system, by the fields of `Result`: means over its sentences."""
    figures = [_sentence_latency(instance, unit) for instance in instances]
    return {name: float(np.mean([figure[name] for figure in figures])) for name in figures[0]}


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
class Timed:
    """A sentence and, for each of its source words, its pieces and the seconds it cost in one run."""

    instance: Instance
    pieces: Sequence[int]
    seconds: Sequence[float]


def computation(timed: Sequence[Timed], unit: Unit, words_per_second: float) -> dict[str, float]:
    """The computation-aware figures, by the fields of `Result`, over all timed sentences of all runs."""
    per_piece = np.concatenate([_piece_milliseconds(sentence) for sentence in timed])
    lags = [lag for sentence in timed for lag in _paced(sentence, unit, words_per_second)]
    median, p95, p99 = np.percentile(per_piece, [50, 95, 99])
    figures = {
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
    return {name: float(value) for name, value in figures.items()}


def _piece_milliseconds(timed: Timed) -> NDArray[np.float64]:
    """The cost of each source piece: an equal share of what its word cost."""
    pieces = np.array(timed.pieces)
    return np.repeat(np.array(timed.seconds) / pieces * 1000, pieces)


def _computation_aware_lagging(timed: Timed, unit: Unit) -> float:
    done = [0.0, *accumulate(timed.seconds)]
    elapsed = [done[delay] * 1000 for delay in _delays(timed.instance)]
    reference = reference_length(timed.instance.reference, unit)
    return average_lagging_computation_aware(elapsed, timed.instance.source_length, reference)


def _paced(timed: Timed, unit: Unit, words_per_second: float) -> list[PacedLag]:
    reference = reference_length(timed.instance.reference, unit)
    return paced_lags(_delays(timed.instance), timed.seconds, reference, words_per_second)


def _delays(instance: Instance) -> Sequence[int]:
    """The delays; an empty hypothesis counts as one unit written at the end, as in all other figures."""
    return instance.delays or [instance.source_length]
