from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError, DataError, VocabularyError
from simulmt.text import (
    BLANK,
    END,
    MASK,
    MAX_WORD_LENGTH,
    PAD,
    SPACE,
    SPECIAL_SYMBOLS,
    START,
    UNK,
    Detokenizer,
    Tokenizer,
    VocabularySpec,
    WordSplitter,
    split_words,
)

WHITE_SPACE = " \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000"
IDEOGRAPHS = "河桥老々ぁアー、。「」，！？（）㐀豈\U00020000\U0003134a"
LETTERS = "aZéß'.7-“…한ไअ\u0301\u200b\u200d\ufeff😀Ａ９▁\0"
HALVES = "\ud800\udfff"  # lone surrogates, as broken JSON and undecodable bytes leave them

LINES = ["Tea and bread, bread and tea.", "We bake bread; they drink tea.", "Tea is hot, bread is not."] * 4

CHARACTER = st.one_of(
    st.sampled_from(WHITE_SPACE + IDEOGRAPHS + LETTERS + HALVES), st.characters(exclude_categories=())
)
LONG_RUN = st.integers(MAX_WORD_LENGTH - 1, 2 * MAX_WORD_LENGTH + 2).map(lambda length: "a" * length)
TEXT = st.lists(st.one_of(CHARACTER, CHARACTER, CHARACTER, LONG_RUN), max_size=30).map("".join)
EVERY_TOKENIZER = ("source_tokenizer", "target_tokenizer", "ideograph_tokenizer")
SPACED_TOKENIZERS = ("source_tokenizer", "target_tokenizer")


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    """Draw a text in arbitrary chunks, some of them empty."""
    whole = draw(TEXT)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


with_every_tokenizer = pytest.mark.parametrize("tokenizer", EVERY_TOKENIZER, indirect=True)
with_spaced_tokenizers = pytest.mark.parametrize("tokenizer", SPACED_TOKENIZERS, indirect=True)
# The tokenizers are read only, so examples may share them.
modest = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(chunks: Iterable[str]) -> Iterator[str]:
    splitter = WordSplitter()
    for chunk in chunks:
        yield from splitter.push(chunk)
    yield from splitter.flush()


def reference(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    """Load plain SentencePiece with the same vocabulary."""
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)


def known_characters(tokenizer: Tokenizer) -> list[str]:
    """Return the characters that a vocabulary covers."""
    return sorted(set("".join(tokenizer.pieces[len(SPECIAL_SYMBOLS) :])) - {SPACE})


def split_by_hand(text: str) -> list[str]:
    """Split a text as `split_words` should, one character at a time; for the characters above."""
    words, open_word = [], ""
    for character in text:
        if character not in LETTERS or len(open_word) == MAX_WORD_LENGTH:
            words.append(open_word)
            open_word = ""
        if character in IDEOGRAPHS:
            words.append(character)
        elif character in LETTERS:
            open_word += character
    return [word for word in [*words, open_word] if word]


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t\n\u3000", []),
        ("one", ["one"]),
        ("  one\ttwo\xa0three\u2028", ["one", "two", "three"]),
        ("don't stop, 10:45!", ["don't", "stop,", "10:45!"]),
        ("老桥。", ["老", "桥", "。"]),
        ("用Python写", ["用", "Python", "写"]),
        ("“老桥”", ["“", "老", "桥", "”"]),
        ("cafe\u0301 ok", ["cafe\u0301", "ok"]),
        ("a\ud83d\ude00b", ["a", "b"]),
        ("a😀b", ["a😀b"]),
        ("한국어 말", ["한국어", "말"]),
        ("ひらカナ", ["ひ", "ら", "カ", "ナ"]),
        ("x" * MAX_WORD_LENGTH + "y", ["x" * MAX_WORD_LENGTH, "y"]),
    ],
)
def test_split_words_cuts_at_spaces_and_around_ideographs(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@given(st.lists(st.one_of(st.sampled_from(WHITE_SPACE + IDEOGRAPHS + LETTERS + HALVES), LONG_RUN)).map("".join))
@modest
def test_split_words_agrees_with_cutting_by_hand(text: str) -> None:
    assert split_words(text) == split_by_hand(text)


@given(TEXT)
@modest
def test_split_words_loses_only_whitespace_and_half_characters(text: str) -> None:
    kept = [character for character in text if not character.isspace() and not "\ud800" <= character <= "\udfff"]
    assert "".join(split_words(text)) == "".join(kept)
    assert max(map(len, split_words(text)), default=0) <= MAX_WORD_LENGTH


@given(chunked())
@example(["a", "", "b c", "", ""])
@example(["x" * MAX_WORD_LENGTH, "", "x"])
@example(["x" * (MAX_WORD_LENGTH - 1), "老", "x"])
@example(["a", " ", "\ud83d", "\ude00", "b"])
@modest
def test_the_words_do_not_depend_on_the_chunks(chunks: list[str]) -> None:
    assert list(stream(chunks)) == split_words("".join(chunks))


@given(TEXT)
@modest
def test_the_words_of_single_characters_are_those_of_the_text(text: str) -> None:
    assert list(stream(text)) == split_words(text)


@given(chunked())
@modest
def test_a_splitter_holds_back_less_than_the_longest_word(chunks: list[str]) -> None:
    splitter = WordSplitter()
    for chunk in chunks:
        splitter.push(chunk)
        waiting = copy.copy(splitter).flush()
        assert len(waiting) <= 1
        assert len("".join(waiting)) < MAX_WORD_LENGTH


def test_a_word_comes_as_soon_as_its_end_is_seen() -> None:
    splitter = WordSplitter()
    assert splitter.push("one tw") == ["one"]
    assert splitter.push("") == []
    assert splitter.push("o\n") == ["two"]
    assert splitter.push("three老") == ["three", "老"]
    assert splitter.push("桥") == ["桥"]
    assert splitter.push("x" * (MAX_WORD_LENGTH - 1)) == []
    assert splitter.push("x") == ["x" * MAX_WORD_LENGTH]
    assert splitter.flush() == []


def test_flush_resets_a_splitter() -> None:
    splitter = WordSplitter()
    assert splitter.push("left") == []
    assert splitter.flush() == ["left"]
    assert splitter.flush() == []
    assert splitter.push("right ") == ["right"]


# --- encoding --------------------------------------------------------------------------------------------------------


def test_the_special_symbols_have_fixed_ids() -> None:
    assert (PAD, UNK, START, END, BLANK, MASK) == (0, 1, 2, 3, 4, 5)
    assert SPECIAL_SYMBOLS == ("<pad>", "<unk>", "<s>", "</s>", "<blank>", "<mask>")


@with_every_tokenizer
def test_every_vocabulary_begins_with_the_special_symbols(tokenizer: Tokenizer) -> None:
    assert tuple(tokenizer.pieces[:6]) == SPECIAL_SYMBOLS
    assert len(tokenizer.pieces) == tokenizer.size == len(set(tokenizer.pieces))


def test_a_tokenizer_knows_whether_its_text_has_spaces(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer
) -> None:
    assert (source_tokenizer.spaced, target_tokenizer.spaced, ideograph_tokenizer.spaced) == (True, True, False)


@with_spaced_tokenizers
@given(chunks=chunked())
@modest
def test_a_stream_gives_the_pieces_of_the_sentence(tokenizer: Tokenizer, chunks: list[str]) -> None:
    streamed = [token for word in stream(chunks) for token in tokenizer.encode_word(word)]
    assert streamed == tokenizer.encode("".join(chunks))


@with_spaced_tokenizers
@pytest.mark.parametrize(
    "text",
    [
        "The driver waited behind the old bridge.",
        "Der Fahrer wartete hinter der alten Brücke.",
        "“Why?”  she asked, at 10:45!",
        "Snow fell; nobody (really) knew why…",
    ],
)
def test_ordinary_text_is_encoded_as_by_sentencepiece(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == [token for token in reference(tokenizer).encode(text) if token != UNK]


@with_spaced_tokenizers
@given(words=st.lists(st.text("abcdehinorstuwAEÜäöß.,?", max_size=12).map(lambda word: f"e{word}"), max_size=12))
@example(words=["st" * (MAX_WORD_LENGTH // 2), "o"])
@modest
def test_invented_words_are_encoded_as_by_sentencepiece(tokenizer: Tokenizer, words: list[str]) -> None:
    expected = [token for token in reference(tokenizer).encode(" ".join(words)) if token != UNK]
    assert tokenizer.encode(" ".join(words)) == expected


def test_unspaced_text_is_encoded_as_by_sentencepiece(ideograph_tokenizer: Tokenizer) -> None:
    for text in ("我们在车站等到最后一班车。", "她用 Python 写程序，我不会。", "谁知道呢？"):
        assert ideograph_tokenizer.encode(text) == reference(ideograph_tokenizer).encode(text)


@with_every_tokenizer
@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL_SYMBOLS), TEXT), max_size=6), joint=st.sampled_from(["", " "]))
@example(parts=["<blank>"], joint="")
@example(parts=["The", "</s>", "bridge", "<s>", "<pad>", "<mask>"], joint=" ")
@modest
def test_no_text_encodes_to_a_control_symbol(tokenizer: Tokenizer, parts: list[str], joint: str) -> None:
    ids = tokenizer.encode(joint.join(parts))
    assert not {PAD, START, END, BLANK, MASK} & set(ids)
    assert all(0 <= token < tokenizer.size for token in ids)


def test_a_corpus_full_of_special_symbols_does_no_harm(tmp_path: Path) -> None:
    lines = [f"<s> {line} </s> <blank> <mask>" for line in LINES]
    tokenizer = Tokenizer.train(lines, tmp_path / "v.model", VocabularySpec(size=30))
    assert len(set(tokenizer.pieces)) == tokenizer.size
    assert set(tokenizer.encode(" ".join(SPECIAL_SYMBOLS))) & set(range(len(SPECIAL_SYMBOLS))) <= {UNK}


def test_the_source_is_case_folded_and_the_target_is_not(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> None:
    assert source_tokenizer.encode("The Old BRIDGE") == source_tokenizer.encode("the old bridge")
    assert source_tokenizer.decode(source_tokenizer.encode("The Old BRIDGE")) == "the old bridge"
    assert target_tokenizer.decode(target_tokenizer.encode("Die alte Brücke")) == "Die alte Brücke"


def test_full_width_characters_are_kept_by_identity_and_folded_otherwise(
    target_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer
) -> None:
    text = "孩子们（我们）知道，你呢？没有！"
    assert ideograph_tokenizer.decode(ideograph_tokenizer.encode(text)) == text.replace("呢", "")  # not in the text
    assert target_tokenizer.encode("Ｆｌｕｓｓ") == target_tokenizer.encode("Fluss")


@pytest.mark.parametrize(
    "text",
    ["用 Python 写", "我们在 Boston 的港口等火车。", "老师说：“请看 Boston 的地图。”", "Lego Boston", "没有人知道。"],
)
def test_unspaced_text_keeps_the_spaces_around_other_scripts(ideograph_tokenizer: Tokenizer, text: str) -> None:
    assert ideograph_tokenizer.decode(ideograph_tokenizer.encode(text)) == text


@given(gap=st.text(WHITE_SPACE + HALVES, min_size=1, max_size=3))
@modest
def test_all_whitespace_is_encoded_alike(target_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer, gap: str) -> None:
    for tokenizer in (target_tokenizer, ideograph_tokenizer):
        assert tokenizer.encode(f"{gap}Boot{gap}Netz{gap}") == tokenizer.encode("Boot Netz")


def test_whitespace_never_becomes_part_of_an_unspaced_vocabulary(tmp_path: Path) -> None:
    lines = ["\u3000\u3000茶\xa0好\n", "茶\t很好\r\n", "面包\u2003好"] * 4
    spec = VocabularySpec(size=13, normalization="identity", spaced=False)
    tokenizer = Tokenizer.train(lines, tmp_path / "v.model", spec)
    assert known_characters(tokenizer) == sorted("茶好很面包")


@with_spaced_tokenizers
@given(data=st.data())
@modest
def test_known_words_survive_encoding_and_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    letters = [character for character in known_characters(tokenizer) if character not in "大小心江河长"]
    words = data.draw(st.lists(st.text(letters, min_size=1, max_size=12), max_size=10))
    assert tokenizer.decode(tokenizer.encode(" ".join(words))) == " ".join(words)


@given(data=st.data())
@modest
def test_known_ideographs_survive_encoding_and_decoding(
    source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    for tokenizer, alphabet in ((source_tokenizer, "大小心江河长"), (ideograph_tokenizer, "河桥老在唱歌。，！？（）")):
        text = data.draw(st.text(alphabet, max_size=20))
        assert tokenizer.decode(tokenizer.encode(text)) == text


# --- decoding --------------------------------------------------------------------------------------------------------


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw ids, among which the bare space is frequent."""
    space = tokenizer.pieces.index(SPACE)
    return st.lists(st.one_of(st.integers(0, tokenizer.size - 1), st.just(space)), max_size=40)


def pushes(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in ids]


@with_every_tokenizer
@given(data=st.data())
@modest
def test_what_was_written_is_never_changed(tokenizer: Tokenizer, data: st.DataObject) -> None:
    shared, one, other = (data.draw(ids_of(tokenizer)) for _ in range(3))
    assert pushes(tokenizer, shared + one)[: len(shared)] == pushes(tokenizer, shared + other)[: len(shared)]
    assert "".join(pushes(tokenizer, shared + one)) == tokenizer.decode(shared + one)
    assert tokenizer.decode(shared + one).startswith(tokenizer.decode(shared))


@with_every_tokenizer
@given(data=st.data())
@modest
def test_ids_decode_to_their_pieces_tidily_spaced(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(tokenizer))
    pieces = "".join(tokenizer.pieces[token] for token in ids if token >= len(SPECIAL_SYMBOLS))
    spaced = " ".join(pieces.replace(SPACE, " ").split())
    gapless = re.sub(r"(?<=[一-龥。，！？；：、（）]) (?=[一-龥。，！？；：、（）])", "", spaced)
    assert tokenizer.decode(ids) == gapless


@with_every_tokenizer
@given(data=st.data())
@modest
def test_no_prefix_begins_or_ends_with_a_space(tokenizer: Tokenizer, data: st.DataObject) -> None:
    written = ""
    for text in pushes(tokenizer, data.draw(ids_of(tokenizer))):
        written += text
        assert written == " ".join(written.split())


@with_every_tokenizer
@given(data=st.data())
@modest
def test_special_symbols_leave_no_trace(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(tokenizer))
    assert tokenizer.decode(ids) == tokenizer.decode(token for token in ids if token >= len(SPECIAL_SYMBOLS))


def test_a_space_waits_for_what_follows_it(source_tokenizer: Tokenizer) -> None:
    ids = [
        source_tokenizer.pieces.index(piece) for piece in ("▁the", "▁", "▁river", "s", "▁", "小", "▁", "心", "▁", ".")
    ]
    assert pushes(source_tokenizer, ids) == ["the", "", " river", "s", "", " 小", "", "心", "", " ."]


@with_every_tokenizer
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    for token in (-1, tokenizer.size, 10**9):
        with pytest.raises(VocabularyError, match=rf"token id {token} is not in 0\.\.{tokenizer.size - 1}$"):
            detokenizer.push(token)
    assert detokenizer.push(tokenizer.size - 1) == tokenizer.pieces[-1].lstrip(SPACE)


# --- learning, saving and loading ------------------------------------------------------------------------------------


def test_a_vocabulary_is_loaded_as_it_was_trained(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "v.model"
    learnt = Tokenizer.train(LINES, path, VocabularySpec(size=30))
    read = Tokenizer.load(path)
    assert (read.model, read.pieces, read.size, read.spaced) == (learnt.model, learnt.pieces, 30, True)


def test_training_is_deterministic_and_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"{number % 7} {line}" for number, line in enumerate(LINES * 20)]  # more than the sample
    spec = VocabularySpec(size=40, sample=101)
    first, second = (Tokenizer.train(iter(lines), tmp_path / name, spec).model for name in ("a", "b"))
    assert first == second
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_is_trained_on_a_sample_only(tmp_path: Path) -> None:
    lines = [f"{line} {chr(0x4E00 + number)}" for number, line in enumerate(LINES * 20)]  # each line marked
    tokenizer = Tokenizer.train(lines, tmp_path / "v.model", VocabularySpec(size=135, sample=101))
    assert sum(character >= "一" for character in known_characters(tokenizer)) == 101


@pytest.mark.parametrize("spaced", [True, False])
def test_numbers_are_written_digit_by_digit(tmp_path: Path, spaced: bool) -> None:
    lines = ["In 1998 it cost $5,000.00.", "In 1998 it cost 19.98."] * 50
    spec = VocabularySpec(size=27, normalization="identity", spaced=spaced)
    tokenizer = Tokenizer.train(lines, tmp_path / "v.model", spec)
    assert all(piece.strip("▁").isdigit() <= (len(piece.strip("▁")) == 1) for piece in tokenizer.pieces)
    assert [tokenizer.pieces[token] for token in tokenizer.encode("1998")][-4:] == ["1", "9", "9", "8"]
    assert tokenizer.decode(tokenizer.encode("$19,985,000.00")) == "$19,985,000.00"


def test_ideographs_are_never_joined_in_a_spaced_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["老桥老桥", "老桥 tea老桥"] * 10, tmp_path / "v.model", VocabularySpec(size=14))
    assert not any("老桥" in piece for piece in tokenizer.pieces)


@pytest.mark.parametrize("lines", [[], [""], ["  ", "\u3000"]])
def test_no_text_is_an_error(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "v.model"
    with pytest.raises(VocabularyError, match=f"cannot train 30 pieces for {re.escape(str(path))}: no text$"):
        Tokenizer.train(lines, path, VocabularySpec(size=30))
    assert list(tmp_path.iterdir()) == []


def test_too_large_a_vocabulary_names_the_possible_size(tmp_path: Path) -> None:
    path = tmp_path / "v.model"
    with pytest.raises(VocabularyError, match=r"cannot train 5000 pieces for .*value <= \d+\.$") as caught:
        Tokenizer.train(LINES, path, VocabularySpec(size=5000))
    possible = int(re.findall(r"\d+", str(caught.value))[-1])
    assert Tokenizer.train(LINES, path, VocabularySpec(size=possible)).size == possible


def test_too_small_a_vocabulary_names_the_needed_size(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"smaller than required_chars\. 7 vs \d+\. Increase vocab_size\.$"):
        Tokenizer.train(LINES, tmp_path / "v.model", VocabularySpec(size=7))


@pytest.mark.parametrize("failure", [DataError("corpus.gz:5: bad line"), KeyboardInterrupt()])
def test_a_failure_in_the_lines_is_passed_on(tmp_path: Path, failure: BaseException) -> None:
    def lines() -> Iterator[str]:
        yield from LINES
        raise failure

    with pytest.raises(type(failure)) as caught:
        Tokenizer.train(lines(), tmp_path / "v.model", VocabularySpec(size=30))
    assert caught.value is failure
    assert list(tmp_path.iterdir()) == []


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=f"^{re.escape(str(tmp_path / 'v.model'))}: no such vocabulary file$"):
        Tokenizer.load(tmp_path / "v.model")
    with pytest.raises(VocabularyError, match=f"^{re.escape(str(tmp_path))}: cannot be read: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"not a model", lambda model: model[:500], lambda model: model[:-1]],
    ids=["empty", "text", "half", "cut"],
)
def test_a_file_that_is_not_a_model_is_named(
    tmp_path: Path, source_tokenizer: Tokenizer, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "v.model"
    path.write_bytes(damage(source_tokenizer.model))
    with pytest.raises(VocabularyError, match=f"^{re.escape(str(path))}: not a SentencePiece model$"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    "options",
    [{}, {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, {"control_symbols": ["<blank>", "<mask>"]}],
    ids=["plain", "without blank", "elsewhere"],
)
def test_a_foreign_vocabulary_is_refused(options: dict[str, Any]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=30, minloglevel=2, **options
    )
    with pytest.raises(
        VocabularyError,
        match=r"^f\.model: the first pieces must be <pad> .* <mask>; train the vocabulary with simulmt$",
    ):
        Tokenizer(model.getvalue(), "f.model")


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"size": 6}, {"size": 7}, "size must be above 6, got 6"),
        ({"character_coverage": 0.97}, {"character_coverage": 0.98}, r"character_coverage .* got 0\.97"),
        ({"character_coverage": 1.01}, {"character_coverage": 1.0}, r"character_coverage .* got 1\.01"),
        ({"character_coverage": float("nan")}, {}, "character_coverage .* got nan"),
        ({"sample": 100}, {"sample": 101}, "sample must be above 100, got 100"),
    ],
)
def test_vocabulary_settings_are_checked(wrong: dict[str, float], right: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VocabularySpec(**wrong)  # type: ignore[arg-type]
    VocabularySpec(**right)  # type: ignore[arg-type]


@pytest.mark.parametrize("edge", [{"character_coverage": 0.98}, {"sample": 101}])
def test_every_valid_configuration_can_be_trained(tmp_path: Path, edge: dict[str, float]) -> None:
    assert Tokenizer.train(LINES, tmp_path / "v.model", VocabularySpec(size=30, **edge)).size == 30  # type: ignore[arg-type]


def test_pieces_are_split_at_word_starts(source_tokenizer: Tokenizer) -> None:
    tokenizer = source_tokenizer
    words = ["the", "bridge,", "河", "10:45", "wind's"]
    ids = [tokenizer.encode_word(word) for word in words]
    assert any(len(pieces) > 1 for pieces in ids)
    assert tokenizer.split_to_word_tokens([token for pieces in ids for token in pieces]) == [
        list(pieces) for pieces in ids
    ]
    assert tokenizer.split_to_word_tokens([*ids[0], *ids[1][1:], END]) == [[*ids[0], *ids[1][1:]], [END]]
    assert tokenizer.split_to_word_tokens([]) == []


def test_a_word_that_is_normalised_to_two_counts_as_two(source_tokenizer: Tokenizer) -> None:
    """A free-standing accent becomes a space and an accent above it."""
    first, second = source_tokenizer.split_to_word_tokens(source_tokenizer.encode_word("it´s"))
    assert source_tokenizer.decode(first) == "it"
    assert source_tokenizer.pieces[second[0]].startswith("▁")


def test_long_words_are_not_cached(source_tokenizer: Tokenizer) -> None:
    """Any client of a server can send such words, so they must not fill the cache."""
    tokenizer = Tokenizer(source_tokenizer.model)
    short, long = "bridge", 10 * "bridge"
    for word in (short, long, short, long):
        assert list(tokenizer.encode_word(word)) == tokenizer.encode(word)
    assert tokenizer._encode_short.cache_info().currsize == 1


def test_a_vocabulary_with_damaged_pieces_is_refused(source_tokenizer: Tokenizer) -> None:
    piece = max(source_tokenizer.pieces[6:], key=len)
    damaged = source_tokenizer.model.replace(piece.encode(), b"\xff" * len(piece.encode()), 1)
    with pytest.raises(VocabularyError, match="mine: not a SentencePiece model"):
        Tokenizer(damaged, "mine")


def test_only_training_text_can_be_tagged_as_back_translated(source_tokenizer: Tokenizer) -> None:
    """A user who types the tag gets its characters, and no translation shows it."""
    ids = source_tokenizer.encode("the old bridge")
    tagged = source_tokenizer.encode_training_source("<bt> the old bridge")
    assert tagged == [START, *ids]
    assert source_tokenizer.decode(tagged) == source_tokenizer.decode(ids) == "the old bridge"
    assert source_tokenizer.encode_training_source("the <bt> old bridge") == source_tokenizer.encode(
        "the <bt> old bridge"
    )
    for typed in ("<bt> the old bridge", "<bt>", "<s>", "<s> the"):
        assert START not in source_tokenizer.encode(typed)


@pytest.mark.parametrize(
    ("language", "uncased", "normalization", "spaced"),
    [
        ("zh-Hans", False, "identity", False),
        ("ja", True, "nmt_nfkc_cf", False),
        ("de", False, "nmt_nfkc", True),
        ("EN_us", True, "nmt_nfkc_cf", True),
        ("", False, "nmt_nfkc", True),
    ],
)
def test_a_target_vocabulary_suits_its_language(language: str, uncased: bool, normalization: str, spaced: bool) -> None:
    spec = VocabularySpec.for_target(language, 300, uncased, sample=1000)
    assert (spec.size, spec.normalization, spec.spaced, spec.sample) == (300, normalization, spaced, 1000)


@pytest.mark.parametrize("word", ["😀", "❤️", "👍🏽", "\u200b", "♪♪"])
def test_a_word_without_any_known_piece_has_no_ids(source_tokenizer: Tokenizer, word: str) -> None:
    assert source_tokenizer.encode_word(word) == ()
    assert source_tokenizer.encode(f"tea {word} bread") == source_tokenizer.encode("tea bread")


@pytest.mark.parametrize(("word", "known"), [("tea😀", "tea"), ("😀.", "."), ("t☃ea", "tea")])
def test_unknown_characters_in_a_word_have_no_ids(source_tokenizer: Tokenizer, word: str, known: str) -> None:
    decoded = source_tokenizer.decode(source_tokenizer.encode_word(word))
    assert (decoded, UNK in source_tokenizer.encode_word(word)) == (known, False)
