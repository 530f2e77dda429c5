from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.decoding import ROWS, Array, Due, Slot, log_softmax
from simulmt.runtime.seq2seq import BeamSearch, Row, Seq2SeqDecoder, Seq2SeqSentence
from simulmt.runtime.stream import Translator
from simulmt.text import END, SPECIAL_SYMBOLS, START, Tokenizer
from tiny_models import DELAYS, STABILITIES, facts, trained, translator

V = 8  # symbols 6 and 7 beside the special ones
WORDS = ([11, 12], [13], [14, 15, 16])  # they end after 2, 3 and 6 tokens
A, B = 6, 7

Attempt = tuple[int, int, bool, bool]  # source tokens seen, the prediction, whether it is stable and whether written


@given(st.integers(0, 1000), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_wide_beam_search_finds_the_best_translation(seed: int, longest: int) -> None:
    generator = np.random.default_rng(seed)
    table = {prefix: log_softmax(generator.normal(size=V) * 2) for n in range(longest + 1) for prefix in _prefixes(n)}
    complete = {
        prefix: (sum(table[prefix[:i]][token] for i, token in enumerate(prefix)) + table[prefix][END])
        / (len(prefix) + 1)
        for n in range(1, longest + 1)
        for prefix in _prefixes(n)
    }
    search = BeamSearch(size=100, longest=longest)
    while not search.is_done:
        search.extend(np.stack([table[tuple(hypothesis)] for hypothesis in search.open]))
    assert tuple(search.best) == max(complete, key=lambda prefix: complete[prefix])


def test_beam_search_says_where_each_hypothesis_grew_from() -> None:
    search = BeamSearch(size=2, longest=5)
    first = np.full((1, V), -9.0)
    first[0, [6, 7]] = [-0.1, -0.2]
    assert (search.extend(first), search.open) == ([0, 0], [[6], [7]])
    second = np.full((2, V), -9.0)
    second[1, [6, 7]] = -0.1
    assert (search.extend(second), search.open) == ([1, 1], [[7, 6], [7, 7]])


def test_an_ending_below_the_beam_does_not_count() -> None:
    search = BeamSearch(size=1, longest=5)
    frame = np.full((1, V), -9.0)
    frame[0, [6, END]] = [-0.1, -0.2]
    search.extend(frame)
    search.extend(frame)
    assert (search.is_done, search.open) == (False, [[6, 6]])
    frame[0, END] = 0.0
    search.extend(frame)
    assert (search.is_done, search.best) == (True, [6, 6])


def test_beam_search_output_is_not_empty_and_has_no_special_symbols() -> None:
    tempting = np.zeros((1, V))
    tempting[0, len(SPECIAL_SYMBOLS) :] = -5
    search = BeamSearch(size=1, longest=1)
    search.extend(tempting)
    assert search.open == [[6]]
    search.extend(tempting)
    assert (search.is_done, search.best) == (True, [6])


# With delay 1, the positions see 2, 2, 3, 6, 6 and 6 tokens at first.
READING: dict[str, list[Attempt]] = {
    "an unstable token takes another word, not another token": [
        (2, A, False, False),
        (3, A, True, True),
        (3, B, False, False),
        (6, B, True, True),
        (6, A, False, False),
    ],
    "a stable token is written at once": [
        (2, A, True, True),
        (2, A, True, True),
        (3, B, True, True),
        (6, A, True, True),
    ],
    "an unstable token waits, however often it is predicted": [
        (2, A, False, False),
        (3, A, False, False),
        (6, A, False, False),
    ],
    "another token may be written instead": [(2, A, False, False), (3, B, True, True)],
    "what was read for a token is seen by the next": [
        (2, A, False, False),
        (3, A, False, False),
        (6, A, True, True),
        (6, B, True, True),
    ],
    "END reads on, however stable": [
        (2, A, True, True),
        (2, END, True, False),
        (3, END, True, False),
        (6, END, True, False),
    ],
    "and so does an unstable END": [(2, A, True, True), (2, END, False, False), (3, B, True, True)],
}


@pytest.mark.parametrize("attempts", READING.values(), ids=READING)
def test_what_is_written_while_reading(attempts: list[Attempt]) -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    assert _attempts(sentence, attempts) == attempts
    assert sentence.is_due == (attempts[-1][0] < 6 or attempts[-1][3])  # what has read all words waits for the next one


def test_after_the_whole_source_everything_is_written() -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    _attempts(sentence, [(2, A, False, False), (3, B, False, False), (6, A, False, False)])
    assert not sentence.is_due
    sentence.close(delay=1)
    rest: list[Attempt] = [(7, B, False, True), (7, A, False, True), (7, END, False, True)]
    assert _attempts(sentence, rest) == rest
    assert sentence.is_over


def test_a_closed_sentence_is_read_on_word_by_word() -> None:
    """The policy does not depend on whether the next words have already arrived."""
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    sentence.close(delay=1)
    attempts: list[Attempt] = [(2, A, False, False), (3, B, False, False), (6, B, True, True), (6, A, False, False)]
    attempts += [(7, B, False, True), (7, END, False, True)]
    assert _attempts(sentence, attempts) == attempts


def test_without_a_policy_it_sees_and_reads_on_by_tokens() -> None:
    attempts: list[Attempt] = [(1, A, True, True), (2, END, True, False), (3, END, True, False), (4, B, True, True)]
    assert _attempts(_reading(Seq2SeqSentence(beam=1)), attempts) == attempts


def test_a_sentence_that_may_end_early_ends_once_its_end_is_stable() -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, reads_on=False, by_word=True))
    attempts: list[Attempt] = [(2, A, False, False), (3, A, True, True), (3, END, False, False), (6, END, True, True)]
    assert _attempts(sentence, attempts) == attempts
    assert not sentence.is_due


def test_what_had_been_read_is_reported() -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    triggers = []
    for is_stable in (False, True, False, True):
        sentence.next_due()
        triggers.append(sentence.write([A], is_stable).trigger)
    assert triggers == [1, 2, 2, 5]


@pytest.fixture(scope="module")
def deciding(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Translator:
    """A wait-k model with a policy."""
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    return translator(network, "wait-k", "fp32", tmp_path_factory.mktemp("bundle"), stabilities=STABILITIES)


def test_every_row_has_the_threshold_of_its_own_delay(deciding: Translator) -> None:
    decoder = deciding.decoder
    assert isinstance(decoder, Seq2SeqDecoder)
    first, *others = STABILITIES
    rows = [Row(Slot(), START, Due(0, 1, 0, delay)) for delay in (*DELAYS, 0)]
    for shift, accepted in ((0.0, [True] * 5), (-1e-4, [False, True, True, True, True])):
        outputs = {"symbols": np.arange(5), "stability": np.array([first + shift, *others, 0.0])}
        with patch.object(decoder, "predict", return_value=outputs):
            assert decoder._next(rows) == list(enumerate(accepted))


def test_predictions_are_in_the_order_of_their_rows(deciding: Translator) -> None:
    decoder = deciding.decoder
    assert isinstance(decoder, Seq2SeqDecoder)
    sentences = [_reading(decoder.open()) for _ in range(4)]
    for sentence in sentences:
        decoder.caches.reserve(sentence.slot, 6)
    decoder.read(dict.fromkeys(sentences, 6))
    rows = [Row(sentence.slot, last, Due(0, 6, 5, 1)) for sentence, last in zip(sentences, (9, 8, 7, 6), strict=True)]
    found = [decoder.predict([row], "stability", "symbols") for row in rows]
    assert len({float(each["stability"][0]) for each in found}) == 4
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        together = decoder.predict([rows[index] for index in order], "symbols", "stability")
        for output, values in together.items():
            np.testing.assert_array_equal(values, [found[index][output][0] for index in order])


def test_a_failed_step_changes_nothing(deciding: Translator) -> None:
    """The second of two batches fails, when the first has its predictions."""
    model = deciding
    text = "the old bridge over the river was closed in winter"
    streams = [model.stream(delay=3) for _ in range(ROWS + 1)]
    for stream in streams:
        stream.accept(text)
        stream.accept_finish()
    model.step(streams)
    sentences = [stream.current for stream in streams]
    assert isinstance(sentences[0], Seq2SeqSentence)
    assert sentences[0].next_due().position == 0, "the first prediction must not have been accepted"
    before = [_state(sentence) for sentence in sentences]
    predict, calls = Seq2SeqDecoder.predict, list[int]()

    def fail_behind_the_first(decoder: Seq2SeqDecoder, rows: Sequence[Row], *outputs: str) -> dict[str, Array]:
        calls.append(len(rows))
        if len(calls) > 1:
            raise RuntimeError("a fault of the engine")
        return predict(decoder, rows, *outputs)

    with patch.object(Seq2SeqDecoder, "predict", fail_behind_the_first), pytest.raises(RuntimeError):
        model.step(streams)
    assert calls == [ROWS, 1]
    assert [_state(sentence) for sentence in sentences] == before
    alone = model.stream(delay=3)
    expected = facts(alone.push(text) + alone.finish())
    assert [facts(commits) for commits in model.drain(streams)] == [expected] * len(streams)


def _reading(sentence: Seq2SeqSentence) -> Seq2SeqSentence:
    for word in WORDS:
        sentence.read(word, delay=1)
    return sentence


def _attempts(sentence: Seq2SeqSentence, predictions: Sequence[Attempt]) -> list[Attempt]:
    """Let a sentence predict what is given; return what it saw and whether it wrote."""
    found = []
    for _, symbol, is_stable, _ in predictions:
        assert sentence.is_due
        seen = sentence.next_due().visible
        written = sentence.write([symbol], is_stable).tokens
        assert written in ([], [symbol])
        found.append((seen, symbol, is_stable, written == [symbol]))
    return found


def _state(sentence: Any) -> dict[str, Any]:
    """Copy all that decides what a sentence writes; its place in the cache does not."""
    sentence.next_due()  # which may be called at any time
    return copy.deepcopy({name: value for name, value in vars(sentence).items() if name not in ("slot", "cached")})


def _prefixes(length: int) -> list[tuple[int, ...]]:
    return list(product(range(len(SPECIAL_SYMBOLS), V), repeat=length))
