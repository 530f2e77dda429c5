from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.errors import ConfigError, DataError
from simulmt.eval.evaluate import Evaluation, Evaluator, TestSet, Timing, evenly_spread, read_test_set
from simulmt.eval.flaws import Lexicon
from simulmt.eval.instances import Instance, read_instances, write_instances
from simulmt.eval.results import INSTANCES, SCORES, read_results
from simulmt.stream import Translator

UNTIMED = Timing(sentences=0)


@pytest.fixture
def test_set(files: Path) -> TestSet:
    return read_test_set(files / "test.en", [files / "test.de"])


def logged(test_set: TestSet, predictions: Sequence[str], directory: Path) -> Path:
    """A log in which every word was written when the whole source had been read."""
    entries = []
    for index, (source, prediction) in enumerate(zip(test_set.sources, predictions, strict=True)):
        length = len(source.split())
        delays = (length,) * len(prediction.split())
        entries.append(Instance(index, source, (test_set.references[0][index],), prediction, delays, length))
    write_instances(directory, entries)
    return directory


def score_log(test_set: TestSet, predictions: Sequence[str], directory: Path) -> Evaluation:
    return Evaluator(test_set, "auto", UNTIMED).log("logged", logged(test_set, predictions, directory), 3)


def test_a_test_set_is_read_with_its_checksums(files: Path) -> None:
    test_set = read_test_set(files / "test.en", [files / "test.de", files / "test.zh"])
    assert test_set.name == "test"
    assert test_set.sources == tuple(ENGLISH)
    assert test_set.references == (tuple(GERMAN), tuple(CHINESE))
    digest = hashlib.sha256((files / "test.en").read_bytes()).hexdigest()
    assert test_set.files[str(files / "test.en")] == digest
    assert len(test_set.files) == 3


def test_a_limit_keeps_the_first_sentences(files: Path) -> None:
    test_set = read_test_set(files / "test.en", [files / "test.de"], "mine", limit=2)
    assert (test_set.name, test_set.sources, test_set.references) == ("mine", tuple(ENGLISH[:2]), (tuple(GERMAN[:2]),))


def test_unequal_counts_are_refused_with_both(files: Path, tmp_path: Path) -> None:
    (tmp_path / "short.de").write_text("eins\nzwei\n", encoding="utf-8")
    paths = re.escape(f"{tmp_path / 'short.de'} has 2 lines but {files / 'test.en'} has 5")
    with pytest.raises(DataError, match=paths):
        read_test_set(files / "test.en", [files / "test.de", tmp_path / "short.de"])


def test_missing_files_are_refused(files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.de: no such file"):
        read_test_set(files / "test.en", [tmp_path / "none.de"])
    with pytest.raises(ConfigError, match="give at least one --reference"):
        read_test_set(files / "test.en", [])


def test_an_empty_sentence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.en").write_text("one\n \nthree\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"test\.en:2: an empty sentence"):
        read_test_set(tmp_path / "test.en", [tmp_path / "test.en"])


def test_a_bundle_is_scored(german: Translator, test_set: TestSet) -> None:
    news: list[str] = []
    evaluation = Evaluator(test_set, "auto", Timing(2, 2), news.append).bundle("toy", german, 3, threads=1)
    result = evaluation.result
    assert (result.system, result.delay, result.test_set, result.unit) == ("toy", 3, "test", "word")
    assert (result.sentences, result.timed_sentences, result.timed_runs, result.threads) == (5, 2, 2, 1)
    assert result.signature == result.signatures["BLEU"]
    assert "tok:13a" in result.signature
    assert "case:mixed" in result.signatures["chrF2_cased"]
    assert result.BLEU_interval is not None
    assert result.BLEU_interval[0] <= result.BLEU_interval[1]
    manifest = (german.bundle.directory / "manifest.json").read_bytes()
    assert result.bundle_sha256 == hashlib.sha256(manifest).hexdigest()
    assert result.files == test_set.files
    assert evaluation.hypotheses[3] == german.translate(ENGLISH[3], 3)
    assert evaluation.instances[3].prediction == evaluation.hypotheses[3]
    assert None not in (result.AL_CA, result.paced_lag, result.compute_ms_p95)
    assert result.compute_ms_median is not None
    assert result.compute_ms_p99 is not None
    assert 0 < result.compute_ms_median <= result.compute_ms_p99
    assert news[-2:] == ["toy-k3: timing 2 sentences, run 2 of 2", "toy-k3: scoring"]


def test_what_is_written_is_complete(german: Translator, test_set: TestSet, tmp_path: Path) -> None:
    evaluation = Evaluator(test_set, "auto", UNTIMED).bundle("toy", german, 3, threads=1)
    evaluation.write(tmp_path)
    assert read_results(tmp_path) == [evaluation.result]
    assert (tmp_path / "toy-k3.hyp").read_text(encoding="utf-8").split("\n") == [*evaluation.hypotheses, ""]
    assert read_instances(tmp_path / "toy-k3") == evaluation.instances
    assert {path.name for path in tmp_path.iterdir()} == {SCORES, "toy-k3", "toy-k3.hyp"}
    table = json.loads((tmp_path / SCORES).read_text(encoding="utf-8"))
    assert table["AL_CA"] is None
    assert table["date"].endswith("+00:00")
    assert table["environment"]["sacrebleu"]


def test_several_references_are_logged_and_scored(chinese: Translator, files: Path) -> None:
    test_set = read_test_set(files / "test.en", [files / "test.zh", files / "test.zh"])
    evaluation = Evaluator(test_set, "auto", UNTIMED).bundle("toy", chinese, 1, threads=1)
    assert evaluation.result.signature.startswith("nrefs:2|")
    assert "tok:zh" in evaluation.result.signature
    assert evaluation.result.unit == "char"
    assert evaluation.instances[3].references == ("关上", "关上")


def test_a_log_of_our_own_gives_the_same_figures(german: Translator, test_set: TestSet, tmp_path: Path) -> None:
    evaluator = Evaluator(test_set, "auto", UNTIMED)
    first = evaluator.bundle("toy", german, 3, threads=1)
    first.write(tmp_path)
    again = evaluator.log("toy", tmp_path / "toy-k3", 3)
    log = tmp_path / "toy-k3" / INSTANCES
    assert set(again.result.files) == {*test_set.files, str(log)}
    kept: Any = {"files": {}, "bundle_sha256": None, "threads": None, "date": None}
    assert replace(again.result, **kept) == replace(first.result, **kept)
    assert again.instances == first.instances


def test_a_log_by_hand(test_set: TestSet, tmp_path: Path) -> None:
    result = score_log(test_set, GERMAN, tmp_path).result
    assert round(result.BLEU, 6) == 100
    lengths = [len(source.split()) for source in ENGLISH]
    assert result.AL == result.DAL == pytest.approx(sum(lengths) / 5)
    assert (result.AP, result.end_offset, result.AL_CA, result.bundle_sha256) == (1, 0, None, None)


def test_shuffled_and_empty_hypotheses_score_lower(test_set: TestSet, tmp_path: Path) -> None:
    shuffled = random.Random(5).sample(GERMAN, k=5)
    scores = [
        score_log(test_set, predictions, tmp_path / str(number)).result
        for number, predictions in enumerate([GERMAN, shuffled, [""] * 5])
    ]
    assert scores[0].BLEU > scores[1].BLEU + 50
    assert scores[1].BLEU > scores[2].BLEU == 0
    assert [result.empty_hypotheses for result in scores] == [0, 0, 5]
    assert scores[2].AL == scores[0].AL  # silence is not fast


def test_flaws_are_counted(test_set: TestSet, tmp_path: Path) -> None:
    first, *others = GERMAN
    word = first.split()[1]
    flawed = [first.replace(word, f"{word} {word} {word[:-2]}xq"), *others]
    entries = logged(test_set, flawed, tmp_path)
    with_lexicon = Evaluator(test_set, "auto", UNTIMED, lexicon=Lexicon(GERMAN)).log("logged", entries, 3).result
    assert (with_lexicon.written_twice, with_lexicon.reference_written_twice, with_lexicon.torn_words) == (1, 0, 1)
    assert Evaluator(test_set, "auto", UNTIMED).log("logged", entries, 3).result.torn_words is None


def test_a_long_hypothesis_is_not_fast(test_set: TestSet, tmp_path: Path) -> None:
    """Twice the words, all after the source: LAAL stays, and BLEU pays."""
    result = score_log(test_set, [f"{line} {line}" for line in GERMAN], tmp_path).result
    assert (result.BP, result.LAAL) == (1, result.AL)
    assert result.BLEU < 70


def test_a_log_must_be_of_the_test_set(test_set: TestSet, tmp_path: Path) -> None:
    evaluator = Evaluator(test_set, "auto", UNTIMED)
    short = replace(test_set, sources=test_set.sources[:4])
    with pytest.raises(DataError, match=r"instances\.log has 4 sentences but 5 of .*test\.en are to be scored"):
        evaluator.log("x", logged(short, GERMAN[:4], tmp_path), 3)
    swapped = replace(test_set, sources=(*test_set.sources[:3], "Another one", test_set.sources[4]))
    with pytest.raises(DataError, match=r"instances\.log:4: its source is not line 4 of .*test\.en"):
        evaluator.log("x", logged(swapped, GERMAN, tmp_path), 3)


def test_units_that_cannot_be_are_refused(
    german: Translator, chinese: Translator, test_set: TestSet, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--unit word: .* writes no spaces"):
        Evaluator(test_set, "word", UNTIMED).bundle("x", chinese, 3, threads=1)
    with pytest.raises(ConfigError, match=r"--unit char: the delays of .* are one a word"):
        Evaluator(test_set, "char", UNTIMED).log("x", logged(test_set, GERMAN, tmp_path), 3)
    assert Evaluator(test_set, "char", UNTIMED).bundle("x", german, 3, threads=1).result.unit == "char"


@pytest.mark.parametrize("wrong", [{"sentences": -1}, {"runs": 0}, {"words_per_second": 0.0}])
def test_timing_checks_its_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Timing(**wrong)


def test_evenly_spread() -> None:
    assert evenly_spread("abcdefghij", 3) == ["a", "d", "g"]
    assert evenly_spread("abc", 3) == evenly_spread("abc", 9) == ["a", "b", "c"]
