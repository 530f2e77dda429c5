from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulmt.text.words import Unit, canonicalize, collapse_spaces, ends_clause, ends_sentence, script_unit


@pytest.mark.parametrize(
    "word",
    ["home.", "home!", "home?", "home?!", "home...", "home…", "。", "！", "？", 'home."', "home.”)", "2024.", ".", "؟"],
)
def test_ends(word: str) -> None:
    assert ends_sentence(word, "en")


@pytest.mark.parametrize(
    "word",
    [
        "home",
        "home,",
        "3.5",
        "Mr.",
        "(Dr.",
        "J.",
        "U.S.",
        "e.g.",
        "Approx.",
        "3.5,",
        "home:",
        "“",
        "www.example.org",
        "",
    ],
)
def test_continues(word: str) -> None:
    assert not ends_sentence(word, "en")


@pytest.mark.parametrize(
    ("word", "language", "is_first", "ends"),
    [
        ("3.", "en", False, True),
        ("3.", "en", True, False),  # a numbered line
        ("3.", "de", False, False),  # the third
        ("1999.", "de", False, True),
        ("bzw.", "de", False, False),
        ("bzw.", "en", False, True),
        ("prof.", "xx", False, False),
        ("3!", "de", True, True),
    ],
)
def test_numbers_and_languages(word: str, language: str, is_first: bool, ends: bool) -> None:
    assert ends_sentence(word, language, is_first) is ends


@given(st.text(), st.sampled_from(["en", "de", "zh", ""]), st.booleans())
def test_ends_sentence_accepts_any_word(word: str, language: str, is_first: bool) -> None:
    assert ends_sentence(word, language, is_first) in (True, False)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("Die Karte zeigt 大河。", "word"),
        ("地图上写着 New York 大河。", "char"),
        ("地图 上 写着 大河 。", "char"),  # segmented
        ("地図を見てください。", "char"),
        ("지도를 보세요.", "word"),
        ("", "word"),
    ],
)
def test_the_unit_of_a_script(text: str, unit: Unit) -> None:
    assert script_unit([text]) == unit


@given(st.text(st.one_of(st.sampled_from(" \t\n\x0b\x1c\x85\xa0\u2009\u3000\u200b"), st.characters(codec="utf-8"))))
def test_whitespace_is_what_python_splits_at(text: str) -> None:
    assert collapse_spaces(text) == " ".join(text.split())


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("2½", "2.5"),
        ("12¾-inch", "12.75-inch"),
        ("½", "1/2"),
        ("2⅓", "2 1/3"),
        ("3⁄4", "3/4"),
        ("10⁶", "10^⁶"),  # normalisation makes it 10^6
        ("10⁻¹²", "10^-¹²"),
        ("m²", "m²"),
        ("−5", "-5"),
        ("555‑1234", "555-1234"),
        ("3∶2", "3:2"),
        ("Kranken\u00adhaus", "Krankenhaus"),
        ("👍🏽", "👍"),
        ("\u2764\ufe0f", "\u2764"),
        ("1999–2005", "1999–2005"),
    ],
)
def test_rare_characters_are_written_as_vocabularies_know_them(word: str, written: str) -> None:
    assert canonicalize(word) == written


@given(word=st.text("aZ09.,:;-/^%$’“é", max_size=12))
def test_common_characters_are_kept(word: str) -> None:
    assert canonicalize(word) == word


@pytest.mark.parametrize(
    ("word", "ends"),
    [
        ("home,", True),
        ("home;", True),
        ("Mr.", True),
        ("home”,", True),
        ("，", True),
        ("10:45", False),
        ("well-known", False),
    ],
)
def test_clause_ends(word: str, ends: bool) -> None:
    assert ends_clause(word) == ends
