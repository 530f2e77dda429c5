"""Negation detection."""

from __future__ import annotations

import pytest

from simulmt.text.negation import is_negated, may_be_negated


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
