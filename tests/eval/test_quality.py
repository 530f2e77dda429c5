from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eval.sentences import ENGLISH, GERMAN
from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import Instance
from simulmt.eval.quality import HEADINGS, QualityScorer, as_json, compare, markdown, signatures
from simulmt.eval.results import Result, write_results
from simulmt.eval.run import Evaluation
from simulmt.text.words import Unit

REFERENCES = [
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
WORSE = [line.upper()[2:] for line in GERMAN]
WORST = [line[: len(line) // 2] for line in GERMAN]


def with_errors(lines: Sequence[str]) -> list[str]:
    """Return lines with a missing part each, some in another case."""
    return [line[: len(line) // 2] + line[len(line) // 2 + 2 :].upper() for line in lines]


@pytest.mark.parametrize(
    ("unit", "references", "hypotheses", "cased"),
    [
        ("word", [REFERENCES], with_errors(REFERENCES), False),
        ("word", [REFERENCES, OTHER_GERMAN], with_errors(REFERENCES), True),
        ("word", [REFERENCES], [f"{line} {line}" for line in REFERENCES], False),
        ("word", [REFERENCES], ["", *REFERENCES[1:]], False),
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
    for unit, lines in (("word", REFERENCES), ("char", CHINESE)):
        quality = QualityScorer([lines], unit).score(lines)  # type: ignore[arg-type]
        assert [score.value for score in quality.scores.values()] == pytest.approx([100] * 4)
        assert quality.brevity_penalty == 1


def test_case_counts_in_the_cased_scores_only() -> None:
    quality = QualityScorer([REFERENCES], "word").score([line.upper() for line in REFERENCES])
    values = {name: score.value for name, score in quality.scores.items()}
    assert values["BLEU"] == pytest.approx(100)
    assert values["chrF2"] == pytest.approx(100)
    assert values["BLEU_cased"] < 50
    assert values["chrF2_cased"] < 50


def test_shuffled_hypotheses_score_lower() -> None:
    scorer, shuffled = QualityScorer([REFERENCES], "word"), with_errors(REFERENCES)
    before = scorer.score(shuffled).scores
    random.Random(3).shuffle(shuffled)
    after = scorer.score(shuffled).scores
    assert all(after[name].value < before[name].value - 10 for name in before)


def test_empty_hypotheses_score_nothing() -> None:
    quality = QualityScorer([REFERENCES], "word").score([""] * len(REFERENCES))
    assert {score.value for score in quality.scores.values()} == {0}
    assert (quality.brevity_penalty, set(quality.precisions)) == (0, {0})


def test_one_match_among_empty_hypotheses_is_scored() -> None:
    """Some of its resamples have no match at all."""
    quality = QualityScorer([REFERENCES], "word").score([REFERENCES[0], *[""] * 5])
    low, high = quality.scores["BLEU"].interval
    assert 0 <= low < high <= 100


def test_a_missing_reference_is_none_at_all() -> None:
    sparse = ["", *OTHER_GERMAN[1:]]
    score = QualityScorer([REFERENCES, sparse], "word").score(OTHER_GERMAN).scores["BLEU"]
    full = QualityScorer([REFERENCES, OTHER_GERMAN], "word").score(OTHER_GERMAN).scores["BLEU"]
    assert score.signature.startswith("nrefs:var|")
    assert full.signature.startswith("nrefs:2|")
    assert score.value < full.value == pytest.approx(100)
    # a reference that is missing in every line has no effect
    single = QualityScorer([REFERENCES], "word").score(OTHER_GERMAN)
    assert QualityScorer([REFERENCES, [""] * 6], "word").score(OTHER_GERMAN) == single


def test_a_sentence_without_any_reference_is_scored() -> None:
    assert QualityScorer([["", "b"], ["", ""]], "word").score(["a", "b"]).scores["chrF2"].value > 0


def test_counts_must_agree() -> None:
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([REFERENCES], "word").score(REFERENCES[1:])
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([REFERENCES], "word").compare(REFERENCES, REFERENCES[1:])
    with pytest.raises(DataError, match="reference files have 5 and 6 lines; expected the same number in each"):
        QualityScorer([REFERENCES, REFERENCES[1:]], "word")


def test_paired_bootstrap_agrees_with_the_command_line(tmp_path: Path) -> None:
    baseline, system = with_errors(REFERENCES), [REFERENCES[0], *with_errors(REFERENCES)[1:]]
    differences = QualityScorer([REFERENCES], "word").compare(baseline, system)
    said = sacrebleu([REFERENCES], [baseline, system], tmp_path, "--paired-bs", "-f", "text", *LOWER_CASE)
    for difference in differences.values():
        assert f" {difference.baseline:.6f} (" in said
        assert f" {difference.system:.6f} (" in said
        assert f"(p = {difference.p:.4f})" in said
        assert f" {difference.signature}\n" in said
        assert difference.gain == difference.system - difference.baseline


def test_significance() -> None:
    scorer = QualityScorer([REFERENCES], "word")
    equal, better = (
        scorer.compare(REFERENCES, REFERENCES)["BLEU"],
        scorer.compare(with_errors(REFERENCES), REFERENCES)["BLEU"],
    )
    assert (equal.gain, equal.p) == (0, 1)
    assert better.gain > 10
    assert better.p < 0.05


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
