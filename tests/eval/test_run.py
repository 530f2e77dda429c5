from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tiny_models
from eval.sentences import CHINESE, ENGLISH, GERMAN
from simulmt.errors import ConfigError, DataError, StreamError
from simulmt.eval.latency import CompleteWords, Instance, split_units
from simulmt.eval.quality import Lexicon
from simulmt.eval.results import INSTANCES, SCORES, read_instances, read_results, write_instances
from simulmt.eval.run import (
    Evaluation,
    Evaluator,
    StreamOptions,
    TestSet,
    Timing,
    Translation,
    count_pieces,
    evenly_spaced,
    read_test_set,
    time_words,
    translate_all,
)
from simulmt.runtime.stream import Translator
from simulmt.text import Tokenizer, split_words
from simulmt.text.words import Unit
from tiny_models import LONGEST, joined

UNTIMED = Timing(sentences=0)


@pytest.fixture
def test_set(files: Path) -> TestSet:
    return read_test_set(files / "test.en", [files / "test.de"])


def logged(test_set: TestSet, predictions: Sequence[str], directory: Path) -> Path:
    """Write a log in which every word was written after the whole source was read."""
    entries = []
    for index, (source, prediction) in enumerate(zip(test_set.sources, predictions, strict=True)):
        length = len(source.split())
        delays = (length,) * len(prediction.split())
        entries.append(Instance(index, source, (test_set.references[0][index],), prediction, delays, length))
    write_instances(directory, entries)
    return directory


def score_log(test_set: TestSet, predictions: Sequence[str], directory: Path) -> Evaluation:
    return Evaluator(test_set, "auto", UNTIMED).score_log("logged", logged(test_set, predictions, directory), 3)


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


def test_sgm_files_are_read_by_segment(tmp_path: Path) -> None:
    """As WMT published test sets until 2019, with all reference sets of a file."""
    source, reference = tmp_path / "test.src.sgm", tmp_path / "test.ref.sgm"
    source.write_text('<srcset><doc docid="a">\n<seg id="1">One &amp; two.</seg>\n</doc></srcset>\n')
    document = '<doc sysid="{}" docid="a"><seg id="1">{}</seg></doc>\n'
    reference.write_text(f"<refset>{document.format('A', 'Eins.')}{document.format('B', 'Ein.')}</refset>\n")
    found = read_test_set(source, [reference])
    assert (found.name, found.sources, found.references) == ("test", ("One & two.",), (("Eins.",), ("Ein.",)))


def test_unequal_counts_are_refused_with_both(files: Path, tmp_path: Path) -> None:
    (tmp_path / "short.de").write_text("eins\nzwei\n", encoding="utf-8")
    paths = re.escape(f"{tmp_path / 'short.de'} has 2 sentences but {files / 'test.en'} has 5")
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
    evaluation = Evaluator(test_set, "auto", Timing(2, 2), news.append).score_bundle("toy", german, 3, threads=1)
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


def test_written_results_are_complete(german: Translator, test_set: TestSet, tmp_path: Path) -> None:
    evaluation = Evaluator(test_set, "auto", UNTIMED).score_bundle("toy", german, 3, threads=1)
    evaluation.write(tmp_path)
    assert read_results(tmp_path) == [evaluation.result]
    assert (tmp_path / "toy-k3.hyp").read_text(encoding="utf-8").split("\n") == [*evaluation.hypotheses, ""]
    assert read_instances(tmp_path / "toy-k3") == evaluation.instances
    assert {path.name for path in tmp_path.iterdir()} == {SCORES, "toy-k3", "toy-k3.hyp"}
    table = json.loads((tmp_path / SCORES).read_text(encoding="utf-8"))
    assert table["AL_CA"] is None
    assert table["date"].endswith("+00:00")
    assert table["environment"]["sacrebleu"]


def test_wait_k_is_scored_as_it_reads_on_or_stops(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, test_set: TestSet, tmp_path: Path
) -> None:
    waiting = tiny_models.translator(
        tiny_models.trained("wait-k", source_tokenizer, target_tokenizer), "wait-k", "fp32", tmp_path
    )
    one = Timing(sentences=1, runs=1)
    reading_on, stopping = (
        Evaluator(test_set, "auto", one, stop_at_end=stops).score_bundle("wait-k", waiting, 1, threads=1)
        for stops in (False, True)
    )
    assert reading_on.hypotheses != stopping.hypotheses
    assert sum(map(len, stopping.hypotheses)) < sum(map(len, reading_on.hypotheses))


def test_lines_of_several_sentences_are_segmented_on_demand(german: Translator) -> None:
    lines = ["it rains. the door is open.", "the door is open."]
    test_set = TestSet("two", tuple(lines), (("es regnet. die tür ist offen.", "die tür ist offen."),), {})
    whole, segmented = (
        Evaluator(test_set, "auto", Timing(sentences=1, runs=1), segment=segment).score_bundle(
            "toy", german, 1, threads=1
        )
        for segment in (False, True)
    )
    stream = german.stream(1)
    expected = joined([*stream.push(lines[0]), *stream.finish()])
    assert segmented.hypotheses[0] == " ".join(expected.split()) != whole.hypotheses[0]
    assert segmented.hypotheses[1] == whole.hypotheses[1]
    assert segmented.instances[0].delays[-1] == 6
    assert (whole.result.segment, segmented.result.segment) == (False, True)


def test_several_references_are_logged_and_scored(chinese: Translator, files: Path) -> None:
    test_set = read_test_set(files / "test.en", [files / "test.zh", files / "test.zh"])
    evaluation = Evaluator(test_set, "auto", UNTIMED).score_bundle("toy", chinese, 1, threads=1)
    assert evaluation.result.signature.startswith("nrefs:2|")
    assert "tok:zh" in evaluation.result.signature
    assert evaluation.result.unit == "char"
    assert evaluation.instances[3].references == ("关上", "关上")


def test_a_log_of_our_own_gives_the_same_figures(german: Translator, test_set: TestSet, tmp_path: Path) -> None:
    evaluator = Evaluator(test_set, "auto", UNTIMED)
    first = evaluator.score_bundle("toy", german, 3, threads=1)
    first.write(tmp_path)
    again = evaluator.score_log("toy", tmp_path / "toy-k3", 3)
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


def test_repeated_and_unknown_words_are_counted(test_set: TestSet, tmp_path: Path) -> None:
    first, *others = GERMAN
    word = first.split()[1]
    flawed = [first.replace(word, f"{word} {word} {word[:-2]}xq"), *others]
    entries = logged(test_set, flawed, tmp_path)
    with_lexicon = Evaluator(test_set, "auto", UNTIMED, lexicon=Lexicon(GERMAN)).score_log("logged", entries, 3).result
    assert (with_lexicon.repeated_words, with_lexicon.reference_repeated_words, with_lexicon.unknown_words) == (1, 0, 1)
    assert Evaluator(test_set, "auto", UNTIMED).score_log("logged", entries, 3).result.unknown_words is None


def test_a_long_hypothesis_is_not_fast(test_set: TestSet, tmp_path: Path) -> None:
    """Twice the words, all after the source: LAAL stays the same, and BLEU drops."""
    result = score_log(test_set, [f"{line} {line}" for line in GERMAN], tmp_path).result
    assert (result.BP, result.LAAL) == (1, result.AL)
    assert result.BLEU < 70


def test_a_log_must_be_of_the_test_set(test_set: TestSet, tmp_path: Path) -> None:
    evaluator = Evaluator(test_set, "auto", UNTIMED)
    short = replace(test_set, sources=test_set.sources[:4])
    with pytest.raises(DataError, match=r"instances\.log has 4 sentences, expected the 5 of .*test\.en"):
        evaluator.score_log("x", logged(short, GERMAN[:4], tmp_path), 3)
    swapped = replace(test_set, sources=(*test_set.sources[:3], "Another one", test_set.sources[4]))
    with pytest.raises(DataError, match=r"instances\.log:4: the source differs from line 4 of .*test\.en"):
        evaluator.score_log("x", logged(swapped, GERMAN, tmp_path), 3)


def test_the_references_choose_the_tokenizer_of_bleu(files: Path, tmp_path: Path) -> None:
    """SimulEval logs one delay per word unless told otherwise; then what was written at once counts as a word."""
    test_set = read_test_set(files / "test.en", [files / "test.zh"])
    twice = [line.replace("上", " 上 上") for line in CHINESE]
    log = logged(test_set, twice, tmp_path)
    warnings: list[str] = []
    result = Evaluator(test_set, "auto", UNTIMED, warn=warnings.append).score_log("x", log, 3).result
    assert "tok:zh" in result.signature
    assert result.BLEU > 50
    assert (result.unit, result.repeated_words, result.reference_repeated_words) == ("word", 1, 1)  # 等等
    (warning,) = warnings
    assert f"{log / INSTANCES} has one delay per space-separated word" in warning
    assert warning.endswith("run SimulEval again with --eval-latency-unit char")


def test_the_unit_of_delays_does_not_change_bleu(german: Translator, test_set: TestSet) -> None:
    warnings: list[str] = []
    words, characters = (
        Evaluator(test_set, unit, UNTIMED, warn=warnings.append).score_bundle("x", german, 3, threads=1).result
        for unit in ("word", "char")
    )
    assert (words.BLEU, words.signature) == (characters.BLEU, characters.signature)
    assert words.repeated_words == characters.repeated_words
    assert warnings == []


def test_impossible_units_are_refused(
    german: Translator, chinese: Translator, test_set: TestSet, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--unit word: .* writes no spaces"):
        Evaluator(test_set, "word", UNTIMED).score_bundle("x", chinese, 3, threads=1)
    with pytest.raises(
        ConfigError, match=r"--unit char: .* per word; run SimulEval again with --eval-latency-unit char"
    ):
        Evaluator(test_set, "char", UNTIMED).score_log("x", logged(test_set, GERMAN, tmp_path), 3)
    assert Evaluator(test_set, "char", UNTIMED).score_bundle("x", german, 3, threads=1).result.unit == "char"


@pytest.mark.parametrize("wrong", [{"sentences": -1}, {"runs": 0}, {"words_per_second": 0.0}])
def test_timing_checks_its_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Timing(**wrong)


def test_evenly_spread() -> None:
    assert evenly_spaced("abcdefghij", 3) == ["a", "d", "g"]
    assert evenly_spaced("abc", 3) == evenly_spaced("abc", 9) == ["a", "b", "c"]


WORDS = st.lists(
    st.sampled_from(["the", "bridge", "closed.", "Wait!", "小心", "harbour", "x。y"]), min_size=1, max_size=30
)


def translate(translator: Translator, sources: list[str], delay: int | None, unit: Unit) -> list[Translation]:
    return translate_all(translator, sources, delay, unit, lambda _: None)


def word_by_word(translator: Translator, source: str, delay: int | None, unit: Unit) -> Translation:
    """Apply the definitions: count the words pushed when each unit is complete."""
    stream, words = translator.stream(delay, segment=False), CompleteWords(translator.bundle.target.spaced)
    text, delays = "", []
    for read, word in enumerate(source.split(), start=1):
        commits = stream.push(f"{word} ")
        text += joined(commits)
        delays += [read] * len(split_units("".join(words.push(commit.text) for commit in commits), unit))
    rest = joined(stream.finish())
    delays += [read] * len(split_units(words.push(rest) + words.finish(), unit))
    return Translation(text + rest, tuple(delays))


@settings(deadline=None, max_examples=15)
@given(st.lists(WORDS.map(" ".join), min_size=1, max_size=4), st.sampled_from([1, 3]))
@example(ENGLISH, 3)  # the last of which is just too long for the model
def test_a_batch_gives_what_single_streams_give(
    german: Translator, chinese: Translator, sources: list[str], delay: int
) -> None:
    for translator, unit in ((german, "word"), (german, "char"), (chinese, "char")):
        expected = [word_by_word(translator, source, delay, unit) for source in sources]  # type: ignore[arg-type]
        assert translate(translator, sources, delay, unit) == expected  # type: ignore[arg-type]


def test_wait_k_reads_on_or_stops_at_its_own_end(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tiny_models.trained("wait-k", source_tokenizer, target_tokenizer)
    waiting = tiny_models.translator(model, "wait-k", "fp32", tmp_path)
    lines = ENGLISH[:4]  # the last is too long for the model, and would be cut
    for delay in (1, 3):
        reading_on = translate(waiting, lines, delay, "word")
        stopping = translate_all(waiting, lines, delay, "word", lambda _: None, StreamOptions(reads_on=False))
        assert [each.text for each in reading_on] == [tiny_models.reference(model, line, delay) for line in lines]
        assert [each.text for each in stopping] == [
            tiny_models.reference(model, line, delay, stop_at_end=True) for line in lines
        ]
        pairs = list(zip(reading_on, stopping, strict=True))
        assert all(longer.text.startswith(shorter.text) for longer, shorter in pairs)
        assert any(longer.text != shorter.text for longer, shorter in pairs)
        assert all(len(shorter.delays) == len(shorter.text.split()) for _, shorter in pairs)


def test_there_is_a_delay_for_each_unit(german: Translator, chinese: Translator) -> None:
    for translation in translate(german, ENGLISH, 3, "word"):
        assert len(translation.delays) == len(translation.text.split())
    for translation in translate(chinese, ENGLISH, 3, "char"):
        assert len(translation.delays) == len(translation.text.replace(" ", ""))


def test_a_line_is_one_sentence(german: Translator) -> None:
    stream = german.stream(3, segment=False)
    commits = [*stream.push("Wait. Is the harbour closed? Nobody knows. "), *stream.finish()]
    assert {commit.sentence for commit in commits} == {0}
    assert stream.sentences_finished == 1
    plain = german.stream(3)
    assert {commit.sentence for commit in [*plain.push("Wait. Is it closed? Yes. "), *plain.finish()]} == {0, 1, 2}


def test_a_line_too_long_for_the_model_is_cut(german: Translator) -> None:
    source = " ".join(["bridge"] * LONGEST)
    stream = german.stream(3, segment=False)
    stream.push(source)
    stream.finish()
    assert stream.sentences_finished > 1
    (translation,) = translate(german, [source], 3, "word")
    assert translation.delays[-1] == LONGEST


def test_a_line_too_long_for_the_model_is_cut_where_a_stream_cuts_it(german: Translator) -> None:
    """Between words, so that the output of a stream is what is scored."""
    pieces = len(german.bundle.source.encode_word("neighbour"))
    assert pieces > 1
    assert pieces < LONGEST - 1
    assert (LONGEST - 1) % pieces, "a cut in the middle of a word must be possible"
    source = " ".join(["neighbour"] * LONGEST)
    stream = german.stream(3)
    live = joined([*stream.push(source), *stream.finish()])
    (translation,) = translate(german, [source], 3, "word")
    assert translation.text == live


def test_a_whole_sentence_model_writes_at_the_end(teacher: Translator) -> None:
    for source, translation in zip(ENGLISH, translate(teacher, ENGLISH, None, "word"), strict=True):
        assert set(translation.delays) <= {len(source.split())}


def test_a_delay_that_was_not_trained_is_refused(german: Translator) -> None:
    with pytest.raises(StreamError, match="was trained for 1, 2, 3, 5"):
        translate(german, ENGLISH, 4, "word")


def test_progress_counts_sentences(german: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulmt.eval.run.STREAMS", 2)
    news: list[int] = []
    assert translate_all(german, ENGLISH, 1, "word", news.append) == translate(german, ENGLISH, 1, "word")
    assert news == [2, 4, 5]


def test_each_word_is_timed(german: Translator, clock: Iterator[float]) -> None:
    """The clock is read before and after each word: at 0 and 1 s, 3 and 6 s, 10 and 15 s, 21 and 28 s."""
    assert time_words(german, "The old bridge closed", 3, clock=clock.__next__) == [1.0, 3.0, 5.0, 7.0]


def test_pieces_are_those_that_the_model_reads(german: Translator) -> None:
    for source in ENGLISH:
        counts = count_pieces(german, source)
        assert len(counts) == len(source.split())
        assert sum(counts) == len(german.bundle.source.encode(source)) + 1
        assert all(count >= len(split_words(word)) for count, word in zip(counts, source.split(), strict=True))
    assert count_pieces(german, "\u200b the") == [1, 1 + len(german.bundle.source.encode("the"))]
