"""Recognition noise: what it may change, and what it must not."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from simulmt.data.speech_noise import (
    DROPPED,
    FILLERS,
    INSERTED,
    NEGATIONS,
    NoiseRates,
    SpeechNoise,
    learn_misheard,
    misheard_words,
    spell_number,
    spell_year,
    unpunctuated,
)

SILENT = dict.fromkeys(
    (
        "filler", "repeat", "cut_off", "misheard", "lost_plural", "dropped", "inserted", "restart", "spelled",
        "unpunctuated",
    ),
    0.0,
)  # fmt: skip
LOUD = NoiseRates(
    filler=0.12, repeat=0.12, cut_off=0.12, misheard=0.12, lost_plural=0.12, dropped=0.12, inserted=0.12, restart=0.5,
    spelled=0.5, unpunctuated=0.5,
)  # fmt: skip
TEXT = "I do not think that we can't see the 25 new books, or that nobody wants to read three of them without pictures."


def only(**rates: float) -> SpeechNoise:
    return SpeechNoise("en", NoiseRates(**{**SILENT, **rates}))


def spoken(noise: SpeechNoise, text: str, seed: int = 1) -> str:
    return noise.apply(text, random.Random(seed))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (312, "three hundred twelve"),
        (23_000, "twenty three thousand"),
        (1_000_001, "one million one"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert spell_number(number) == words


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1066, "one thousand sixty six"),
        (1740, "seventeen forty"),
        (1900, "nineteen hundred"),
        (1905, "nineteen oh five"),
        (2000, "two thousand"),
        (2005, "two thousand five"),
        (2019, "twenty nineteen"),
    ],
)
def test_years_in_words(year: int, words: str) -> None:
    assert spell_year(year) == words


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("In 1990, 50% of 2,500 people.", "In nineteen ninety, fifty percent of two thousand five hundred people."),
        ("The 3rd and 21st at 1:45 and 12:05", "The third and twenty first at one forty five and twelve oh five"),
        ("3.5 or 2.3% in the 1990s", "three point five or two point three percent in the nineteen nineties"),
        ('"$5" is not $5 million.', '"five dollars" is not $5 million.'),
        ("COVID-19, 007, 24/7, 24-18, 5m, $2.50, 3.14.15", "COVID-19, 007, 24/7, 24-18, 5m, $2.50, 3.14.15"),
    ],
)
def test_numbers_are_read_aloud_or_left_alone(text: str, heard: str) -> None:
    assert spoken(only(spelled=1.0), text) == heard


def test_without_any_rate_the_text_stays_as_it_is() -> None:
    assert spoken(only(), TEXT) == TEXT
    assert spoken(only(unpunctuated=1.0), TEXT) == unpunctuated(TEXT)


def test_an_empty_line_stays_empty() -> None:
    assert {spoken(SpeechNoise("en", LOUD), "", seed) for seed in range(20)} == {""}


def test_the_same_seed_gives_the_same_noise_and_another_seed_another() -> None:
    noise = SpeechNoise("en", LOUD)
    assert spoken(noise, TEXT, 7) == spoken(noise, TEXT, 7)
    assert len({spoken(noise, TEXT, seed) for seed in range(50)}) > 40


def test_numbers_and_negations_keep_their_meaning() -> None:
    noise = SpeechNoise("en", LOUD)
    for seed in range(2000):
        heard = Counter(unpunctuated(spoken(noise, TEXT, seed)).replace("twenty five", "25").split())
        kept = {word: heard[word] for word in ("not", "can't", "25", "nobody", "three", "without")}
        assert kept == dict.fromkeys(kept, 1), spoken(noise, TEXT, seed)


def test_each_rate_adds_its_kind_of_noise() -> None:
    text = "people have shown that books help them whenever they travel"
    words = text.split()
    added = spoken(only(filler=1.0), text).split()
    assert added[1::2] == words
    assert set(added[::2]) <= set(FILLERS)
    assert spoken(only(repeat=1.0), "Well, we go.").split() == ["Well", "Well,", "we", "we", "go", "go."]
    assert spoken(only(cut_off=1.0), "we translate it").split() == ["we", "tra", "translate", "it"]
    assert spoken(only(lost_plural=1.0), "books is glass this 1990s thirds") == "book is glass this 1990s thirds"
    assert spoken(only(dropped=1.0), text) == " ".join(word for word in words if word not in DROPPED)
    assert spoken(only(inserted=1.0), "we go").split()[1::2] == ["we", "go"]
    start = spoken(only(restart=1.0), text).removesuffix(text).split()
    assert start == words[: len(start)]
    assert len(start) in (2, 3)


def test_misheard_words_keep_case_and_punctuation() -> None:
    assert spoken(only(misheard=1.0), "Weather? (threw)") == "Whether? (through)"
    assert spoken(only(misheard=1.0), "zebra Xylophone") == "zebra Xylophone"


def test_the_table_of_misheard_words_leaves_out_what_must_not_change() -> None:
    counting = re.compile(r"\b(one|two|three|ten|hundred|million|first|second|half)\b")
    for word, others in misheard_words("en").items():
        assert word not in others
        for each in (word, *others):
            assert each not in NEGATIONS
            assert not each.endswith("n't")
            assert not counting.search(each), each
    assert len(misheard_words("en")) > 300
    assert not NEGATIONS & {*DROPPED, *INSERTED, *FILLERS}


def test_misheard_words_are_learnt_word_by_word() -> None:
    pairs = [
        ("The whole week, they said no.", "the hole weak they said know"),
        ("A whole hour", "a hole hour"),
        ("No, no", "know know"),  # negations are left out
        ("into the woods", "in to the woods"),  # not word by word
    ]
    assert learn_misheard(pairs) == {"whole": ["hole", "hole"]}
    noise = SpeechNoise("en", NoiseRates(**{**SILENT, "misheard": 1.0}), misheard=learn_misheard(pairs))
    assert spoken(noise, "The whole weak") == "The hole weak"
