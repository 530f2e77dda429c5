"""Scores and significance against sacrebleu, and the flaws of a translation."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from eval.sentences import ENGLISH, GERMAN
from simulmt.errors import ConfigError, DataError
from simulmt.eval.latency import Instance
from simulmt.eval.quality import (
    COMPARISON_HEADINGS,
    FactChecker,
    Lexicon,
    QualityScorer,
    compare,
    comparison_json,
    comparison_markdown,
    comparison_signatures,
    is_negated,
    listing,
    may_be_negated,
    repeated_words,
    words_of,
)
from simulmt.eval.results import Result, write_results
from simulmt.eval.run import Evaluation
from simulmt.text.numbers import Number, find_numbers, unmatched
from simulmt.text.words import Unit, guess_language

GERMAN_LINES = [
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
EVERYDAY = Path(__file__).parents[1] / "everyday"

SOURCES = [
    "The company has 3000 customers and 12 offices.",
    "About 1.5 billion people have not seen it.",
    "This is the first of the two days.",
    "She is not here.",
]
REFERENCES = [
    ["该公司有3000名客户和十二个办事处。", "约15亿人没有看过它。", "这是第一天。", "她不在这里。"],
    ["公司有三千名客户。", "大约十五亿人从未见过它。", "", "她出去了。"],
]


def with_errors(lines: Sequence[str]) -> list[str]:
    """Return lines with a missing part each, some in another case."""
    return [line[: len(line) // 2] + line[len(line) // 2 + 2 :].upper() for line in lines]


@pytest.mark.parametrize(
    ("unit", "references", "hypotheses", "cased"),
    [
        ("word", [GERMAN_LINES], with_errors(GERMAN_LINES), False),
        ("word", [GERMAN_LINES, OTHER_GERMAN], with_errors(GERMAN_LINES), True),
        ("word", [GERMAN_LINES], [f"{line} {line}" for line in GERMAN_LINES], False),
        ("word", [GERMAN_LINES], ["", *GERMAN_LINES[1:]], False),
        ("char", [CHINESE], with_errors(CHINESE), False),
    ],
    ids=["one reference", "two references", "longer than the reference", "one empty", "Chinese"],
)
def test_the_command_line_of_sacrebleu_agrees(
    unit: Unit, references: list[list[str]], hypotheses: list[str], cased: bool, tmp_path: Path
) -> None:
    quality = QualityScorer(references).score(hypotheses)
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
    quality = QualityScorer([["A b c d f g"]]).score(["a b c d e"])
    assert quality.precisions == pytest.approx((80, 75, 200 / 3, 50))
    assert quality.brevity_penalty == pytest.approx(math.exp(1 - 6 / 5))
    expected = 100 * math.exp(1 - 6 / 5) * (0.8 * 0.75 * 2 / 3 * 0.5) ** 0.25
    assert quality.scores["BLEU"].value == pytest.approx(expected)
    assert quality.scores["BLEU"].interval == pytest.approx((expected, expected))  # resamples of one sentence
    assert quality.scores["BLEU_cased"].value < expected


def test_a_perfect_translation_scores_a_hundred() -> None:
    for lines in (GERMAN_LINES, CHINESE):
        quality = QualityScorer([lines]).score(lines)
        assert [score.value for score in quality.scores.values()] == pytest.approx([100] * 4)
        assert quality.brevity_penalty == 1


def test_case_counts_in_the_cased_scores_only() -> None:
    quality = QualityScorer([GERMAN_LINES]).score([line.upper() for line in GERMAN_LINES])
    values = {name: score.value for name, score in quality.scores.items()}
    assert values["BLEU"] == pytest.approx(100)
    assert values["chrF2"] == pytest.approx(100)
    assert values["BLEU_cased"] < 50
    assert values["chrF2_cased"] < 50


def test_shuffled_hypotheses_score_lower() -> None:
    scorer, shuffled = QualityScorer([GERMAN_LINES]), with_errors(GERMAN_LINES)
    before = scorer.score(shuffled).scores
    random.Random(3).shuffle(shuffled)
    after = scorer.score(shuffled).scores
    assert all(after[name].value < before[name].value - 10 for name in before)


def test_empty_hypotheses_score_nothing() -> None:
    quality = QualityScorer([GERMAN_LINES]).score([""] * len(GERMAN_LINES))
    assert {score.value for score in quality.scores.values()} == {0}
    assert (quality.brevity_penalty, set(quality.precisions)) == (0, {0})


def test_one_match_among_empty_hypotheses_is_scored() -> None:
    """Some of its resamples have no match at all."""
    quality = QualityScorer([GERMAN_LINES]).score([GERMAN_LINES[0], *[""] * 5])
    low, high = quality.scores["BLEU"].interval
    assert 0 <= low < high <= 100


def test_a_missing_reference_is_none_at_all() -> None:
    sparse = ["", *OTHER_GERMAN[1:]]
    score = QualityScorer([GERMAN_LINES, sparse]).score(OTHER_GERMAN).scores["BLEU"]
    full = QualityScorer([GERMAN_LINES, OTHER_GERMAN]).score(OTHER_GERMAN).scores["BLEU"]
    assert score.signature.startswith("nrefs:var|")
    assert full.signature.startswith("nrefs:2|")
    assert score.value < full.value == pytest.approx(100)
    # a reference that is missing in every line has no effect
    single = QualityScorer([GERMAN_LINES]).score(OTHER_GERMAN)
    assert QualityScorer([GERMAN_LINES, [""] * 6]).score(OTHER_GERMAN) == single


def test_a_sentence_without_any_reference_is_scored() -> None:
    assert QualityScorer([["", "b"], ["", ""]]).score(["a", "b"]).scores["chrF2"].value > 0


def test_counts_must_agree() -> None:
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([GERMAN_LINES]).score(GERMAN_LINES[1:])
    with pytest.raises(DataError, match="expected 6 hypotheses, one per reference, got 5"):
        QualityScorer([GERMAN_LINES]).compare(GERMAN_LINES, GERMAN_LINES[1:])
    with pytest.raises(DataError, match="reference files have 5 and 6 lines; expected the same number in each"):
        QualityScorer([GERMAN_LINES, GERMAN_LINES[1:]])


def test_paired_bootstrap_agrees_with_the_command_line(tmp_path: Path) -> None:
    baseline, system = with_errors(GERMAN_LINES), [GERMAN_LINES[0], *with_errors(GERMAN_LINES)[1:]]
    differences = QualityScorer([GERMAN_LINES]).compare(baseline, system)
    said = sacrebleu([GERMAN_LINES], [baseline, system], tmp_path, "--paired-bs", "-f", "text", *LOWER_CASE)
    for difference in differences.values():
        assert f" {difference.baseline:.6f} (" in said
        assert f" {difference.system:.6f} (" in said
        assert f"(p = {difference.p:.4f})" in said
        assert f" {difference.signature}\n" in said
        assert difference.gain == difference.system - difference.baseline


def test_significance() -> None:
    scorer = QualityScorer([GERMAN_LINES])
    equal, better = (
        scorer.compare(GERMAN_LINES, GERMAN_LINES)["BLEU"],
        scorer.compare(with_errors(GERMAN_LINES), GERMAN_LINES)["BLEU"],
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


def test_incomparable_systems_are_refused(tmp_path: Path) -> None:
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
    lines = comparison_markdown(comparisons).splitlines()
    assert lines[0] == f"| {' | '.join(COMPARISON_HEADINGS)} |"
    assert lines[2] == "| test | 3 | base | 50.00 |  |  | 60.00 |  |  | 2.50 |"
    BLEU, chrF2 = comparisons[1].BLEU, comparisons[1].chrF2
    assert BLEU is not None
    assert chrF2 is not None
    cells = f"50.00 | {BLEU.gain:+.2f} | {BLEU.p:.3f}* | 60.00 | {chrF2.gain:+.2f} | {chrF2.p:.3f}*"
    assert lines[3] == f"| test | 3 | good | {cells} | 2.50 |"
    assert lines[4] == ""
    assert lines[5:] == [f"- {signature}" for signature in comparison_signatures(comparisons)]
    assert len(comparison_signatures(comparisons)) == 2


def test_insignificant_differences_are_not_starred(tmp_path: Path) -> None:
    save(tmp_path, "base", 3, GERMAN)
    save(tmp_path, "same", 3, [*GERMAN[:4], WORSE[4]])
    assert "*" not in comparison_markdown(compare([tmp_path])).splitlines()[3]


def test_json(tmp_path: Path) -> None:
    save(tmp_path, "base", None, WORST)
    save(tmp_path, "good", 3, GERMAN)
    comparisons = compare([tmp_path])
    base, good = (json.loads(json.dumps(comparison_json(comparison))) for comparison in comparisons)
    assert base == {
        "test_set": "test",
        "system": "base",
        "delay": None,
        "AL": 2.5,
        "BLEU": {"score": 50.0},
        "chrF2": {"score": 60.0},
    }
    assert good["BLEU"].keys() == {"score", "baseline", "gain", "p", "signature"}


@pytest.mark.parametrize(
    ("translations", "numbers_kept", "negations_kept"),
    [
        (REFERENCES[0], 3, 1),
        (["公司有3,000个客户、12个办公室。", "约1500000000人没看过。", "。", "。"], 3, 1),
        (["公司有30000名客户和12个办事处。", "约1.5亿人看过它。", "这是第二天。", "她在这里。"], 1, 0),
        (["", "", "", ""], 0, 0),
    ],
)
def test_facts_are_counted(translations: list[str], numbers_kept: int, negations_kept: int) -> None:
    """Worked by hand: 3000, 12 and 1.5 billion are in a reference, "two" is in none; one reference has no negation."""
    counts = FactChecker(SOURCES, REFERENCES).count(translations)
    assert counts == {
        "numbers": 3,
        "numbers_kept": numbers_kept,
        "negations": 1,
        "negations_kept": negations_kept,
    }


def test_lost_facts_are_marked_in_the_listing() -> None:
    references = [lines[:2] for lines in REFERENCES]
    lines = list(listing(SOURCES[:2], {"k3": ["公司有30000名客户和12个办事处。", "约15亿人看过它。"]}, references))
    assert lines == [
        "   1  The company has 3000 customers and 12 offices.",
        "      k3         公司有30000名客户和12个办事处。   <-- number lost",
        "      reference  该公司有3000名客户和十二个办事处。",
        "      reference  公司有三千名客户。",
        "",
        "   2  About 1.5 billion people have not seen it.",
        "      k3         约15亿人看过它。   <-- negation lost",
        "      reference  约15亿人没有看过它。",
        "      reference  大约十五亿人从未见过它。",
        "",
    ]


def read(name: str) -> list[str]:
    return (EVERYDAY / name).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("pair", ["en-zh", "de-en"])
def test_facts_of_the_everyday_sentences_are_those_written_down(pair: str) -> None:
    """The numbers and negations found in source and references are those annotated by hand."""
    source, target = pair.split("-")
    references = [read(f"{pair}.{target}{number}") for number in range(3)]
    rows = [line.split("\t") for line in read(f"{pair}.facts.tsv")[1:]]
    sources = read(f"{pair}.{source}")
    assert len(sources) == len(rows) == 100
    assert [row[0] for row in rows] == [str(number) for number in range(1, 101)]
    for text, translations, (_, numbers, negated, _) in zip(sources, zip(*references, strict=True), rows, strict=True):
        noted = [Number(frozenset({Fraction(value)})) for value in numbers.split()]
        found = find_numbers(text, source)
        assert not unmatched(noted, found), text
        assert not unmatched(found, noted), text
        assert is_negated(text, source) == (negated == "yes"), text
        for translation in translations:
            assert not unmatched(noted, find_numbers(translation, target)), translation
            assert negated == "no" or is_negated(translation, target), translation


@pytest.mark.parametrize("pair", ["en-zh", "de-en"])
def test_a_reference_keeps_all_facts(pair: str) -> None:
    source, target = pair.split("-")
    references = [read(f"{pair}.{target}{number}") for number in range(3)]
    checker = FactChecker(read(f"{pair}.{source}"), references)
    for lines in references:
        counts = checker.count(lines)
        assert counts["numbers"] == counts["numbers_kept"] >= 28
        assert counts["negations"] == counts["negations_kept"] >= 18


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the table.", "en"),
        ("Die Katze ist auf dem Tisch.", "de"),
        ("猫在桌子上。", "zh"),
        ("NBA 总决赛在 iPhone 上观看。", "zh"),
        ("ねこはテーブルの上にいます。", ""),
        ("Le chat est sur la table.", ""),
        ("river bridge harbor", ""),
        ("", ""),
    ],
)
def test_guessing_a_language(text: str, language: str) -> None:
    assert guess_language([text]) == language


@pytest.mark.parametrize(
    ("text", "unit", "count"),
    [
        ("the the dog", "word", 1),
        ("The the the dog", "word", 2),
        ("the dog the dog", "word", 0),
        ("3 3 dogs , , barked", "word", 0),
        ("", "word", 0),
        ("他他来了", "char", 1),
        ("价格价格上涨", "char", 1),
        ("天天天", "char", 2),
        ("100 00，，。。", "char", 0),
        ("他来他来", "char", 1),
        ("来他，他来", "char", 0),
    ],
)
def test_repeated_words_are_counted(text: str, unit: Unit, count: int) -> None:
    assert repeated_words(text, unit) == count


def test_only_alphabetic_words_count() -> None:
    assert words_of("Don't re-enter 42 rooms, 你好orld。Größe A-3") == [
        "don't",
        "re-enter",
        "rooms",
        "orld",
        "größe",
        "a",
    ]


def test_words_are_unknown_unless_in_the_lexicon_or_the_source() -> None:
    lexicon = Lexicon(["The world is large .", "Hello , neighbours"])
    assert lexicon.unknown("hello orld of Zyx 42", "Hallo Welt von Zyx") == ["orld", "of"]
    assert lexicon.unknown("你好orld，世界", "Hello world") == ["orld"]
    assert lexicon.unknown("", "Hello") == []


@pytest.mark.parametrize(
    ("text", "language", "negated"),
    [
        ("This is not safe.", "en", True),
        ("I don't know.", "en", True),
        ("I can’t.", "en", True),
        ("She has NEVER been there.", "en", True),
        ("There is no milk.", "en", True),
        ("Nobody came, neither he nor she.", "en", True),
        ("we dont have any", "en", True),
        ("Not only he came.", "en", False),
        ("Should we go or not?", "en", False),
        ("Nice day, isn't it?", "en", False),
        ("No, he came.", "en", False),
        ("A note on the notable nobility.", "en", False),
        ("Das ist nicht sicher.", "de", True),
        ("Auf keinen Fall!", "de", True),
        ("Wir haben keine Milch.", "de", True),
        ("Weder er noch sie kam.", "de", True),
        ("Nicht nur er kam.", "de", False),
        ("Die Nichte nickt.", "de", False),
        ("这不安全。", "zh", True),
        ("她从来没去过。", "zh", True),
        ("别忘了锁门。", "zh", True),
        ("请勿吸烟。", "zh", True),
        ("无法回答。", "zh", True),
        ("他从未来过。", "zh", True),
        ("不同的人，不过很好。", "zh", False),
        ("你去不去？", "zh", False),
        ("我们不得不走。", "zh", False),
        ("非常特别，别人都知道。", "zh", False),
        ("未来很美好。", "zh", False),
        ("Ce n'est pas vrai.", "fr", False),
    ],
)
def test_negation(text: str, language: str, negated: bool) -> None:
    assert is_negated(text, language) is negated


def test_other_words_may_say_the_same() -> None:
    assert may_be_negated("He was unable to come.", "en")
    assert may_be_negated("这很难理解。", "zh")
    assert not may_be_negated("她从来去过日本。", "zh")
    assert not may_be_negated("Il n'est pas là.", "fr")
