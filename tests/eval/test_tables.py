from __future__ import annotations

from dataclasses import replace

from simulmt.eval.compare import Comparison
from simulmt.eval.records import Anticipation, OracleScore
from simulmt.eval.results import Result
from simulmt.eval.score import Difference
from simulmt.eval.tables import (
    Table,
    anticipation_table,
    comparison_table,
    oracle_table,
    quality_table,
    results_table,
    signatures,
)

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


def test_markdown_and_html_are_escaped() -> None:
    table = Table(["name", "a|b"], [["<x>", "1"]])
    assert table.markdown() == "| name | a&#124;b |\n| :--- | ---: |\n| <x> | 1 |\n"
    assert '<th scope="col">a|b</th>' in table.html()
    assert '<td class="name">&lt;x&gt;</td><td>1</td>' in table.html()


def test_what_was_not_measured_is_a_dash_and_what_nobody_measured_no_column() -> None:
    table = results_table([PUBLISHED, MEASURED])
    assert list(table.headings) == ["system", "k", "BLEU", "AL", "AL-CA ms", "lag s", "of it computing s"]
    assert list(table.rows[0]) == ["paper", "3", "40.24", "2.50", "–", "–", "–"]
    assert list(table.rows[1]) == ["ours", "full", "38.12 [37.0, 39.3]", "3.25", "51.3", "1.23", "0.234"]


def test_precisions_that_are_missing() -> None:
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
    record = Anticipation("dev", "eflomal", "word", "char", 10, 90, (0.5, 0.125), 0.2, 1)
    table = anticipation_table([record, replace(record, aligner="gold", alignment_error_rate=None)])
    assert list(table.headings[3:6]) == ["k=1", "k=2", "AER %"]
    assert list(table.rows[0]) == ["dev", "eflomal", "word → char", "50.0", "12.5", "20.0", "90", "10", "1"]
    assert table.rows[1][5] == "–"


def test_the_gain_of_oracle_order() -> None:
    record = OracleScore("test", "asn", 3, 0.5, 10, 41.75, (41.0, 42.5), 0.95, 40.24, (39.5, 41.0), 0.9, "sig")
    (row,) = oracle_table([record]).rows
    assert list(row) == [
        "asn", "3", "0.5", "41.75 [41.0, 42.5]", "0.950", "40.24 [39.5, 41.0]", "0.900", "+1.51", "10"
    ]  # fmt: skip
