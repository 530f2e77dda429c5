from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulmt.errors import DataError
from simulmt.eval.quality import QualityScorer
from simulmt.text.words import Unit

GERMAN = [
    "Die alte Brücke über den Fluss war im Winter gesperrt.",
    "Wir warteten am Bahnhof, bis der letzte Zug kam.",
    "Am Abend flickte der Fischer seine Netze am Fluss.",
    "Er liest jeden Abend am Bahnhof die Zeitung.",
    "Der letzte Bus zum Hafen fährt um 10:45 Uhr.",
    "Das Boot gehört meinem Bruder, das Netz dem Fischer.",
]
OTHER_GERMAN = [
    "Im Winter war die alte Brücke gesperrt.",
    "Am Bahnhof warteten wir auf den letzten Zug.",
    "Abends flickte der Fischer die Netze.",
    "Jeden Abend liest er die Zeitung.",
    "Um 10:45 Uhr fährt der letzte Bus.",
    "Das Boot ist vom Bruder, das Netz vom Fischer.",
]
CHINESE = ["河上的老桥冬天不开放。", "我们在车站等火车。", "晚上，渔夫在河边补网。", "他每天晚上看 New York 报纸。"]
LOWER_CASE = ["-lc", "--chrf-lowercase"]


def with_errors(lines: Sequence[str]) -> list[str]:
    """Return lines with a missing part each, some in another case."""
    return [line[: len(line) // 2] + line[len(line) // 2 + 2 :].upper() for line in lines]


@pytest.mark.parametrize(
    ("unit", "references", "hypotheses", "cased"),
    [
        ("word", [GERMAN], with_errors(GERMAN), False),
        ("word", [GERMAN, OTHER_GERMAN], with_errors(GERMAN), True),
        ("word", [GERMAN], [f"{line} {line}" for line in GERMAN], False),
        ("word", [GERMAN], ["", *GERMAN[1:]], False),
        ("char", [CHINESE], with_errors(CHINESE), False),
    ],
    ids=["one reference", "two references", "longer than the reference", "one empty", "Chinese"],
)
def test_the_command_line_of_sacrebleu_agrees(
    unit: Unit, references: list[list[str]], hypotheses: list[str], cased: bool, tmp_path: Path
) -> None:
    quality = QualityScorer(references, unit).score(hypotheses)
    options = ["--confidence", "-tok", "zh" if unit == "char" else "13a", *([] if cased else LOWER_CASE)]
    for said in json.loads(sacrebleu(references, [hypotheses], tmp_path, *options)):
        score = quality.scores[said["name"] + "_cased" * cased]
        assert score.signature == said["signature"]
        assert f"{score.value:.4f}" == f"{said['score']:.4f}"
        mean, half = said["confidence_mean"], said["confidence_var"]
        assert score.interval == pytest.approx((max(0, mean - half), min(100, mean + half)), abs=2e-3)
        if said["name"] == "BLEU" and not cased:
            precisions = "/".join(f"{precision:.1f}" for precision in quality.precisions)
            assert said["verbose_score"].startswith(f"{precisions} (BP = {quality.brevity_penalty:.3f} ")


def sacrebleu(references: list[list[str]], systems: list[list[str]], directory: Path, *options: str) -> str:
    """Return what sacrebleu's command line prints for BLEU and chrF2."""
    names = [f"{number}.txt" for number in range(len(references) + len(systems))]
    for name, lines in zip(names, [*references, *systems], strict=True):
        (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    inputs = [*names[: len(references)], "-i", *names[len(references) :], "-m", "bleu", "chrf", "-w", "6"]
    command = [sys.executable, "-m", "sacrebleu", *inputs, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory).stdout


def test_bleu_by_hand() -> None:
    """Of "a b c d e" against "A b c d f g", in lower case: 4 of 5 words, 3 of 4 pairs, 2 of 3, 1 of 2; 5 for 6."""
    quality = QualityScorer([["A b c d f g"]], "word").score(["a b c d e"])
    assert quality.precisions == pytest.approx((80, 75, 200 / 3, 50))
    assert quality.brevity_penalty == pytest.approx(math.exp(1 - 6 / 5))
    expected = 100 * math.exp(1 - 6 / 5) * (0.8 * 0.75 * 2 / 3 * 0.5) ** 0.25
    assert quality.scores["BLEU"].value == pytest.approx(expected)
    assert quality.scores["BLEU"].interval == pytest.approx((expected, expected))  # resamples of one sentence
    assert quality.scores["BLEU_cased"].value < expected


def test_a_perfect_translation_scores_a_hundred() -> None:
    for unit, lines in (("word", GERMAN), ("char", CHINESE)):
        quality = QualityScorer([lines], unit).score(lines)  # type: ignore[arg-type]
        assert [score.value for score in quality.scores.values()] == pytest.approx([100] * 4)
        assert quality.brevity_penalty == 1


def test_case_counts_in_the_cased_scores_only() -> None:
    quality = QualityScorer([GERMAN], "word").score([line.upper() for line in GERMAN])
    values = {name: score.value for name, score in quality.scores.items()}
    assert values["BLEU"] == pytest.approx(100)
    assert values["chrF2"] == pytest.approx(100)
    assert values["BLEU_cased"] < 50
    assert values["chrF2_cased"] < 50


def test_shuffled_hypotheses_score_lower() -> None:
    scorer, shuffled = QualityScorer([GERMAN], "word"), with_errors(GERMAN)
    before = scorer.score(shuffled).scores
    random.Random(3).shuffle(shuffled)
    after = scorer.score(shuffled).scores
    assert all(after[name].value < before[name].value - 10 for name in before)


def test_empty_hypotheses_score_nothing() -> None:
    quality = QualityScorer([GERMAN], "word").score([""] * len(GERMAN))
    assert {score.value for score in quality.scores.values()} == {0}
    assert (quality.brevity_penalty, set(quality.precisions)) == (0, {0})


def test_one_match_among_empty_hypotheses_is_scored() -> None:
    """Some of its resamples have no match at all."""
    quality = QualityScorer([GERMAN], "word").score([GERMAN[0], *[""] * 5])
    low, high = quality.scores["BLEU"].interval
    assert 0 <= low < high <= 100


def test_a_missing_reference_is_none_at_all() -> None:
    sparse = ["", *OTHER_GERMAN[1:]]
    score = QualityScorer([GERMAN, sparse], "word").score(OTHER_GERMAN).scores["BLEU"]
    full = QualityScorer([GERMAN, OTHER_GERMAN], "word").score(OTHER_GERMAN).scores["BLEU"]
    assert score.signature.startswith("nrefs:var|")
    assert full.signature.startswith("nrefs:2|")
    assert score.value < full.value == pytest.approx(100)
    # a reference that is missing in every line has no effect
    single = QualityScorer([GERMAN], "word").score(OTHER_GERMAN)
    assert QualityScorer([GERMAN, [""] * 6], "word").score(OTHER_GERMAN) == single


def test_a_sentence_without_any_reference_is_scored() -> None:
    assert QualityScorer([["", "b"], ["", ""]], "word").score(["a", "b"]).scores["chrF2"].value > 0


def test_counts_must_agree() -> None:
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([GERMAN], "word").score(GERMAN[1:])
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([GERMAN], "word").compare(GERMAN, GERMAN[1:])
    with pytest.raises(DataError, match="reference files have 5 and 6 lines; expected the same number in each"):
        QualityScorer([GERMAN, GERMAN[1:]], "word")


def test_paired_bootstrap_agrees_with_the_command_line(tmp_path: Path) -> None:
    baseline, system = with_errors(GERMAN), [GERMAN[0], *with_errors(GERMAN)[1:]]
    differences = QualityScorer([GERMAN], "word").compare(baseline, system)
    said = sacrebleu([GERMAN], [baseline, system], tmp_path, "--paired-bs", "-f", "text", *LOWER_CASE)
    for difference in differences.values():
        assert f" {difference.baseline:.6f} (" in said
        assert f" {difference.system:.6f} (" in said
        assert f"(p = {difference.p:.4f})" in said
        assert f" {difference.signature}\n" in said
        assert difference.gain == difference.system - difference.baseline


def test_significance() -> None:
    scorer = QualityScorer([GERMAN], "word")
    equal, better = scorer.compare(GERMAN, GERMAN)["BLEU"], scorer.compare(with_errors(GERMAN), GERMAN)["BLEU"]
    assert (equal.gain, equal.p) == (0, 1)
    assert better.gain > 10
    assert better.p < 0.05
