from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.search import Collapse, PrefixBeam
from simulmt.runtime.wording import Context, Heard, Wording, folded_words, frequent_words
from simulmt.text import BLANK, SPECIAL_SYMBOLS

# fmt: off
PIECES = [
    *SPECIAL_SYMBOLS, "▁the", "▁other", "tion", "▁a", "s", "▁10", "00", "的", "的人", "目的", "。", "て", "▁AB",
    "▁Mor", "ning", "'", "t", "▁I", "▁don", "-", "▁King", "ston", ",", "’", "world", "▁d", "Ar",
    "▁morning", "▁Morning", "▁mor", "▁in",
]
# fmt: on
WORDS = frequent_words(["Morning the other station king don't I a AB"], least=1)


def symbol_of(piece: str) -> int:
    return PIECES.index(piece)


def context_of(wording: Wording, *pieces: str) -> Context:
    context = Context()
    for piece in pieces:
        context = wording.after(context, symbol_of(piece))
    return context


def that_pay(wording: Wording, context: Context) -> dict[str, float]:
    paid = {PIECES[symbol]: wording.penalty(symbol, context, Heard()) for symbol in range(len(PIECES))}
    return {piece: penalty for piece, penalty in paid.items() if penalty}


@pytest.mark.parametrize(
    ("last", "again"),
    [
        ("▁the", {"▁the"}),
        ("tion", {"tion"}),
        ("▁AB", {"▁AB"}),
        ("的", {"的", "的人"}),
        ("目的", {"目的", "的", "的人"}),
        ("的人", {"的人"}),
        *((piece, set()) for piece in ("s", "▁a", "00", "▁10", "。", "て", *SPECIAL_SYMBOLS)),
    ],
)
def test_what_counts_as_written_again(last: str, again: set[str]) -> None:
    wording = Wording(PIECES, repeat_penalty=2.5)
    assert that_pay(wording, Context(symbol_of(last))) == dict.fromkeys(again, 2.5)


@pytest.mark.parametrize(
    ("written", "again"),
    [
        (["▁the", "▁Mor"], {"▁Mor", "▁morning"}),  # not "▁mor", which is as little of a word
        (["▁the", "▁Mor", "ning"], {"ning"}),
        (["▁the", "▁M", "or"], {"or", "▁morning"}),
        (["▁Mor"], {"▁Mor"}),  # as a sentence may begin
        (["▁the", ",", "▁Mor"], {"▁Mor"}),
        (["▁the", "▁Mor", ","], set()),
        (["▁the", "▁mor"], {"▁mor"}),
        (["▁the", "▁I"], set()),  # as in "the day I in vain..."
    ],
)
def test_a_noun_that_is_begun_anew_is_written_again(written: list[str], again: set[str]) -> None:
    wording = Wording([*PIECES, "▁M", "or"], repeat_penalty=2.5, word_penalty=0.5, words=["m", "mor", "morning"])
    context = Context()
    for piece in written:
        context = wording.after(context, [*PIECES, "▁M", "or"].index(piece))
    paid = [wording.penalty(symbol, context, Heard()) for symbol in range(len(PIECES) + 2)]
    assert {piece for piece, penalty in zip([*PIECES, "▁M", "or"], paid, strict=True) if penalty >= 2.5} == again


@pytest.mark.parametrize(
    ("written", "piece", "tears"),
    [
        (["▁Mor"], "ning", False),
        (["▁Mor"], "tion", True),
        (["▁Mor"], "▁the", False),  # what is left unfinished cannot be mended any more
        (["▁Mor"], ",", False),
        (["▁Mor", "ning"], "ning", True),
        (["▁Mor", "ning"], "'", False),  # any word may have a possessive
        (["▁Mor", "ning", "'"], "s", False),
        (["▁Mor", "ning", "'"], "t", True),
        (["▁don", "'"], "t", False),
        (["▁don", "’"], "t", False),
        (["▁I", "'"], "t", True),
        (["▁I"], "ning", True),
        (["▁I", "ning"], "ning", False),  # torn already
        (["▁I", "ning"], "world", False),
        (["▁I", "ning", "-"], "world", True),
        (["▁the", "-"], "world", True),  # a hyphen ends a word, and no word begins so
        (["的"], "world", True),
        (["的"], "s", False),  # as station does
        (["▁10"], "00", False),
        (["▁10"], "tion", False),  # numbers may be followed by anything
        ([], "tion", True),
        ([], "▁AB", False),
        *(([], piece, False) for piece in ("的人", "。", "て", *SPECIAL_SYMBOLS)),
    ],
)
def test_what_tears_a_word(written: list[str], piece: str, tears: bool) -> None:
    wording = Wording(PIECES, word_penalty=3.0, words=WORDS)
    assert wording.penalty(symbol_of(piece), context_of(wording, *written), Heard()) == 3.0 * tears


def test_words_of_the_source_may_be_copied_as_far_as_they_were_read() -> None:
    source = [*SPECIAL_SYMBOLS, "▁Kings", "ton", "▁fell"]
    wording = Wording(PIECES, source, word_penalty=3.0, words=WORDS)
    king = context_of(wording, "▁King")
    for read, paid in (((), 3.0), ((6,), 3.0), ((6, 7), 0.0), ((6, 7, 8), 0.0), ((8,), 3.0)):
        assert wording.penalty(symbol_of("ston"), king, Heard(read)) == paid


def test_a_name_may_be_copied_behind_an_article_without_a_vowel() -> None:
    wording = Wording(PIECES, [*SPECIAL_SYMBOLS, "▁Artagnan"], word_penalty=3.0, words=WORDS)
    elided = context_of(wording, "▁d", "’")
    for read, paid in (((), 3.0), ((6,), 0.0)):
        assert wording.penalty(symbol_of("Ar"), elided, Heard(read)) == paid


def test_words_are_counted_in_lower_case_and_numbers_are_none() -> None:
    texts = ["It's 10:45, it's 3rd-class: 这是 Python。", "Python it's"]
    assert folded_words(texts[0]) == ["it's", "it's", "class", "python"]
    assert frequent_words([*texts, "it python's"], least=3) == ["it", "python"]  # possessives are no words of their own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी भाषा।", ["हिन्दी", "भाषा"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("cafe\u0301s and CAFÉS", ["cafe\u0301s", "and", "cafés"]),
        ("ΟΔΟΣ οδός Straße", ["οδοσ", "οδόσ", "strasse"]),
        ("I don’t 'quote' it", ["i", "don't", "quote'", "it"]),
        ("ภาษาไทย 日本語 ﾊﾛｰ 한국어", ["한국어"]),
    ],
)
def test_words_of_many_scripts(text: str, words: list[str]) -> None:
    assert folded_words(text) == words


@given(st.integers(0, 10**6), st.sampled_from([0.5, 3.0, 99.0]), st.integers(1, 12), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_the_choice_is_the_best_of_all_symbols_once_they_have_paid(
    seed: int, penalty: float, frames: int, cut: int
) -> None:
    pieces = PIECES + PIECES[len(SPECIAL_SYMBOLS) :] * 2  # more than are looked at first
    wording = Wording(pieces, pieces, repeat_penalty=penalty, word_penalty=penalty / 2, words=WORDS)
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(frames, len(pieces))).astype(np.float32) * 3
    scores[:, BLANK] += 2
    sources = [Heard(generator.integers(6, len(pieces), 2).tolist()) for _ in range(frames)]
    expected, previous, context = list[int](), BLANK, Context()
    for frame, source in zip(scores, sources, strict=True):
        paid = frame.astype(np.float64)
        for other in {*range(len(pieces))} - {previous, BLANK}:
            paid[other] -= wording.penalty(other, context, source)
        symbol = int(paid.argmax())
        expected.append(symbol)
        context = context if symbol in (BLANK, previous) else wording.after(context, symbol)
        previous = symbol
    found, written = list[int](), Collapse(wording)
    for part in (slice(0, cut), slice(cut, None)):
        best = scores[part].argmax(-1).tolist()
        found += wording.choose(best, scores[part], sources[part], written.previous, written.context)
        written.push(found[part])
    assert found == expected


def test_a_word_that_is_certainly_said_twice_is_written_twice() -> None:
    very = PIECES.index("▁other")
    sure = np.full((3, len(PIECES)), -20.0)
    sure[[0, 1, 2], [very, BLANK, very]] = 0.0
    unsure = sure.copy()
    unsure[2, BLANK] = -1.0
    for scores, written in ((sure, [very, very]), (unsure, [very])):
        wording = Wording(PIECES, repeat_penalty=6.0)
        chosen = wording.choose(scores.argmax(-1).tolist(), scores, [Heard()] * 3, BLANK, Context())
        assert Collapse().push(chosen) == written
        search = PrefixBeam(4, wording)
        assert search.push(scores) + search.finish() == written


def test_a_beam_pays_for_torn_words_also_across_what_it_has_committed() -> None:
    mor, ning, tion = map(symbol_of, ("▁Mor", "ning", "tion"))
    scores = np.full((2, len(PIECES)), -30.0)
    scores[0, mor] = 0.0
    scores[1, [tion, ning]] = -0.5, -1.0
    for penalty, written in ((0.0, [mor, tion]), (2.0, [mor, ning])):
        search = PrefixBeam(3, Wording(PIECES, word_penalty=penalty, words=WORDS))
        assert search.push(scores[:1]) == []
        assert search.push(scores[1:]) + search.finish() == written


def test_a_beam_sees_what_is_best_once_all_of_the_most_likely_have_paid() -> None:
    mor, ning, *torn = map(symbol_of, ("▁Mor", "ning", "tion", "ston", "world"))
    scores = np.full((2, len(PIECES)), -30.0)
    scores[0, mor] = 0.0
    scores[1, [*torn, ning]] = -1.0, -1.1, -1.2, -1.5
    search = PrefixBeam(2, Wording(PIECES, word_penalty=8.0, words=WORDS))
    assert search.push(scores) + search.finish() == [mor, ning]
