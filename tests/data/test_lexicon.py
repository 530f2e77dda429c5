"""Lexicons of rare words, from trusted pairs and a dictionary, and the pairs that mistranslate them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulmt.data.corpus import Pair
from simulmt.data.lexicon import Lexicon, build_lexicon, write_lexicon
from simulmt.data.transforms import filter_corpus
from simulmt.errors import ConfigError, DataError

from .helpers import lines, write

# Five words that occur with one translation each, and a common word.
WORDS = {"dolphin": "海豚", "chimney": "烟囱", "ivy": "常春藤", "kidney": "肾脏", "champagne": "香槟"}
PAIRS = [
    Pair(f"we {verb} the {word}", f"我们{translation}{verb_zh}", 1)
    for verb, verb_zh in (("saw", "看见"), ("liked", "喜欢"), ("drew", "画过"), ("lost", "丢了"))
    for word, translation in WORDS.items()
]
FILLER = [Pair(f"we know number {number}", f"我们知道{number}号", 1) for number in range(2000)]


def lexicon(pairs: list[Pair], dictionary: dict[str, set[str]] | None = None) -> dict[str, tuple[str, ...]]:
    return dict(build_lexicon([*pairs, *FILLER], dictionary or {}, "en"))


def test_words_that_occur_together_are_translations() -> None:
    found = lexicon(PAIRS)
    assert {word: found[word] for word in WORDS} == {word: (translation,) for word, translation in WORDS.items()}


def test_common_words_are_not_checked() -> None:
    assert "we" not in lexicon(PAIRS, {"we": {"我们"}})


def test_a_word_that_is_translated_freely_is_not_checked() -> None:
    free = [Pair("the bank closed", "银行关了", 1), *(Pair(f"the bank of {x}", x, 1) for x in ("岸", "排灯", "一列"))]
    assert "bank" not in lexicon(free, {"bank": {"银行"}})
    assert "bank" in lexicon(free[:1] * 4, {"bank": {"银行"}})


def test_a_word_of_the_dictionary_alone_is_checked() -> None:
    assert lexicon([], {"walnut": {"核桃"}})["walnut"] == ("核桃",)


@pytest.mark.parametrize(
    ("word", "stem"),
    [("dolphins", "dolphin"), ("berries", "berry"), ("stopped", "stop"), ("baking", "bake"), ("ivy-clad", "ivy")],
)
def test_an_inflected_word_has_the_translations_of_its_stem(word: str, stem: str) -> None:
    assert lexicon([Pair(f"a {word}", "一个", 1)], {stem: {"词"}})[word] == ("词",)


@pytest.mark.parametrize(
    ("source", "target", "word"),
    [
        ("Two dolphins jumped.", "两只海盗跳了起来。", "dolphins"),
        ("Two dolphins jumped.", "两只海豚跳了起来。", None),
        ("A DOLPHIN jumped.", "一只海跳了起来。", "dolphin"),
        ("A whale jumped.", "一只海盗跳了起来。", None),  # unknown words are not checked
    ],
)
def test_a_pair_is_mistranslated_if_it_has_no_translation_of_a_word(source: str, target: str, word: str | None) -> None:
    assert Lexicon({"dolphin": ("海豚",), "dolphins": ("海豚",)}).mistranslated(source, target) == word


def test_translations_in_latin_letters_match_in_any_case() -> None:
    known = Lexicon({"geschirrspüler": ("dishwasher",)})
    assert known.mistranslated("Der Geschirrspüler läuft.", "Dishwashers run.") is None
    assert known.mistranslated("Der Geschirrspüler läuft.", "The dish is running.") == "geschirrspüler"


def test_a_written_lexicon_is_read_again(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", [pair.source for pair in [*PAIRS, *FILLER]])
    target = write(tmp_path / "a.zh", [pair.target for pair in [*PAIRS, *FILLER]])
    path = tmp_path / "lexicon.tsv"
    words = write_lexicon(source, target, [("Walnut", "核桃")], path)
    assert "walnut\t核桃" in lines(path)
    assert len(Lexicon.read(path).translations) == words == len(lines(path))
    with pytest.raises(ConfigError, match="exists"):
        write_lexicon(source, target, [], path)


@pytest.mark.parametrize("line", ["dolphin", "dolphin\t", "\t海豚"])
def test_a_line_without_a_word_and_translations_is_an_error(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "lexicon.tsv", ["ivy\t常春藤", line])
    with pytest.raises(DataError, match=r"lexicon\.tsv, line 2: expected a word and its translations"):
        Lexicon.read(path)


def test_filtering_drops_mistranslated_pairs(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", ["Two dolphins jumped.", "A dolphin jumped.", "A whale jumped."])
    target = write(tmp_path / "a.zh", ["两只海盗跳了起来。", "一只海豚跳了起来。", "一只海盗跳了起来。"])
    known = write(tmp_path / "lexicon.tsv", ["dolphin\t海豚", "dolphins\t海豚"])
    record = filter_corpus(source, target, tmp_path / "out", ("en", "zh"), lexicon=known)
    assert lines(tmp_path / "out.source") == ["A dolphin jumped.", "A whale jumped."]
    assert record["left"] == {"mistranslated": [1]}
    write(known, ["whale\t鲸鱼"])  # another lexicon makes another job
    record = filter_corpus(source, target, tmp_path / "out", ("en", "zh"), overwrite=True, lexicon=known)
    assert record["left"] == {"mistranslated": [3]}
