from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.results_directory import Diagonal, evaluated
from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.data.alignment import Link
from simulmt.eval.report.examples import Output, Outputs, read_outputs
from simulmt.eval.results import read_results

SENTENCES = len(ENGLISH)


def test_references_come_first_and_are_written_with_everything_read(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 2, [line.upper() for line in GERMAN])
    reference, system = read_outputs(tmp_path, read_results(tmp_path), Diagonal())
    assert (reference.name, reference.result, system.name) == ("reference", None, "ctc-k2")
    assert reference.sentences[3].words == ["Schließe", "es"]
    assert reference.sentences[3].delays == [2, 2]
    assert system.sentences[0].words == GERMAN[0].upper().split()
    assert system.sentences[0].delays == [2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_a_word_among_characters_is_written_with_its_last_one(tmp_path: Path) -> None:
    lines = ["我用 Python 写。", *CHINESE[1:]]
    evaluated(tmp_path, "ctc", 1, lines, "char")
    output = read_outputs(tmp_path, read_results(tmp_path), None)[1].sentences[0]
    assert output.words == ["我", "用", "Python", "写", "。"]
    assert output.delays == [1, 2, 8, 9, 10]
    assert output.links is None
    assert output.hallucinated == [False] * 5


def test_hallucinated_words_are_marked(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 1, ["eins zwei drei", *GERMAN[1:]])

    def aligner(pairs: list[object]) -> list[set[tuple[int, int]]]:
        return [{(1, 1), (3, 2), (5, 3), (2, 3)} for _ in pairs]

    outputs = read_outputs(tmp_path, read_results(tmp_path), aligner)  # type: ignore[arg-type]
    output = outputs[1].sentences[0]
    assert output.delays == [1, 2, 3]
    # zwei is aligned to the third word when two were read; drei to the fifth, too, but also to the second.
    assert output.hallucinated == [False, True, False]


def test_rates_worked_by_hand(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 1, ["a b", "", "c", "d e f", "g"])
    outputs = read_outputs(tmp_path, read_results(tmp_path), Diagonal())[1]
    assert outputs.is_aligned
    # Only f, the third word for a source of two, is aligned to nothing: one of seven.
    assert outputs.hallucination_rate == pytest.approx(1 / 7)
    lengths = [len(line.split()) for line in ENGLISH]
    translated = 2 + 0 + 1 + 2 + 1
    assert outputs.under_translation_rate == pytest.approx(1 - translated / sum(lengths))


def test_alignments_are_cached_by_their_text(tmp_path: Path) -> None:
    results, cache = tmp_path / "results", tmp_path / "alignments"
    evaluated(results, "ctc", 1, GERMAN)
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    aligner = Diagonal()
    first = read_outputs(results, read_results(results), aligner, cache)
    assert aligner.asked == [2 * SENTENCES]
    assert read_outputs(results, read_results(results), aligner, cache) == first
    assert read_outputs(results, read_results(results), None, cache) == first
    assert aligner.asked == [2 * SENTENCES]
    (links,) = cache.glob("ctc-k1-*.links")
    assert links.read_text(encoding="utf-8").splitlines()[3] == "0-0 1-1"
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before, "the results are not its to change"

    evaluated(results, "ctc", 3, GERMAN)
    assert not read_outputs(results, read_results(results), None, cache)[2].is_aligned
    read_outputs(results, read_results(results), aligner, cache)
    assert aligner.asked[1:] == [3 * SENTENCES]


def test_a_copy_with_older_dates_is_aligned_by_its_text(tmp_path: Path) -> None:
    """As after a checkout or rsync, when dates are meaningless."""
    results, cache = tmp_path / "results", tmp_path / "alignments"
    evaluated(results, "ctc", 1, GERMAN)
    read_outputs(results, read_results(results), Diagonal(), cache)
    evaluated(results, "ctc", 1, GERMAN[::-1])
    log = results / "ctc-k1" / "instances.log"
    os.utime(log, (1, 1))
    assert not read_outputs(results, read_results(results), None, cache)[1].is_aligned


def test_damaged_alignments_are_not_used(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 1, GERMAN)
    read_outputs(tmp_path, read_results(tmp_path), Diagonal(), tmp_path / "alignments")
    (links,) = (tmp_path / "alignments").glob("ctc-k1-*.links")
    links.write_text("0-0\n", encoding="utf-8")
    assert not read_outputs(tmp_path, read_results(tmp_path), None, tmp_path / "alignments")[1].is_aligned


def test_results_without_logs_have_no_outputs(tmp_path: Path) -> None:
    evaluated(tmp_path, "ctc", 1, GERMAN)
    evaluated(tmp_path, "ctc", 3, GERMAN)
    (tmp_path / "ctc-k1" / "instances.log").unlink()
    assert [outputs.name for outputs in read_outputs(tmp_path, read_results(tmp_path), None)] == ["reference", "ctc-k3"]
    (tmp_path / "ctc-k3" / "instances.log").unlink()
    assert read_outputs(tmp_path, read_results(tmp_path), None) == []


LINKS: set[Link] = {(1, 1), (3, 2), (4, 2), (5, 4)}


def aligned(links: set[Link], delays: list[int], source: int = 5) -> Output:
    return Output(["s"] * source, ["t"] * len(delays), delays, "word", links)


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        # word 1 saw its source word 1; word 2 one of 3 and 4; word 3 has no link; word 4 wants source word 5
        ([1, 3, 4, 5], [False, False, True, False]),
        ([1, 2, 4, 4], [False, True, True, True]),
        ([0, 0, 0, 0], [True, True, True, True]),
    ],
)
def test_hallucinated_by_hand(delays: list[int], expected: list[bool]) -> None:
    assert aligned(LINKS, delays).hallucinated == expected


def test_untranslated_by_hand() -> None:
    assert aligned(LINKS, [1] * 4, source=6).untranslated == [False, True, False, False, False, True]
    assert aligned(set(), [], source=2).untranslated == [True, True]


def test_rates_give_every_word_equal_weight() -> None:
    sentences = [aligned(LINKS, [1, 3, 4, 5], 6), aligned(set(), [1] * 4, 1), aligned({(1, 1)}, [1, 1], 1)]
    outputs = Outputs("ctc-k1", None, sentences)
    assert (outputs.hallucination_rate, outputs.under_translation_rate) == (6 / 10, 3 / 8)
    assert Outputs("none", None, []).hallucination_rate == 0


@settings(deadline=None, max_examples=60)
@given(st.sets(st.tuples(st.integers(1, 5), st.integers(1, 6))), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_waiting_longer_never_hallucinates_more(links: set[Link], delays: list[int]) -> None:
    now = aligned(links, delays).hallucinated
    later = aligned(links, [min(delay + 1, 5) for delay in delays]).hallucinated
    assert all(before or not after for before, after in zip(now, later, strict=True))
    brute_force = [not any(i <= delay for i, j in links if j == unit) for unit, delay in enumerate(delays, start=1)]
    assert now == brute_force
