from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.data import transforms
from simulmt.data.speech_noise import unpunctuated
from simulmt.data.transforms import (
    Dropped,
    HeldOut,
    Job,
    JoinedSet,
    Progress,
    Rewritten,
    SpeechConfig,
    WeightingConfig,
    filter_corpus,
    has_repetition,
    join_corpora,
    max_repetitions,
    numbers_disagree,
    reorder_corpus,
    speech_corpus,
    weight_corpus,
    write_once,
    write_pairs,
)
from simulmt.errors import ConfigError, DataError

from .helpers import lines, unchanged_texts, write

LINES: list[Rewritten] = [("a", "A"), Dropped("short"), ("b\u2028c", "B"), Dropped("odd", 40), Dropped("short")]


class PowerCutError(Exception):
    pass


def job(folder: Path, overwrite: bool = False, what: str = "test") -> Job:
    return Job(folder / "out", {"what": what}, [folder / "input"], overwrite)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail() -> Iterator[Rewritten]:
    yield "a", "A"
    raise PowerCutError


class TestWriting:
    def test_the_output_files_match_those_worked_out_by_hand(self, tmp_path: Path) -> None:
        told: list[Progress] = []
        record = write_pairs(job(tmp_path), lambda: LINES, told.append)
        assert (tmp_path / "out.source").read_text(encoding="utf-8") == "a\nb\u2028c\n"
        assert (tmp_path / "out.target").read_text(encoding="utf-8") == "A\nB\n"
        assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == record
        assert list(record) == ["identity", "what", "lines", "kept", "left"]
        assert (record["what"], record["lines"], record["kept"]) == ("test", 5, 2)
        assert record["left"] == {"short": [2, 5], "odd": [40]}
        assert sorted(files(tmp_path)) == ["out.json", "out.source", "out.target"]
        assert [progress.lines for progress in told] == [5]

    def test_a_finished_job_is_not_repeated(self, tmp_path: Path) -> None:
        first = write_pairs(job(tmp_path), lambda: LINES)
        assert write_pairs(job(tmp_path), lambda: pytest.fail("done again")) == first

    def test_files_of_other_jobs_are_replaced_only_on_request(self, tmp_path: Path) -> None:
        write_pairs(job(tmp_path, what="other"), lambda: LINES)
        before = files(tmp_path)
        with pytest.raises(DataError, match=r"out\.json: exists.*--overwrite"):
            write_pairs(job(tmp_path), lambda: LINES[:1])
        assert files(tmp_path) == before
        write_pairs(job(tmp_path, overwrite=True), lambda: LINES[:1])
        assert (tmp_path / "out.source").read_text() == "a\n"

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(PowerCutError):
            write_pairs(job(tmp_path), fail)
        assert files(tmp_path) == {}

    @pytest.mark.parametrize("cut", ["out.json", "out.source", "out.target"])
    def test_a_killed_job_is_repeated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
        """A killed job is repeated, whichever file was published last."""
        replace = Path.replace

        def cut_short(self: Path, target: Path) -> Path:
            if target.name == cut:
                raise PowerCutError
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", cut_short)
            with pytest.raises(PowerCutError):
                write_pairs(job(tmp_path), lambda: LINES)
        write_pairs(job(tmp_path), lambda: LINES)
        assert (tmp_path / "out.target").read_text() == "A\nB\n"


class TestWriteOnce:
    """`write_once` makes a file once, and never touches the file of another command."""

    @staticmethod
    def write_once(folder: Path, text: str, overwrite: bool = False) -> str:
        path = write_once(folder / "out.links", {"text": text}, overwrite, lambda: [f"{text} {time.monotonic_ns()}"])
        return path.read_text(encoding="utf-8")

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_it_is_made_once(self, tmp_path: Path, overwrite: bool) -> None:
        first = self.write_once(tmp_path, "a", overwrite)
        assert first.startswith("a ")
        assert self.write_once(tmp_path, "a", overwrite) == first

    def test_a_file_from_another_text_is_replaced_only_on_request(self, tmp_path: Path) -> None:
        first = self.write_once(tmp_path, "a")
        with pytest.raises(DataError, match=r"out\.links: exists.*--overwrite"):
            self.write_once(tmp_path, "b")
        assert self.write_once(tmp_path, "a") == first
        assert self.write_once(tmp_path, "b", overwrite=True).startswith("b ")

    @pytest.mark.parametrize("record", [None, "", "[]", "{}", "its own"])
    def test_a_file_of_unknown_origin_is_replaced_only_on_request(self, tmp_path: Path, record: str | None) -> None:
        path, beside = tmp_path / "out.links", tmp_path / "out.links.json"
        if record == "its own":
            self.write_once(tmp_path, "a")
        elif record is not None:
            beside.write_text(record, encoding="utf-8")
        path.write_text("gold\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"out\.links: exists.*--overwrite"):
            self.write_once(tmp_path, "a")
        assert path.read_text(encoding="utf-8") == "gold\n"
        assert self.write_once(tmp_path, "a", overwrite=True).startswith("a ")

    def test_a_failure_replaces_nothing(self, tmp_path: Path) -> None:
        def fail() -> list[str]:
            raise PowerCutError

        first = self.write_once(tmp_path, "a")
        with pytest.raises(PowerCutError):
            write_once(tmp_path / "out.links", {"text": "b"}, True, fail)
        assert self.write_once(tmp_path, "a") == first

    @pytest.mark.parametrize("cut", ["out.links.json", "out.links"])
    def test_the_file_of_a_killed_job_is_recognised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
    ) -> None:
        replace = Path.replace

        def cut_short(self: Path, target: Path) -> Path:
            if target.name == cut:
                raise PowerCutError
            return replace(self, target)

        self.write_once(tmp_path, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", cut_short)
            with pytest.raises(PowerCutError):
                self.write_once(tmp_path, "b", overwrite=True)
        assert self.write_once(tmp_path, "b").startswith("b ")


@pytest.mark.parametrize("overwrite", [False, True])
class TestOwnInputs:
    """No rewriting replaces its own input, even with `overwrite`."""

    @pytest.fixture(autouse=True)
    def texts(self, tmp_path: Path) -> Iterator[None]:
        with unchanged_texts(tmp_path, "mine.source", "mine.target", "other.source", "other.target"):
            yield

    @pytest.mark.parametrize("read", [0, 1])
    def test_speech_and_joining_refuse_to_overwrite_their_inputs(
        self, tmp_path: Path, read: int, overwrite: bool
    ) -> None:
        paths = [tmp_path / "other.source", tmp_path / "other.target"]
        other = JoinedSet(paths[0], paths[1])
        paths[read] = tmp_path / "mine.source"
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.source"):
            speech_corpus(paths[0], paths[1], tmp_path / "mine", SpeechConfig(), overwrite)
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.source"):
            join_corpora([other, JoinedSet(paths[0], paths[1])], tmp_path / "mine", overwrite)


class TestWeighing:
    @pytest.fixture
    def text(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        """Write 3,000 pairs, labelled with three origins in turn."""
        numbers, origins = range(3000), ["news", "law", "chat"] * 1000
        return (
            write(tmp_path / "text.source", [f"s{number}" for number in numbers]),
            write(tmp_path / "text.target", [f"t{number}" for number in numbers]),
            write(tmp_path / "text.labels.gz", origins),
        )

    def test_integer_weights_are_exact_and_keep_the_order(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        weight_corpus(*text, tmp_path / "out", WeightingConfig({"law": 2, "chat": 0}))
        kept = [number for number in range(3000) for _ in range((1, 2, 0)[number % 3])]
        assert lines(tmp_path / "out.source") == [f"s{number}" for number in kept]
        assert lines(tmp_path / "out.target") == [f"t{number}" for number in kept]

    def test_parts_are_drawn_at_random_and_the_same_again(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        config = WeightingConfig({"law": 1.25}, others=0.5)
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            weight_corpus(*text, tmp_path / name, replace(config, seed=seed))
        taken = Counter(lines(tmp_path / "a.source"))
        counts = [Counter(taken[f"s{number}"] for number in range(first, 3000, 3)) for first in range(3)]
        assert counts[0].keys() == counts[2].keys() == {0, 1}
        assert counts[1].keys() == {1, 2}
        assert all(400 < counts[origin][1] < 600 for origin in (0, 2))
        assert 180 < counts[1][2] < 320
        assert lines(tmp_path / "a.source") == lines(tmp_path / "b.source") != lines(tmp_path / "c.source")
        assert [line[1:] for line in lines(tmp_path / "a.target")] == [
            line[1:] for line in lines(tmp_path / "a.source")
        ]

    def test_invalid_weights_are_refused(self, text: tuple[Path, Path, Path], tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no line has the label nwes; labels found: news \(1,000\), law"):
            weight_corpus(*text, tmp_path / "out", WeightingConfig({"nwes": 2}))
        with pytest.raises(DataError, match="every label has weight 0"):
            weight_corpus(*text, tmp_path / "out", WeightingConfig({"law": 0}, others=0))
        for count, word in ((2999, "fewer"), (3001, "more")):
            labels = write(tmp_path / f"{count}.txt", ["news"] * count)
            with pytest.raises(DataError, match=f"{count}.txt: has {word} lines than"):
                weight_corpus(text[0], text[1], labels, tmp_path / "out", WeightingConfig())
        for weight in (-1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match=r"a weight must be 0 or more, got .* for law"):
                WeightingConfig({"law": weight})
        assert not list(tmp_path.glob("out*source"))


class TestJoining:
    @pytest.fixture
    def sets(self, tmp_path: Path) -> list[tuple[Path, Path]]:
        """Write a set of three pairs and a set of two."""
        a, A, b, B = (
            write(tmp_path / f"{name}{suffix}", [f"{name} {number}" for number in range(count)])
            for name, suffix, count in (("a", ".txt", 3), ("A", ".gz", 3), ("b", ".txt", 2), ("B", ".txt", 2))
        )
        return [(a, A), (b, B)]

    def test_sets_follow_each_other(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        made = join_corpora([JoinedSet(*sets[0], limit=2), JoinedSet(*sets[1], repeat=2)], tmp_path / "out")
        assert lines(tmp_path / "out.source") == ["a 0", "a 1", "b 0", "b 1", "b 0", "b 1"]
        assert lines(tmp_path / "out.target") == ["A 0", "A 1", "B 0", "B 1", "B 0", "B 1"]
        assert (made["lines"], made["kept"], made["left"]) == (6, 6, {})

    def test_one_set_as_it_is(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        join_corpora([JoinedSet(*sets[1])], tmp_path / "out")
        assert (tmp_path / "out.source").read_bytes() == sets[1][0].read_bytes()
        assert (tmp_path / "out.target").read_bytes() == sets[1][1].read_bytes()

    def test_the_other_order_is_another_result(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        join_corpora([JoinedSet(*sets[0]), JoinedSet(*sets[1])], tmp_path / "out")
        with pytest.raises(DataError, match="--overwrite"):
            join_corpora([JoinedSet(*sets[1]), JoinedSet(*sets[0])], tmp_path / "out")

    def test_invalid_joins_are_refused(self, sets: list[tuple[Path, Path]], tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has 3 lines but"):
            join_corpora([JoinedSet(sets[0][0], sets[1][1])], tmp_path / "out")
        with pytest.raises(ConfigError, match="nothing to join"):
            join_corpora([], tmp_path / "out")
        with pytest.raises(ConfigError, match="repeat must be at least 1, got 0"):
            JoinedSet(*sets[0], repeat=0)
        with pytest.raises(ConfigError, match="limit must not be negative, got -1"):
            JoinedSet(*sets[0], limit=-1)


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Well, I don't know... do you?", "well i don't know do you"),
        (
            'He said: "A well-known, 3.5-inch disk (50%) costs $1,000."',
            "he said a well-known 3.5-inch disk 50% costs $1,000",
        ),
        ("At 10:30 - or later -- ‘maybe’.", "at 10:30 or later maybe"),
        ("Größe; naïve_name!", "größe naïve name"),
        ("...", ""),
        ("İstanbul.", "i\u0307stanbul"),
        ("हिन्दी-पाठ, हिन्दी!", "हिन्दी-पाठ हिन्दी"),
        ("Cafe\u0301: q\u0303's", "café q\u0303's"),
        ("葛\U000e0100城。", "葛\U000e0100城"),
    ],
)
def test_speech_has_no_punctuation(text: str, spoken: str) -> None:
    assert unpunctuated(text) == spoken


def test_lines_without_words_are_listed_by_line_number(tmp_path: Path) -> None:
    source = write(tmp_path / "source", ["..." if number % 4 == 0 else "Word." for number in range(1, 201)])
    target = write(tmp_path / "target", ["Wort."] * 200)
    made = speech_corpus(source, target, tmp_path / "out", SpeechConfig(0.5))
    left = made["left"]["empty"]
    assert 10 < len(left) < 40
    assert all(number % 4 == 0 for number in left)
    assert left[-1] > made["lines"]


def test_a_share_of_the_pairs_as_speech(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("".join(f"Line {number}.\n" for number in range(400)) + "!\n", encoding="utf-8")
    target.write_text("".join(f"Zeile {number}.\n" for number in range(400)) + "!\n", encoding="utf-8")
    record = speech_corpus(source, target, tmp_path / "some", SpeechConfig(0.25))
    spoken = (tmp_path / "some.source").read_text(encoding="utf-8").splitlines()
    kept = (tmp_path / "some.target").read_text(encoding="utf-8").splitlines()
    assert 60 < len(spoken) < 140
    assert [line.replace("line", "Zeile") + "." for line in spoken] == kept
    assert record["kept"] == len(spoken)
    everything = speech_corpus(source, target, tmp_path / "all", SpeechConfig(1.0))
    assert (everything["kept"], everything["left"]) == (400, {"empty": [401]})
    with pytest.raises(ConfigError, match="share"):
        SpeechConfig(0.0)


def test_noise_depends_on_seed_and_line_only(tmp_path: Path) -> None:
    lines = [f"We have read {number} of the books that they wrote, haven't we?" for number in range(200)]
    source, target = write(tmp_path / "source", lines), write(tmp_path / "target", lines)
    half = write(tmp_path / "half", lines[:100])

    def heard(source: Path, target: Path, seed: int) -> list[str]:
        prefix = tmp_path / f"{source.name}-{seed}"
        speech_corpus(source, target, prefix, SpeechConfig(1.0, seed, "en"))
        assert (
            prefix.with_suffix(".target").read_text(encoding="utf-8").splitlines() == lines[: len(heard_lines(prefix))]
        )
        return heard_lines(prefix)

    def heard_lines(prefix: Path) -> list[str]:
        return prefix.with_suffix(".source").read_text(encoding="utf-8").splitlines()

    everything = heard(source, target, 1)
    assert heard(half, half, 1) == everything[:100]
    assert heard(source, target, 2) != everything


@pytest.mark.parametrize(
    ("source", "target", "languages", "disagree"),
    [
        ("Es sind 1.000,5 Meter.", "It is 1,000.5 metres.", "de-en", False),
        ("Es sind 1.000,5 Meter.", "It is 1.000,5 metres.", "de-en", True),
        ("Es sind 1.000,5 Meter.", "It is 10,005 metres.", "de-en", True),
        ("Sie hat zwölf Katzen.", "She has 12 cats.", "de-en", False),
        ("Sie hat zwölf Katzen.", "She has twenty cats.", "de-en", True),
        ("Sie hat Katzen.", "She has three cats.", "de-en", True),
        ("Er ist einundzwanzig.", "He is twenty-one.", "de-en", False),
        ("Ein Mann kam.", "1 man came.", "de-en", False),
        ("Um halb vier.", "At half past three.", "de-en", False),
        ("Um halb vier.", "At half past four.", "de-en", True),
        ("Um 18 Uhr.", "At 6 p.m.", "de-en", False),
        ("3000 customers", "三千名客户", "en-zh", False),
        ("3000 customers", "30000名客户", "en-zh", True),
        ("100 million", "100万", "en-zh", True),
        ("No numbers here.", "这里没有数字。", "en-zh", False),
    ],
)
def test_numbers_disagree(source: str, target: str, languages: str, disagree: bool) -> None:
    there, here = languages.split("-")
    assert numbers_disagree(source, target, (there, here)) is disagree


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ("", 1),
        ("a", 1),
        ("a a", 1),
        ("a a a", 3),
        ("x a b a b a b y", 3),
        ("a b a b", 1),
        ("a b c d a b c d", 2),
        ("a b c d a b c", 1),
        ("a a b b", 1),
        ("a b b b b c", 4),
    ],
)
def test_phrases_in_a_row(words: str, times: int) -> None:
    assert max_repetitions(words.split()) == times


@pytest.mark.parametrize(
    ("source", "target", "repeats"),
    [
        ("No, no, no!", "不，不，不！", False),
        ("No, no!", "不，不，不！", True),
        ("Very, very good.", "非常非常好。", False),
        ("He came home.", "他回到了家里，他回到了家里。", True),
        ("He came home.", "他回家了。", False),
        ("Er kam.", "He came and came and came and came.", True),
    ],
)
def test_a_target_repeats_itself_if_the_source_does_not(source: str, target: str, repeats: bool) -> None:
    assert has_repetition(target, source) is repeats


@pytest.mark.parametrize("languages", [None, ("de", "en")])
def test_pairs_are_dropped_with_a_reason(tmp_path: Path, languages: tuple[str, str] | None) -> None:
    source, target = tmp_path / "a.de", tmp_path / "a.en"
    pairs = [
        ("Das ist nicht der Hund.", "That is not the dog."),
        ("Sie hat 12 Katzen.", "She has 13 cats."),
        ("Er kam und ging.", "He came and went and went and went and went."),
        ("Es sind 1.500 Euro.", "It is 1,500 euros."),
    ]
    source.write_text("".join(f"{one}\n" for one, _ in pairs), encoding="utf-8")
    target.write_text("".join(f"{other}\n" for _, other in pairs), encoding="utf-8")
    record = filter_corpus(source, target, tmp_path / "kept", languages)
    assert record["left"] == {"numbers": [2], "repeats": [3]}
    assert record["settings"] == {"languages": ["de", "en"]}
    assert (tmp_path / "kept.source").read_text("utf-8").splitlines() == [pairs[0][0], pairs[3][0]]
    assert (tmp_path / "kept.target").read_text("utf-8").splitlines() == [pairs[0][1], pairs[3][1]]
    assert json.loads((tmp_path / "kept.json").read_text("utf-8"))["kept"] == 2


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        ("The old bridge was closed.", True),
        ("the OLD bridge - was closed", True),
        ("The old bridge was closed again.", False),
        ("Thank you.", False),  # anybody says that
        ("Yes: one two three four five six seven eight nine ten, indeed.", True),
        ("One two three four five six seven eight nine, ten times.", True),
        ("One two three four five six seven eight nine.", False),
        ("zwei", False),
        ("", False),
    ],
)
def test_sentences_and_passages_of_a_test_set_are_held_out(text: str, held_out: bool) -> None:
    passage = "Count: one two three four five six seven eight nine ten."
    assert (text in HeldOut(["The old bridge was closed.", "Thank you.", "", passage])) is held_out


def test_either_side_of_a_pair_may_match_a_test_set(tmp_path: Path) -> None:
    texts = {
        "a.de": "Das ist der alte Hund.\nEr kam nach Hause.\nWir gehen jetzt essen.\n",
        "a.en": "That is the old dog.\nHe came home.\nWe go to eat now.\n",
        "test.de": "Das ist der alte Hund!\n",
        "test.en": "We go to eat now.\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tests = [tmp_path / "test.de", tmp_path / "test.en"]
    made = filter_corpus(tmp_path / "a.de", tmp_path / "a.en", tmp_path / "out", ("de", "en"), held_out=tests)
    assert made["left"] == {"held_out": [1, 3]}
    assert (tmp_path / "out.target").read_text(encoding="utf-8") == "He came home.\n"


def test_long_pairs_are_dropped_on_request(tmp_path: Path) -> None:
    source, target = tmp_path / "a.de", tmp_path / "a.zh"
    source.write_text("Ja, das ist gut.\nIch gehe jetzt nach Hause.\nJa.\n", encoding="utf-8")
    target.write_text("是的，很好。\n我回家。\n是的，我也这么想。\n", encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("de", "zh"), max_words=4)
    assert made["left"] == {"long": [2, 3]}
    assert filter_corpus(source, target, tmp_path / "all", ("de", "zh"))["kept"] == 3


def test_the_shortest_targets_of_each_source_length_are_dropped_on_request(tmp_path: Path) -> None:
    source, target = tmp_path / "a.en", tmp_path / "a.zh"
    three = {"cat dog mouse": ["甲", "甲乙", "甲乙丙", "甲乙丙丁"]}  # the shorter half has fewer than three ideographs
    five = {"a b c d e": ["甲乙丙丁戊", "甲乙", "丙丁"]}  # int(0.5 * 3) = 1 may be dropped, but two are equally short
    pairs = [(text, each) for texts in (three, five) for text, targets in texts.items() for each in targets]
    source.write_text("".join(f"{text}\n" for text, _ in pairs), encoding="utf-8")
    target.write_text("".join(f"{text}\n" for _, text in pairs), encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("en", "fr"), drop_shortest=0.5)
    assert made["left"] == {"short": [1, 2]}
    assert made["settings"] == {"languages": ["en", "fr"], "drop_shortest": 0.5}
    assert filter_corpus(source, target, tmp_path / "all", ("en", "fr"))["kept"] == 7
    with pytest.raises(ConfigError, match="below 1, got 1"):
        filter_corpus(source, target, tmp_path / "none", ("en", "fr"), drop_shortest=1.0)


def test_numbers_need_not_agree_in_human_translations(tmp_path: Path) -> None:
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("Since twenty to five.\nNo no no no.\n", encoding="utf-8")
    target.write_text("Seit 4:40 Uhr.\nNein nein nein nein nein.\n", encoding="utf-8")
    assert filter_corpus(source, target, tmp_path / "strict", ("en", "de"))["left"] == {"numbers": [1], "repeats": [2]}
    made = filter_corpus(source, target, tmp_path / "out", ("en", "de"), check_numbers=False)
    assert made["left"] == {"repeats": [2]}
    assert made["settings"] == {"languages": ["en", "de"], "check_numbers": False}


def test_the_source_of_a_back_translation_is_checked_too(tmp_path: Path) -> None:
    source, target = tmp_path / "a.de", tmp_path / "a.en"
    source.write_text("Nein nein nein nein.\n<bt> Nein nein nein nein.\n<bt> Nein.\n", encoding="utf-8")
    target.write_text("No.\nNo.\nNo.\n", encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("de", "en"))
    assert made["left"] == {"repeats": [2]}


def test_many_pairs_are_filtered_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "CHUNK_PAIRS", 2)
    source, target = tmp_path / "a.de", tmp_path / "a.en"
    source.write_text("".join(f"Haus {number}\n" for number in range(30)), encoding="utf-8")
    target.write_text("".join(f"house {number - number % 7 // 6}\n" for number in range(30)), encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("de", "en"))
    assert made["left"] == {"numbers": [7, 14, 21, 28]}
    kept = [f"house {number}" for number in range(30) if number % 7 != 6]
    assert (tmp_path / "out.target").read_text(encoding="utf-8").splitlines() == kept


class TestReordering:
    @pytest.mark.parametrize(
        ("source", "target", "links", "expected"),
        [
            # the verb at the end of the German clause comes where English has it
            ("I have seen the boat", "ich habe das Boot gesehen", "0-0 1-1 2-4 3-2 4-3", "ich habe gesehen das Boot"),
            # "not" has no link and stays behind its predecessor, which moves
            ("a b c", "C not A", "2-0 0-2", "A C not"),
            # unaligned at the beginning: stays there; a word with two links waits for the later one
            ("a b c", "oh BC A", "1-1 2-1 0-2", "oh A BC"),
            ("a b", "B A", "", "B A"),
        ],
    )
    def test_words_by_hand(self, tmp_path: Path, source: str, target: str, links: str, expected: str) -> None:
        assert reordered(tmp_path, source, target, links) == expected

    @pytest.mark.parametrize(
        ("target", "links", "unit", "expected"),
        [
            ("船我看见", "1-0 0-1 2-2", "char", "我船看见"),
            ("船 我 看见", "1-0 0-1 2-2", "word", "我船看见"),  # cut into words: those stay whole, spaces go
            ("用 Python 写程序", "2-0 0-1 1-2", "char", "Python 写程序用"),
            ("用Python写程序", "2-0 0-1 1-2", "char", "Python写程序用"),
            ("在 New York，等", "2-0 0-1 0-2 1-3", "char", "New York，等在"),
            ("New 等York", "2-0 0-1 1-2", "char", "等York New"),
        ],
    )
    def test_ideographs_by_hand(self, tmp_path: Path, target: str, links: str, unit: Any, expected: str) -> None:
        assert reordered(tmp_path, "one two three", target, links, unit) == expected

    @settings(deadline=None, max_examples=30)
    @given(
        corpus=st.lists(
            st.tuples(
                st.integers(1, 6),
                st.lists(st.text("abc,.", min_size=1, max_size=3), min_size=1, max_size=6),
                st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_no_word_is_lost_and_what_is_in_order_stays(
        self, corpus: list[tuple[int, list[str], set[tuple[int, int]]]], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("reorder")
        sources = [" ".join(["x"] * words) for words, _, _ in corpus]
        links = [[(i, j) for i, j in sorted(each) if i < words and j < len(target)] for words, target, each in corpus]
        paths = (
            write(folder / "text.source", sources),
            write(folder / "text.target", [" ".join(target) for _, target, _ in corpus]),
            write(folder / "text.links", [" ".join(f"{i}-{j}" for i, j in each) for each in links]),
        )
        reorder_corpus(*paths, folder / "out")
        assert lines(folder / "out.source") == sources
        for (_, target, _), each, line in zip(corpus, links, lines(folder / "out.target"), strict=True):
            assert Counter(line.split(" ")) == Counter(target)
            needed = {j: max(i for i, other in each if other == j) for _, j in each}
            if [needed[j] for j in sorted(needed)] == sorted(needed.values()):
                assert line == " ".join(target)  # nothing to do

    def test_empty_sides_are_left_out_of_both_files(self, tmp_path: Path) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "", "a"]),
            write(tmp_path / "text.target", ["B A", "X", " "]),
            write(tmp_path / "text.links", ["0-1 1-0", "", ""]),
        )
        made = reorder_corpus(*paths, tmp_path / "out")
        assert made["left"] == {"empty": [2, 3]}
        assert (lines(tmp_path / "out.source"), lines(tmp_path / "out.target")) == (["a b"], ["A B"])

    @pytest.mark.parametrize(
        ("links", "message"),
        [
            (
                ["0-0", "0-2"],
                r"text\.links:2: links source unit 1 to target unit 3, .* has 2 and 2; give the text that was aligned",
            ),
            (["2-0", "0-0"], r"text\.links:1: links source unit 3"),
            (["0-0"], r"text\.links: has fewer lines than .*text\.source"),
            (["0-0", "", ""], r"text\.links: has more lines than .*text\.source"),
            (["0-0", "x"], r"text\.links:2: alignment link 'x'"),
        ],
    )
    def test_links_that_do_not_fit_are_named_by_file_and_line(
        self, tmp_path: Path, links: list[str], message: str
    ) -> None:
        paths = (
            write(tmp_path / "text.source", ["a b", "c d"]),
            write(tmp_path / "text.target", ["A B", "C D"]),
            write(tmp_path / "text.links", links),
        )
        with pytest.raises(DataError, match=message):
            reorder_corpus(*paths, tmp_path / "out")
        assert not (tmp_path / "out.target").exists()


def reordered(folder: Path, source: str, target: str, links: str, unit: Any = "word") -> str:
    paths = write(folder / "source", [source]), write(folder / "target", [target]), write(folder / "links", [links])
    reorder_corpus(*paths, folder / "out", ("word", unit))
    (line,) = lines(folder / "out.target")
    return line


@pytest.mark.parametrize("overwrite", [False, True])
class TestInputsOfReordering:
    """No rewriting replaces its own input, even with `overwrite`."""

    @pytest.fixture(autouse=True)
    def texts(self, tmp_path: Path) -> Iterator[None]:
        write(tmp_path / "other.links", [])
        with unchanged_texts(tmp_path, "mine.source", "mine.target", "other.source", "other.target"):
            yield

    @pytest.mark.parametrize("read", [0, 1, 2])
    def test_reordering_refuses_to_overwrite_its_input(self, tmp_path: Path, read: int, overwrite: bool) -> None:
        paths = [tmp_path / f"other.{name}" for name in ("source", "target", "links")]
        paths[read] = tmp_path / "mine.target"
        source, target, links = paths
        with pytest.raises(ConfigError, match=r"mine: would replace its own input .*mine\.target"):
            reorder_corpus(source, target, links, tmp_path / "mine", overwrite=overwrite)
