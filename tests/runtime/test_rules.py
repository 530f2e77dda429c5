from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError
from simulmt.runtime.bundle import SHIPPED, SOURCE, TARGET
from simulmt.runtime.decoding import Collapse
from simulmt.runtime.rules import (
    SCORE_RULES,
    Context,
    DecodingRules,
    DoubledPunctuation,
    EarlyFullStop,
    RulesConfig,
    SourcePrefix,
    folded_words,
    frequent_words,
)
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS, Tokenizer

# fmt: off
PIECES = [
    *SPECIAL_SYMBOLS, "▁the", "▁other", "tion", "▁a", "s", "▁10", "00", "的", "的人", "目的", "。", "て", "▁AB",
    "▁Mor", "ning", "'", "t", "▁I", "▁don", "-", "▁King", "ston", ",", "’", "world", "▁d", "Ar",
    "▁morning", "▁Morning", "▁mor", "▁in",
]
# fmt: on
WORDS = frequent_words(["Morning the other station king don't I a AB"], min_count=1)


def symbol_of(piece: str) -> int:
    return PIECES.index(piece)


def context_of(rules: DecodingRules, *pieces: str) -> Context:
    context = Context()
    for piece in pieces:
        context = rules.extend(context, symbol_of(piece))
    return context


def penalised(rules: DecodingRules, context: Context) -> dict[str, float]:
    penalties = {PIECES[symbol]: rules.penalty(symbol, context, SourcePrefix()) for symbol in range(len(PIECES))}
    return {piece: penalty for piece, penalty in penalties.items() if penalty}


@pytest.mark.parametrize(
    ("last", "repeats"),
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
def test_repeated_symbols(last: str, repeats: set[str]) -> None:
    rules = DecodingRules(RulesConfig(repeated_symbol=2.5), PIECES)
    assert penalised(rules, Context(symbol_of(last))) == dict.fromkeys(repeats, 2.5)


@pytest.mark.parametrize(
    ("written", "restarts"),
    [
        (["▁the", "▁Mor"], {"▁morning"}),  # not "▁mor", which is no more of a word
        (["▁the", "▁Mor", "ning"], set()),
        (["▁the", "▁K", "ing"], {"▁kingdom"}),
        (["▁Mor"], set()),  # as a sentence may begin
        (["▁the", ",", "▁Mor"], set()),
        (["▁the", "▁Mor", ","], set()),
        (["▁the", "▁mor"], set()),
        (["▁the", "▁I"], set()),  # as in "the day I in vain..."
    ],
)
def test_restarted_nouns(written: list[str], restarts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PIECES", [*PIECES, "▁K", "ing", "▁kingdom"])
    rules = DecodingRules(RulesConfig(restarted_noun=2.5), PIECES)
    assert penalised(rules, context_of(rules, *written)) == dict.fromkeys(restarts, 2.5)


@pytest.mark.parametrize(
    ("written", "piece", "is_unknown"),
    [
        (["▁Mor"], "ning", False),
        (["▁Mor"], "tion", True),
        (["▁Mor"], "▁the", False),  # the unfinished word cannot be mended any more
        (["▁Mor"], ",", False),
        (["▁Mor", "ning"], "ning", True),
        (["▁Mor", "ning"], "'", False),  # any word may have a possessive
        (["▁Mor", "ning", "'"], "s", False),
        (["▁Mor", "ning", "'"], "t", True),
        (["▁don", "'"], "t", False),
        (["▁don", "’"], "t", False),
        (["▁I", "'"], "t", True),
        (["▁I"], "ning", True),
        (["▁I", "ning"], "ning", False),  # unknown already
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
def test_unknown_words(written: list[str], piece: str, is_unknown: bool) -> None:
    rules = DecodingRules(RulesConfig(unknown_word=3.0), PIECES, lexicon=WORDS)
    assert rules.penalty(symbol_of(piece), context_of(rules, *written), SourcePrefix()) == 3.0 * is_unknown


def test_words_of_the_source_may_be_copied_as_far_as_they_were_read() -> None:
    source = [*SPECIAL_SYMBOLS, "▁Kings", "ton", "▁fell"]
    rules = DecodingRules(RulesConfig(unknown_word=3.0), PIECES, source, WORDS)
    king = context_of(rules, "▁King")
    for read, penalty in (((), 3.0), ((6,), 3.0), ((6, 7), 0.0), ((6, 7, 8), 0.0), ((8,), 3.0)):
        assert rules.penalty(symbol_of("ston"), king, SourcePrefix(read)) == penalty


def test_a_name_may_be_copied_after_an_elided_article() -> None:
    rules = DecodingRules(RulesConfig(unknown_word=3.0), PIECES, [*SPECIAL_SYMBOLS, "▁Artagnan"], WORDS)
    elided = context_of(rules, "▁d", "’")
    for read, penalty in (((), 3.0), ((6,), 0.0)):
        assert rules.penalty(symbol_of("Ar"), elided, SourcePrefix(read)) == penalty


def test_words_are_counted_in_lower_case_without_numbers() -> None:
    texts = ["It's 10:45, it's 3rd-class: 这是 Python。", "Python it's"]
    assert folded_words(texts[0]) == ["it's", "it's", "class", "python"]
    assert frequent_words([*texts, "it python's"], min_count=3) == [
        "it",
        "python",
    ]  # possessives are no words of their own


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
def test_the_best_symbol_less_its_penalty_is_chosen(seed: int, penalty: float, frames: int, cut: int) -> None:
    pieces = PIECES + PIECES[len(SPECIAL_SYMBOLS) :] * 2  # more than are looked at first
    config = RulesConfig(repeated_symbol=penalty, restarted_noun=penalty, unknown_word=penalty / 2)
    rules = DecodingRules(config, pieces, pieces, WORDS)
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(frames, len(pieces))).astype(np.float32) * 3
    scores[:, BLANK] += 2
    sources = [SourcePrefix(generator.integers(6, len(pieces), 2).tolist()) for _ in range(frames)]
    expected, previous, context = list[int](), BLANK, Context()
    for frame, source in zip(scores, sources, strict=True):
        remaining = frame.astype(np.float64)
        for other in {*range(len(pieces))} - {previous, BLANK}:
            remaining[other] -= rules.penalty(other, context, source)
        symbol = int(remaining.argmax())
        expected.append(symbol)
        context = context if symbol in (BLANK, previous) else rules.extend(context, symbol)
        previous = symbol
    found, written = list[int](), Collapse(rules)
    for part in (slice(0, cut), slice(cut, None)):
        best = scores[part].argmax(-1).tolist()
        found += rules.choose(best, scores[part], sources[part], written.previous, written.context)
        written.push(found[part])
    assert found == expected


def test_a_word_repeated_with_certainty_is_written_twice() -> None:
    very = PIECES.index("▁other")
    sure = np.full((3, len(PIECES)), -20.0)
    sure[[0, 1, 2], [very, BLANK, very]] = 0.0
    unsure = sure.copy()
    unsure[2, BLANK] = -1.0
    for scores, written in ((sure, [very, very]), (unsure, [very])):
        rules = DecodingRules(RulesConfig(repeated_symbol=6.0), PIECES)
        chosen = rules.choose(scores.argmax(-1).tolist(), scores, [SourcePrefix()] * 3, BLANK, Context())
        assert Collapse().push(chosen) == written


def test_a_continued_symbol_is_not_penalised() -> None:
    """Where the best symbol makes an unknown word, the symbol of the previous frame may continue without penalty."""
    rules = DecodingRules(RulesConfig(repeated_symbol=6.0, unknown_word=6.0), PIECES, lexicon=WORDS)
    the, world = symbol_of("▁the"), symbol_of("world")
    scores = np.full((1, len(PIECES)), -20.0)
    scores[0, [world, the]] = [0.0, -1.0]
    assert rules.choose([world], scores, [SourcePrefix()], the, context_of(rules, "▁the")) == [the]


ALL = RulesConfig(1.0, 2.0, 4.0, doubled_punctuation=True, early_full_stop=True)
ON_SCORES = ["repeated_symbol", "restarted_noun", "unknown_word"]  # of CTC


def test_each_rule_is_switched_off_by_itself() -> None:
    assert RulesConfig().active == []
    assert ALL.active == [*ON_SCORES, "doubled_punctuation", "early_full_stop"]
    for name in ALL.active:
        rest = ALL.without(name)
        assert rest.active == [other for other in ALL.active if other != name]
        penalties = [each.penalty for each in DecodingRules(rest, PIECES).filters]
        assert penalties == [getattr(rest, other) for other in rest.active if other in ON_SCORES]
        assert (rest.text_filter() is None) == (name == "doubled_punctuation")
    assert ALL.without(*ALL.active) == RulesConfig()
    with pytest.raises(ConfigError, match="nouns: no such rule; choose from repeated_symbol, restarted_noun, "):
        ALL.without("nouns")


def test_every_filter_has_a_setting() -> None:
    assert list(SCORE_RULES) == ON_SCORES == ALL.on_scores


def test_a_full_stop_is_early_before_that_of_the_source() -> None:
    source, target = (Tokenizer.load(SHIPPED / "en-zh" / name) for name in (SOURCE, TARGET))
    rule = EarlyFullStop(source, target)
    tokens = [*source.encode("Stay here! I lost my passport in Paris."), END]
    allowed = [source.pieces[token] for index, token in enumerate(tokens) if rule.allows(tokens, index)]
    assert allowed == ["!", "▁i", ".", source.pieces[END]]
    symbols = {target.pieces[symbol] for symbol in rule.symbols}
    assert {"。", "？", "！", "。”"} <= symbols
    assert symbols.isdisjoint({"，", ".", "…", "的"})


def test_a_rule_is_for_its_language() -> None:
    ALL.check_language("en")
    ALL.without("restarted_noun").check_language("zh")
    with pytest.raises(ConfigError, match="restarted_noun is a rule for target language en, not zh"):
        ALL.check_language("zh")


class TestDoubledPunctuation:
    texts = st.text(alphabet="a字 ,:.!，：。“”（）()", max_size=12)

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("是的，。", "是的。"),
            ("抱歉，，我们", "抱歉，我们"),
            ("他说，：“好", "他说：“好"),
            ("走了。，然后", "走了。然后"),
            ("trade unions,, and", "trade unions, and"),
            ("well,.", "well."),
            ("因为下雨，", "因为下雨，"),
            ("1,234.5 at 7:45", "1,234.5 at 7:45"),
            ("e.g., std::vector", "e.g., std::vector"),
            ("“好，”他说：“走。”", "“好，”他说：“走。”"),
            ("what?! well...", "what?! well..."),
            ("他自称“”，然后", "他自称，然后"),
            ("他说，“”，然后", "他说，然后"),
            ("规则（）一", "规则一"),
            ("“好”", "“好”"),
            ("call f() now", "call f() now"),
            ("他说：“", "他说：“"),
        ],
    )
    def test_examples(self, written: str, expected: str) -> None:
        assert ALL.filter_text(written) == expected
        assert RulesConfig().filter_text(written) == written

    @given(text=texts)
    def test_one_of_several_marks_is_kept_and_empty_pairs_are_dropped(self, text: str) -> None:
        expected = re.sub("“”|（）|[,，：](?=[.,:!，：。])|:(?=[.,!，：。])", "", text)
        assert ALL.filter_text(text) == re.sub("(?<=[。，：])[，：]+", "", expected)

    @given(text=texts, cuts=st.lists(st.integers(0, 12)))
    def test_output_is_append_only_and_independent_of_chunks(self, text: str, cuts: list[int]) -> None:
        text_filter, written = DoubledPunctuation(), ""
        for start, stop in pairwise([0, *sorted(cuts), len(text)]):
            written += text_filter.push(text[start:stop])
            assert ALL.filter_text(text).startswith(written)
        assert written + text_filter.finish() == ALL.filter_text(text)
