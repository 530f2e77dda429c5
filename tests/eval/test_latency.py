from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import DataError
from simulmt.eval.latency import (
    CompleteWords,
    Instance,
    PacedLag,
    TimedSentence,
    average_lagging,
    average_lagging_computation_aware,
    average_proportion,
    computation,
    detect_unit,
    differentiable_average_lagging,
    end_offset,
    latency,
    length_adaptive_average_lagging,
    paced_lags,
    reference_length,
    spaced_words_read,
    split_units,
    start_offset,
    unit_delays,
)
from simulmt.text import split_words
from simulmt.text.words import Unit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SimulEval imports libraries that are deprecated
    from simuleval.evaluator.instance import LogInstance
    from simuleval.evaluator.scorers.latency_scorer import ALScorer, APScorer, DALScorer, LAALScorer

# Each function of delays and the source length; those that take a reference get one of four units.
METRICS: dict[str, Callable[[list[int], int], float]] = {
    "AL": lambda delays, source: average_lagging(delays, source, 4),
    "LAAL": lambda delays, source: length_adaptive_average_lagging(delays, source, 4),
    "DAL": differentiable_average_lagging,
    "AP": average_proportion,
    "start": start_offset,
    "end": end_offset,
}


@st.composite
def timed_sentences(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw delays, source length and reference length."""
    source_length = draw(st.integers(1, 9))
    delays = draw(st.lists(st.integers(0, source_length), max_size=12))
    return sorted(delays), source_length, draw(st.integers(1, 12))


@pytest.mark.parametrize(
    ("delays", "source", "reference", "expected"),
    [
        # wait-1, equal lengths: 1-0, 2-1, 3-2, 4-3; the mean of 1 1 1 1
        ([1, 2, 3, 4], 4, 4, 1.0),
        # wait-3: 3-0, 4-1; the first unit with all 4 words read is the second, so the rest does not count
        ([3, 4, 4, 4], 4, 4, 3.0),
        # everything after the source: only 4-0 counts
        ([4, 4, 4], 4, 4, 4.0),
        # two units a source word: the ideal advances 2/4 a unit: 1-0, 1-0.5, 2-1; the mean of 1 0.5 1
        ([1, 1, 2, 2], 2, 4, 2.5 / 3),
        # the source is never read to its end: every unit counts: 1-0, 1-1, 2-2
        ([1, 1, 2], 3, 3, 1 / 3),
        # written before anything was read: 0-0, 1-2, 2-4; the mean of 0 -1 -2
        ([0, 1, 2], 4, 2, -1.0),
        # nothing was written: as if one unit came after the whole source
        ([], 4, 3, 4.0),
    ],
)
def test_average_lagging_by_hand(delays: list[int], source: int, reference: int, expected: float) -> None:
    assert average_lagging(delays, source, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("delays", "source", "reference", "expected"),
    [
        # a hypothesis of 4 units, a reference of 2: the ideal advances 4/4 a unit, not 4/2: 1-0, 2-1, 3-2, 4-3
        ([1, 2, 3, 4], 4, 2, 1.0),
        # a short hypothesis is held to the reference, as in AL: 2-0, 4-1
        ([2, 4], 4, 4, 2.5),
        ([], 4, 3, 4.0),
    ],
)
def test_length_adaptive_average_lagging_by_hand(
    delays: list[int], source: int, reference: int, expected: float
) -> None:
    assert length_adaptive_average_lagging(delays, source, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("delays", "source", "expected"),
    [
        # written at 3, max(4, 3+1), max(4, 4+1), max(4, 5+1) = 3 4 5 6; less 0 1 2 3; the mean of 3 3 3 3
        ([3, 4, 4, 4], 4, 3.0),
        # a unit takes 4/2 words: written at 1, max(2, 1+2) = 3; less 0 2; the mean of 1 1
        ([1, 2], 4, 1.0),
        # a unit takes 1 word: written at 1, max(3, 2) = 3, max(3, 4) = 4; less 0 1 2; the mean of 1 2 2
        ([1, 3, 3], 3, 5 / 3),
        ([], 4, 4.0),
    ],
)
def test_differentiable_average_lagging_by_hand(delays: list[int], source: int, expected: float) -> None:
    assert differentiable_average_lagging(delays, source) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("delays", "source", "proportion", "start", "end"),
    [
        ([1, 2, 3, 4], 4, 10 / 16, 1, 0),
        ([2, 2, 3], 4, 7 / 12, 2, -1),
        ([0], 4, 0.0, 0, -4),
        ([], 4, 1.0, 4, 0),
    ],
)
def test_proportion_and_offsets_by_hand(
    delays: list[int], source: int, proportion: float, start: int, end: int
) -> None:
    assert average_proportion(delays, source) == pytest.approx(proportion)
    assert start_offset(delays, source) == start
    assert end_offset(delays, source) == end


@settings(deadline=None, max_examples=150)
@given(timed_sentences())
def test_metrics_keep_their_bounds(case: tuple[list[int], int, int]) -> None:
    delays, source, reference = case
    assert 0 <= average_proportion(delays, source) <= 1
    lagging = average_lagging(delays, source, reference)
    adaptive = length_adaptive_average_lagging(delays, source, reference)
    assert lagging <= adaptive + 1e-9
    assert adaptive <= source + 1e-9
    assert adaptive <= differentiable_average_lagging(delays, source) + 1e-9 or reference > len(delays)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9))
def test_wait_k_lags_by_k(length: int, k: int) -> None:
    delays = [min(unit + k, length) for unit in range(length)]
    lag = min(k, length)
    assert average_lagging(delays, length, length) == pytest.approx(lag)
    assert length_adaptive_average_lagging(delays, length, length) == pytest.approx(lag)
    assert differentiable_average_lagging(delays, length) == pytest.approx(lag)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("delays", "source", "message"),
    [
        ([1, 3, 2], 4, "delays: decrease from 3 to 2 at unit 3"),
        ([-1, 2], 4, "delays: starts at -1"),
        ([1, 5], 4, "delays: 5 words read, but the source has 4"),
        ([], 0, "source_length = 0"),
    ],
)
def test_impossible_delays_are_refused(metric: str, delays: list[int], source: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        METRICS[metric](delays, source)


@pytest.mark.parametrize(
    ("elapsed", "source", "reference", "expected"),
    [
        # the source ends at 1000 ms, the ideal advances 1000/4 a unit: 600-0, 700-250, 1100-500
        ([600, 700, 1100, 1200], 1000, 4, (600 + 450 + 600) / 3),
        # the source ends at 2 ms, before the first unit: only that one counts
        ([600, 700, 1100, 1200], 2, 4, 600.0),
        # 0.25 ms per word, less than the 1 ms that a word lasts: 0.25-0, 0.5-1, 0.75-2, 1-3
        ([0.25, 0.5, 0.75, 1.0], 4, 4, (0.25 - 0.5 - 1.25 - 2.0) / 4),
        ([], 1000, 4, 1000.0),
    ],
)
def test_computation_aware_average_lagging_by_hand(
    elapsed: list[float], source: int, reference: int, expected: float
) -> None:
    assert average_lagging_computation_aware(elapsed, source, reference) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(timed_sentences())
def test_without_computation_it_is_average_lagging(case: tuple[list[int], int, int]) -> None:
    delays, source, reference = case
    expected = average_lagging(delays, source, reference)
    assert average_lagging_computation_aware(delays, source, reference) == pytest.approx(expected, abs=1e-6)


def test_paced_lags_by_hand() -> None:
    """Two words a second, heard at 0.5, 1.0, 1.5, 2.0 s; the second costs 1.25 s and holds up the others.

    Work begins at 0.5, 1.0, 2.25 (waited 0.75), 2.5 s (waited 0.5) and ends at 0.75, 2.25, 2.5, 2.75 s.
    The ideal interpreter writes unit n, from 0, at n * 0.5 s.
    """
    lags = paced_lags([0, 2, 3, 4], [0.25, 1.25, 0.25, 0.25], reference_length=4, words_per_second=2)
    assert lags == [
        PacedLag(waiting=0.0, queueing=0.0, computing=0.0),  # at 0.0 s, before anything was heard
        PacedLag(waiting=1.0 - 0.5, queueing=0.0, computing=1.25),  # at 2.25 s
        PacedLag(waiting=1.5 - 1.0, queueing=0.75, computing=0.25),  # at 2.5 s
        PacedLag(waiting=2.0 - 1.5, queueing=0.5, computing=0.25),  # at 2.75 s
    ]
    assert [lag.total for lag in lags] == [0.0, 2.25 - 0.5, 2.5 - 1.0, 2.75 - 1.5]


@settings(deadline=None, max_examples=60)
@given(timed_sentences(), st.floats(0.5, 5))
def test_waiting_is_length_adaptive_average_lagging(case: tuple[list[int], int, int], words_per_second: float) -> None:
    delays, source, reference = case
    lags = paced_lags(delays, [0.0] * source, reference, words_per_second)
    assert len(lags) == len(delays)
    assert all(lag.queueing == lag.computing == 0 for lag in lags)
    if delays:
        counted = delays.index(source) + 1 if source in delays else len(delays)
        mean = sum(lag.waiting for lag in lags[:counted]) / counted * words_per_second
        assert mean == pytest.approx(length_adaptive_average_lagging(delays, source, reference), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=8), st.floats(0.5, 5))
def test_queueing_matches_a_brute_force_schedule(costs: list[float], words_per_second: float) -> None:
    """A word is done when the latest-ending run of back-to-back words up to it is done."""
    lags = paced_lags(list(range(1, len(costs) + 1)), costs, len(costs), words_per_second)
    for n, lag in enumerate(lags, start=1):
        heard = n / words_per_second
        done = max(first / words_per_second + sum(costs[first - 1 : n]) for first in range(1, n + 1))
        assert heard + lag.queueing + lag.computing == pytest.approx(done)


def test_the_default_pace_is_two_and_a_half_words_a_second() -> None:
    (lag,) = paced_lags([1], [0.0], 1)
    assert lag.waiting == pytest.approx(0.4)


# Four source words, references of four words and of two.
FAST = Instance(0, "a b c d", ("w x y z",), "W X Y Z", (1, 2, 3, 4), 4)
SLOW = Instance(1, "a b c d", ("", "w x"), "W", (4,), 4)
SILENT = Instance(2, "a b c d", ("w x y z",), "", (), 4)


def test_latency_is_the_mean_over_sentences() -> None:
    """AL of FAST is 1, of SLOW and SILENT 4; both fill the source in one unit."""
    assert latency([FAST, SLOW, SILENT], "word") == pytest.approx(
        {"AL": 3, "LAAL": 3, "DAL": 3, "AP": (10 / 16 + 1 + 1) / 3, "start_offset": 3, "end_offset": 0}
    )


def test_latency_uses_the_length_of_the_reference() -> None:
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
    figures = computation([TimedSentence(FAST, [1, 2, 1, 1], [0.1, 0.8, 0.1, 0.2])], "word", words_per_second=2)
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


def test_runs_and_sentences_have_equal_weight() -> None:
    once, again = TimedSentence(FAST, [1] * 4, [0.1] * 4), TimedSentence(SLOW, [1] * 4, [0.3] * 4)
    figures = computation([once, again], "word", 2.5)
    assert figures["AL_CA"] == pytest.approx((100 + 1200) / 2)
    assert figures["compute_ms_median"] == pytest.approx(200)
    assert figures["paced_computing"] == pytest.approx((4 * 0.1 + 0.3) / 5)


def test_an_empty_translation_is_not_fast() -> None:
    """An empty translation counts as one unit written after everything was read and computed, at 2.0 + 0.4 s."""
    figures = computation([TimedSentence(SILENT, [1] * 4, [0.4] * 4)], "word", words_per_second=2)
    assert figures["paced_lag"] == pytest.approx(2.4)
    assert figures["AL_CA"] == pytest.approx(1600)


def test_the_unit_of_a_log_is_found() -> None:
    characters = Instance(0, "a b c", ("x",), "你好", (1, 3), 3)
    both = Instance(1, "a b c", ("x",), "你", (1,), 3)
    words = Instance(0, "a b c", ("Ein Satz.",), "Ein Satz", (1, 3), 3)
    assert detect_unit([words, both], "log") == "word"
    assert detect_unit([both, characters], "log") == "char"
    with pytest.raises(DataError, match="log:2: expected one delay per word or per character"):
        detect_unit([words, Instance(1, "a b c", ("x",), "Ein Satz", (1, 2, 3), 3)], "log")


def test_a_word_is_written_when_the_next_one_begins() -> None:
    """ "Brü" and "cke" at words 1 and 2, " war" at 3, " zu" at 3 and "." at the end, word 5."""
    written = [("Brü", 1), ("cke", 2), (" war", 3), (" zu", 3), (".", 5)]
    assert unit_delays(written, 5, "word", spaced=True) == [3, 3, 5]
    # the same words counted in characters: Brücke and war at 3, zu. at 5
    assert unit_delays(written, 5, "char", spaced=True) == [3] * 9 + [5] * 3


def test_a_character_is_written_at_once_where_there_are_no_spaces() -> None:
    written = [("你好", 1), ("，New", 2), (" York", 4)]
    assert unit_delays(written, 4, "char", spaced=False) == [1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
    assert unit_delays([], 4, "char", spaced=False) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.sampled_from("ab "), max_size=4), max_size=8), st.booleans())
def test_buffering_words_loses_and_splits_nothing(texts: list[str], spaced: bool) -> None:
    words = CompleteWords(spaced)
    parts = [*map(words.push, texts), words.finish()]
    assert "".join(parts) == "".join(texts)
    if spaced:
        assert [word for part in parts for word in part.split()] == "".join(texts).split()


def test_words_of_the_runtime_become_words_between_spaces() -> None:
    """The runtime reads The | sign | 小 | 心 | here; the third and the fourth are one word between spaces."""
    assert list(spaced_words_read("The sign 小心 here", [1, 2, 3, 4, 5])) == [1, 2, 3, 3, 4]


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("ab 河。\u3000"), min_size=1).filter(str.strip))
def test_every_word_of_the_runtime_has_its_place(source: str) -> None:
    count = len(split_words(source))
    read = list(spaced_words_read(source, range(1, count + 1)))
    assert read == sorted(read)
    assert set(read) == set(range(1, len(source.split()) + 1))


def test_units_by_hand() -> None:
    assert split_units(" Die  Brücke. ", "word") == ["Die", "Brücke."]
    assert split_units("你好 Bob", "char") == ["你", "好", "B", "o", "b"]
    assert reference_length("Die alte Brücke.", "word") == 3
    assert reference_length(" 你好 Bob ", "char") == 6  # with the space in between, as SimulEval has it
    assert reference_length("", "word") == reference_length("", "char") == 1


@settings(deadline=None, max_examples=100)
@given(
    timed_sentences(),
    st.text(st.sampled_from("ab 河。"), max_size=12).filter(str.strip),
    st.sampled_from(get_args(Unit)),
)
def test_simuleval_agrees(case: tuple[list[int], int, int], reference: str, unit: Unit) -> None:
    """On the length of the reference, AL, LAAL, DAL, and AP if that goes by the length of the hypothesis."""
    delays, source_length, _ = case
    info = {"index": 0, "reference": reference, "delays": delays, "source_length": source_length}
    logged: Any = LogInstance(json.dumps(info), unit)
    length = reference_length(reference, unit)
    assert length == logged.reference_length
    if delays:
        arguments = (delays, source_length, length)
        assert average_lagging(*arguments) == pytest.approx(ALScorer().compute(logged))
        assert length_adaptive_average_lagging(*arguments) == pytest.approx(LAALScorer().compute(logged))
        assert differentiable_average_lagging(*arguments[:2]) == pytest.approx(DALScorer().compute(logged))
        proportion = APScorer(use_ref_len=False).compute(logged)
        assert average_proportion(*arguments[:2]) == pytest.approx(proportion)
