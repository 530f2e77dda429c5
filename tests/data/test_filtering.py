"""Pairs that a translator got wrong in a way that shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulmt.data import filtering
from simulmt.data.filtering import HeldOut, filter_corpus, has_repetition, max_repetitions, numbers_disagree


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
def test_pairs_are_left_out_with_their_reason(tmp_path: Path, languages: tuple[str, str] | None) -> None:
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


def test_either_side_of_a_pair_may_stand_in_a_test_set(tmp_path: Path) -> None:
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


def test_of_a_back_translation_the_source_is_judged_too(tmp_path: Path) -> None:
    source, target = tmp_path / "a.de", tmp_path / "a.en"
    source.write_text("Nein nein nein nein.\n<bt> Nein nein nein nein.\n<bt> Nein.\n", encoding="utf-8")
    target.write_text("No.\nNo.\nNo.\n", encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("de", "en"))
    assert made["left"] == {"repeats": [2]}


def test_many_pairs_are_judged_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "CHUNK_PAIRS", 2)
    source, target = tmp_path / "a.de", tmp_path / "a.en"
    source.write_text("".join(f"Haus {number}\n" for number in range(30)), encoding="utf-8")
    target.write_text("".join(f"house {number - number % 7 // 6}\n" for number in range(30)), encoding="utf-8")
    made = filter_corpus(source, target, tmp_path / "out", ("de", "en"))
    assert made["left"] == {"numbers": [7, 14, 21, 28]}
    kept = [f"house {number}" for number in range(30) if number % 7 != 6]
    assert (tmp_path / "out.target").read_text(encoding="utf-8").splitlines() == kept
