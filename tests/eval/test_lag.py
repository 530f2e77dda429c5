from __future__ import annotations

import pytest

from simulmt.eval.instances import Instance
from simulmt.eval.lag import Timed, computation, latency

# Four source words, references of four words and of two.
FAST = Instance(0, "a b c d", ("w x y z",), "W X Y Z", (1, 2, 3, 4), 4)
SLOW = Instance(1, "a b c d", ("", "w x"), "W", (4,), 4)
SILENT = Instance(2, "a b c d", ("w x y z",), "", (), 4)


def test_latency_is_the_mean_over_sentences() -> None:
    """AL of FAST is 1, of SLOW and SILENT 4; both fill the source in one unit."""
    assert latency([FAST, SLOW, SILENT], "word") == pytest.approx(
        {"AL": 3, "LAAL": 3, "DAL": 3, "AP": (10 / 16 + 1 + 1) / 3, "start_offset": 3, "end_offset": 0}
    )


def test_latency_goes_by_the_length_of_the_reference() -> None:
    """Units at 1 1 2 2 of two words: the ideal advances 2/4 for four words, 2/2 for two, 2/7 for seven characters."""
    instance = Instance(0, "a b", ("w x y z",), "W X Y Z", (1, 1, 2, 2), 2)
    assert latency([instance], "word")["AL"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert latency([instance], "char")["AL"] == pytest.approx((1 + (1 - 2 / 7) + (2 - 4 / 7)) / 3)
    short = Instance(0, "a b", ("", "w x"), "W X Y Z", (1, 1, 2, 2), 2)
    assert latency([short], "word")["AL"] == pytest.approx((1 + 0 + 0) / 3)


def test_computation_by_hand() -> None:
    """Words of 1, 2, 1 and 1 pieces, heard at 0.5, 1.0, 1.5 and 2.0 s, cost 0.1, 0.8, 0.1 and 0.2 s.

    They are done at 0.6, 1.8, 1.9 and 2.2 s: the third waits 0.3 s in the queue. The second costs 0.4 s a piece.
    Units are written after 100, 900, 1000 and 1200 ms of computing; at 1 ms a word the source was over by the first.
    """
    figures = computation([Timed(FAST, [1, 2, 1, 1], [0.1, 0.8, 0.1, 0.2])], "word", words_per_second=2)
    assert figures == pytest.approx(
        {
            "AL_CA": 100,
            "compute_ms_median": 200,  # of 100 100 200 400 400
            "compute_ms_p95": 400,
            "compute_ms_p99": 400,
            "words_per_second": 2,
            "paced_lag": 0.5 + 0.3 / 4 + 0.3,
            "paced_lag_p95": 0.9 + 0.85 * 0.4,  # of 0.6, 0.7, 0.9, 1.3
            "paced_waiting": 0.5,
            "paced_queueing": 0.3 / 4,
            "paced_computing": 0.3,
        }
    )


def test_runs_and_sentences_weigh_alike() -> None:
    once, again = Timed(FAST, [1] * 4, [0.1] * 4), Timed(SLOW, [1] * 4, [0.3] * 4)
    figures = computation([once, again], "word", 2.5)
    assert figures["AL_CA"] == pytest.approx((100 + 1200) / 2)
    assert figures["compute_ms_median"] == pytest.approx(200)
    assert figures["paced_computing"] == pytest.approx((4 * 0.1 + 0.3) / 5)


def test_silence_is_no_speed() -> None:
    """Nothing was written: as if one unit came when all was read and computed, at 2.0 + 0.4 s."""
    figures = computation([Timed(SILENT, [1] * 4, [0.4] * 4)], "word", words_per_second=2)
    assert figures["paced_lag"] == pytest.approx(2.4)
    assert figures["AL_CA"] == pytest.approx(1600)
