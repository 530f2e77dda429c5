"""Flaws of a translation: repeated and unknown words, and numbers and negations that were lost."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from simulmt.eval.flaws import FactChecker, Lexicon, is_negated, listing, may_be_negated, repeated_words, words_of
from simulmt.text.numbers import Number, find_numbers, unmatched
from simulmt.text.words import Unit, guess_language

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
def test_words_written_twice(text: str, unit: Unit, count: int) -> None:
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
