"""Word order, worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.helpers import write
from simulmt.errors import DataError
from simulmt.eval.order import (
    ParallelText,
    numbered_pairs,
    score_oracle,
    sorted_sentence,
)
from simulmt.eval.run import read_test_set


def test_anticipation_of_aligned_text(tmp_path: Path) -> None:
    source = write(tmp_path / "toy.en", ["a b c d", "e f"])
    target = write(tmp_path / "toy.zh", ["四三二一好吧", "五六七八九"])
    gold = write(tmp_path / "gold", ["1-4 1-3 2p2 4p1", "1-1 2-2"])
    text = ParallelText.read(source, target, gold=gold, gold_target_first=True)
    links: list[set[tuple[int, int]] | None] = [{(4, 1), (3, 2), (2, 3), (1, 4)}, {(1, 1), (2, 2)}]
    aligned, by_hand = text.anticipation({"hand": links})
    # Links (4, 1) (3, 2) (2, 3) (1, 4) (1, 1) (2, 2): i > j holds for two of six, i - 1 > j for one.
    assert aligned.rates == pytest.approx((2 / 6, 1 / 6, 1 / 6, 0, 0, 0, 0, 0, 0))
    # Scaled by 4 / 6 and 2 / 5: (4, 1) (3, 1) (2, 2) (1, 3) (1, 0) (2, 1).
    assert aligned.scaled_rates == pytest.approx((4 / 6, 2 / 6, 1 / 6, 0, 0, 0, 0, 0, 0))
    assert (aligned.corpus, aligned.source_unit, aligned.target_unit) == ("toy", "word", "char")
    # Sure are (4, 1) (3, 1) and (1, 1) (2, 2), possible also (2, 2) (1, 4): 3 sure hits, 4 possible ones, of 6 + 4.
    assert aligned.alignment_error_rate == pytest.approx(1 - 7 / 10)
    assert (by_hand.aligner, by_hand.links, by_hand.alignment_error_rate) == ("gold", 4, None)
    assert set(aligned.files) == {str(source), str(target), str(gold)}


def test_anticipation_worked_by_hand() -> None:
    alignments = [{(1, 1), (4, 1), (2, 3)}, None, {(10, 1)}]
    gold = [({(1, 1)}, {(1, 1), (4, 1)}), ({(1, 1)}, {(1, 1)}), (set[tuple[int, int]](), {(10, 1)})]
    pairs = [("a" * source, "b" * target) for source, target in ((4, 8), (5, 5), (10, 2))]
    text = ParallelText("toy", ("word", "char"), pairs, None, {"f": "0"})
    record = text.measure("hand", alignments, gold)
    # (4, 1) is 3 words early, (10, 1) is 9; the other two are not early at all.
    assert record.rates == (0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25)
    # Scaled, target word 1 is due at source position 0 of 4, word 3 at 2 of 4 (rounded), and in the last pair 1 at 5.
    assert record.scaled_rates == (0.75, 0.5, 0.5, 0.5, 0.25, 0, 0, 0, 0)
    # One sure and three possible hits of four links and two sure ones: 1 - 4 / 6.
    assert record.alignment_error_rate == pytest.approx(1 / 3)
    assert (record.sentences, record.links, record.skipped) == (3, 4, 1)
    assert text.measure("hand", alignments).alignment_error_rate is None


def test_oracle_order_is_scored_against_source_order(tmp_path: Path) -> None:
    sentences = ["one two three four five", "six seven eight nine ten"]
    texts = read_test_set(write(tmp_path / "s.en", sentences), [write(tmp_path / "r.de", sentences)])
    backwards = [" ".join(reversed(line.split())) for line in sentences]
    score = score_oracle(texts, sentences, backwards, model="m", delay=3, diagonal=0.5)
    assert (score.oracle_BLEU, score.oracle_precisions[3]) == pytest.approx((100, 100))
    assert (score.default_precisions[0], score.default_BP) == pytest.approx((100, 1))
    assert score.default_BLEU < 50
    assert (score.test_set, score.sentences, score.delay, score.diagonal) == ("s", 2, 3, 0.5)
    assert numbered_pairs(texts, [2]) == [(sentences[1], sentences[1])]
    with pytest.raises(DataError, match="--sentences 3: s has 2 sentences"):
        numbered_pairs(texts, [1, 3])


def test_a_heat_map_is_stored_in_four_digits() -> None:
    sentence = sorted_sentence("t", "m", 3, 1, np.array([[1 / 3, 2 / 3]]), ["a", "b"], ["A"])
    assert (sentence.Z, sentence.columns, sentence.rows) == (((0.3333, 0.6667),), ("a", "b"), ("A",))
