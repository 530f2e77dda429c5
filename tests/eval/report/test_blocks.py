from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.results_directory import Diagonal, evaluated
from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.data.alignment import Link
from simulmt.eval.order import Anticipation, OracleScore
from simulmt.eval.quality import Comparison, Difference
from simulmt.eval.report.blocks import (
    Chapter,
    Figures,
    Output,
    Outputs,
    Picture,
    Table,
    anticipation_table,
    comparison_table,
    oracle_table,
    quality_table,
    read_outputs,
    render_html,
    render_markdown,
    results_table,
    signatures,
    sorting_table,
)
from simulmt.eval.results import Result, read_results

PUBLISHED = Result("paper", 3, "test", "char", BLEU=40.24, AL=2.5)
MEASURED = Result(
    "ours",
    None,
    "test",
    "char",
    BLEU=38.123,
    AL=3.25,
    BLEU_interval=(37.04, 39.26),
    AL_CA=51.26,
    paced_lag=1.234,
    paced_waiting=1.0,
    paced_queueing=0.2,
    paced_computing=0.034,
    precisions=(60.04, 40.0),
    empty_hypotheses=0,
    signatures={"BLEU": "lc", "chrF2": "c6"},
)
SENTENCES = len(ENGLISH)


def test_missing_values_are_dashes_and_empty_columns_are_omitted() -> None:
    table = results_table([PUBLISHED, MEASURED])
    assert list(table.headings) == ["system", "k", "BLEU", "AL", "AL-CA ms", "lag s", "computing s"]
    assert list(table.rows[0]) == ["paper", "3", "40.24", "2.50", "–", "–", "–"]
    assert list(table.rows[1]) == ["ours", "full", "38.12 [37.0, 39.3]", "3.25", "51.3", "1.23", "0.234"]


def test_missing_precisions_leave_out_columns() -> None:
    table = quality_table([PUBLISHED, MEASURED])
    assert list(table.headings) == ["system", "k", "1-gram", "2-gram", "empty"]
    assert list(table.rows[1]) == ["ours", "full", "60.0", "40.0", "0"]


def test_every_signature_once() -> None:
    again = replace(MEASURED, delay=1)
    old = replace(PUBLISHED, signature="lc")
    assert signatures([PUBLISHED, MEASURED, again, old]) == ["BLEU: lc", "chrF2: c6"]


def test_comparisons_keep_their_stars() -> None:
    held = Comparison(MEASURED, BLEU=Difference(38.0, 36.0, 0.01, "sig"))
    (row,) = comparison_table([held]).rows
    assert list(row)[:6] == ["test", "full", "ours", "38.12", "+2.00", "0.010*"]


def test_rates_are_in_percent() -> None:
    record = Anticipation("dev", "eflomal", "word", "char", 10, 90, (0.5, 0.125), 0.2, 1, (0.25, 0.0625))
    old = replace(record, aligner="gold", alignment_error_rate=None, scaled_rates=())
    table = anticipation_table([record, old])
    assert list(table.headings[4:7]) == ["k=1", "k=2", "AER %"]
    assert list(table.rows[0]) == ["dev", "eflomal", "word → char", "plain", "50.0", "12.5", "20.0", "90", "10", "1"]
    assert list(table.rows[1][3:6]) == ["scaled", "25.0", "6.2"]
    assert list(table.rows[2][1:7]) == ["gold", "word → char", "plain", "50.0", "12.5", "–"]
    assert len(table.rows) == 3


def test_the_gain_of_oracle_order() -> None:
    record = OracleScore("test", "asn", 3, 0.5, 10, 41.75, (41.0, 42.5), 0.95, 40.24, (39.5, 41.0), 0.9, "sig")
    record = replace(record, oracle_precisions=(77.5, 53.7, 36.5, 24.44), default_precisions=(79.5, 53.7, 34.8, 22.6))
    default, oracle = oracle_table([record]).rows
    assert list(default) == [
        "asn", "3", "0.5", "default", "40.24 [39.5, 41.0]", "79.5", "53.7", "34.8", "22.6", "0.900", ""
    ]  # fmt: skip
    assert list(oracle) == [
        "asn", "3", "0.5", "oracle", "41.75 [41.0, 42.5]", "77.5", "53.7", "36.5", "24.4", "0.950", "+1.51"
    ]  # fmt: skip
    old = replace(record, oracle_precisions=(), default_precisions=())
    assert list(oracle_table([old]).rows[0][5:9]) == ["–"] * 4


def test_distances_of_z_from_the_identity() -> None:
    record = OracleScore("test", "asn", 3, 0.0, 10, 41.75, (41.0, 42.5), 0.95, 40.24, (39.5, 41.0), 0.9, "sig")
    measured = replace(record, diagonal=0.61235, displacement=1.5)
    table = sorting_table([record, measured, replace(measured, blank_penalty=1.0), replace(measured, delay=5)])
    assert list(map(list, table.rows)) == [["asn", "3", "0.6123", "1.500", "10"], ["asn", "5", "0.6123", "1.500", "10"]]


def test_markdown_and_html_are_escaped() -> None:
    table = Table(["name", "a|b"], [["<x>", "1"]])
    assert table.markdown() == "| name | a&#124;b |\n| :--- | ---: |\n| <x> | 1 |\n"
    html = render_html("a & b", [("<test>", [table])], systems=["<ctc>"], dates=[])
    assert "<h1>a &amp; b</h1>" in html
    assert "Systems: &lt;ctc&gt;.</p>" in html
    assert '<h2 id="c0">&lt;test&gt;</h2>' in html
    assert '<th scope="col">a|b</th>' in html
    assert '<td class="name">&lt;x&gt;</td><td>1</td>' in html


def test_chapters_of_figures_alone_are_not_in_the_markdown() -> None:
    chapter: Chapter = ("Z", [Figures([Picture("<svg></svg>", "Z & I")])])
    assert render_markdown("title", [chapter]) == "# title\n"
    assert "<figure><svg></svg><figcaption>Z &amp; I</figcaption></figure>" in render_html(
        "title", [chapter], systems=[], dates=[]
    )


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
