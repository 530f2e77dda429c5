from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eval.sentences import ENGLISH, GERMAN
from simulmt.errors import ConfigError, DataError
from simulmt.eval.compare import HEADINGS, as_json, compare, markdown, signatures
from simulmt.eval.latency import Instance
from simulmt.eval.results import Result, write_results
from simulmt.eval.run import Evaluation

WORSE = [line.upper()[2:] for line in GERMAN]
WORST = [line[: len(line) // 2] for line in GERMAN]


def save(
    directory: Path, system: str, delay: int | None, hypotheses: Sequence[str], references: Sequence[str] = GERMAN
) -> None:
    """Write results with scores that differ from those that `compare` computes."""
    result = Result(system, delay, "test", "word", BLEU=50.0, chrF2=60.0, AL=2.5)
    instances = [
        Instance(index, source, (reference,), "", (), len(source.split()))
        for index, (source, reference) in enumerate(zip(ENGLISH, references, strict=True))
    ]
    Evaluation(result, list(hypotheses), instances).write(directory)


def test_every_system_is_compared_with_the_baseline_at_its_delay(tmp_path: Path) -> None:
    for delay in (1, 3):
        save(tmp_path, "base", delay, WORST)
        save(tmp_path, "good", delay, GERMAN if delay == 1 else WORSE)
    save(tmp_path, "good", 5, GERMAN)  # which cannot be compared
    comparisons = compare([tmp_path])
    rows = [(comparison.result.system, comparison.result.delay) for comparison in comparisons]
    assert rows == [("base", 1), ("good", 1), ("base", 3), ("good", 3)]
    base, good, _, other = comparisons
    assert base.BLEU is base.chrF2 is None
    assert good.BLEU is not None
    assert other.BLEU is not None
    assert good.BLEU.system == pytest.approx(100)
    assert good.BLEU.gain > other.BLEU.gain
    assert good.BLEU.p < 0.05


def test_any_system_can_be_the_baseline(tmp_path: Path) -> None:
    save(tmp_path / "a", "good", 1, GERMAN)
    save(tmp_path / "b", "bad", 1, WORST)
    first, second = compare([tmp_path / "a", tmp_path / "b"], baseline="bad")
    assert (first.result.system, second.result.system) == ("bad", "good")
    assert second.chrF2 is not None
    assert second.chrF2.gain > 0
    _, second = compare([tmp_path / "a", tmp_path / "b"])
    assert second.chrF2 is not None
    assert second.chrF2.gain < 0


def test_a_full_sentence_baseline_is_compared_at_every_delay(tmp_path: Path) -> None:
    save(tmp_path, "teacher", None, GERMAN)
    for delay in (1, 3):
        save(tmp_path, "student", delay, WORSE)
    assert [comparison.result.delay for comparison in compare([tmp_path])] == [None, 1, 3]
    with pytest.raises(DataError, match="no other system shares a test set and a delay with the baseline student"):
        compare([tmp_path], baseline="student")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "base", 1, GERMAN)
    with pytest.raises(ConfigError, match="--baseline nobody: no such system; there are base"):
        compare([tmp_path], baseline="nobody")
    save(tmp_path, "other", 1, GERMAN, references=WORSE)
    with pytest.raises(DataError, match=r"other-k1 and .*base-k1 were scored with different references"):
        compare([tmp_path])
    save(tmp_path, "other", 1, GERMAN[1:])
    with pytest.raises(DataError, match="expected 5 hypotheses, one per reference, got 4"):
        compare([tmp_path])
    (tmp_path / "other-k1.hyp").unlink()
    with pytest.raises(DataError, match=r"other-k1\.hyp"):
        compare([tmp_path])


def test_other_units_are_not_compared(tmp_path: Path) -> None:
    for system in ("base", "other"):
        save(tmp_path, system, 1, GERMAN)
    result = Result("other", 1, "test", "char", BLEU=50.0, AL=2.5)
    write_results(tmp_path, [result])
    with pytest.raises(DataError, match="references or units"):
        compare([tmp_path])
    write_results(tmp_path, [replace(result, unit="word")])
    assert len(compare([tmp_path])) == 2


def test_markdown(tmp_path: Path) -> None:
    save(tmp_path, "base", 3, WORST)
    save(tmp_path, "good", 3, GERMAN)
    comparisons = compare([tmp_path])
    lines = markdown(comparisons).splitlines()
    assert lines[0] == f"| {' | '.join(HEADINGS)} |"
    assert lines[2] == "| test | 3 | base | 50.00 |  |  | 60.00 |  |  | 2.50 |"
    BLEU, chrF2 = comparisons[1].BLEU, comparisons[1].chrF2
    assert BLEU is not None
    assert chrF2 is not None
    cells = f"50.00 | {BLEU.gain:+.2f} | {BLEU.p:.3f}* | 60.00 | {chrF2.gain:+.2f} | {chrF2.p:.3f}*"
    assert lines[3] == f"| test | 3 | good | {cells} | 2.50 |"
    assert lines[4] == ""
    assert lines[5:] == [f"- {signature}" for signature in signatures(comparisons)]
    assert len(signatures(comparisons)) == 2


def test_insignificant_differences_have_no_star(tmp_path: Path) -> None:
    save(tmp_path, "base", 3, GERMAN)
    save(tmp_path, "same", 3, [*GERMAN[:4], WORSE[4]])
    assert "*" not in markdown(compare([tmp_path])).splitlines()[3]


def test_json(tmp_path: Path) -> None:
    save(tmp_path, "base", None, WORST)
    save(tmp_path, "good", 3, GERMAN)
    comparisons = compare([tmp_path])
    base, good = (json.loads(json.dumps(as_json(comparison))) for comparison in comparisons)
    assert base == {
        "test_set": "test",
        "system": "base",
        "delay": None,
        "AL": 2.5,
        "BLEU": {"score": 50.0},
        "chrF2": {"score": 60.0},
    }
    assert good["BLEU"].keys() == {"score", "baseline", "gain", "p", "signature"}
