from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulmt.errors import DataError
from simulmt.eval.records import (
    Anticipation,
    OracleScore,
    SortedSentence,
    measure_anticipation,
    read_records,
    write_records,
)

ORACLE = OracleScore("test", "asn", 3, 0.0, 10, 40.0, (39.0, 41.0), 0.9, 30.0, (29.0, 31.0), 1.0, "sig")
SORTED = SortedSentence("test", "asn", 3, 7, ("a", "</s>"), ("·", "“"), ((1.0, 0.0), (0.25, 0.75)))


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert write_records(tmp_path / "new", [ORACLE]) == tmp_path / "new" / "oracle.jsonl"
    write_records(tmp_path / "new", [SORTED])
    assert read_records(OracleScore, [tmp_path, tmp_path / "new"]) == [ORACLE]
    assert read_records(SortedSentence, [tmp_path / "new"]) == [SORTED]
    assert read_records(Anticipation, [tmp_path / "new"]) == []


def test_a_record_about_the_same_thing_is_replaced(tmp_path: Path) -> None:
    write_records(tmp_path, [ORACLE, replace(ORACLE, delay=5)])
    write_records(tmp_path, [replace(ORACLE, oracle_BLEU=50.0)])
    found = read_records(OracleScore, [tmp_path])
    assert [(record.delay, record.oracle_BLEU) for record in found] == [(5, 40.0), (3, 50.0)]


@pytest.mark.parametrize("line", ["{", "[]", '{"corpus": "x"}', '{"unknown": 1}'])
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / Anticipation.FILE).write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"anticipation.jsonl:1: "):
        read_records(Anticipation, [tmp_path])


def test_anticipation_worked_by_hand() -> None:
    alignments = [{(1, 1), (4, 1), (2, 3)}, None, {(10, 1)}]
    gold = [({(1, 1)}, {(1, 1), (4, 1)}), ({(1, 1)}, {(1, 1)}), (set[tuple[int, int]](), {(10, 1)})]
    record = measure_anticipation("toy", "hand", ("word", "char"), alignments, gold, {"f": "0"})
    # (4, 1) is 3 words early, (10, 1) is 9; the other two are not early at all.
    assert record.rates == (0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25)
    # One sure and three possible hits of four links and two sure ones: 1 - 4 / 6.
    assert record.alignment_error_rate == pytest.approx(1 / 3)
    assert (record.sentences, record.links, record.skipped) == (3, 4, 1)
    assert measure_anticipation("toy", "hand", ("word", "char"), alignments).alignment_error_rate is None
