from __future__ import annotations

from dataclasses import replace

from simulmt.eval.compare import Comparison
from simulmt.eval.order import Anticipation, OracleScore
from simulmt.eval.quality import Difference
from simulmt.eval.report.blocks import (
    Chapter,
    Figures,
    Picture,
    Table,
    anticipation_table,
    comparison_table,
    oracle_table,
    quality_table,
    render_html,
    render_markdown,
    results_table,
    signatures,
    sorting_table,
)
from simulmt.eval.results import Result

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
