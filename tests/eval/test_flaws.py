from __future__ import annotations

import pytest

from simulmt.eval.flaws import Lexicon, repeated_words, words_of
from simulmt.text.words import Unit


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


def test_words_are_what_is_written_in_letters() -> None:
    assert words_of("Don't re-enter 42 rooms, 你好orld。Größe A-3") == [
        "don't",
        "re-enter",
        "rooms",
        "orld",
        "größe",
        "a",
    ]


def test_a_word_that_nobody_knows_is_torn_unless_the_source_has_it() -> None:
    lexicon = Lexicon(["The world is large .", "Hello , neighbours"])
    assert lexicon.unknown("hello orld of Zyx 42", "Hallo Welt von Zyx") == ["orld", "of"]
    assert lexicon.unknown("你好orld，世界", "Hello world") == ["orld"]
    assert lexicon.unknown("", "Hello") == []
