from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.runtime.bundle import Policy
from simulmt.runtime.decoding import ROWS, Array, log_softmax
from simulmt.runtime.seq2seq import BeamSearch, Row, Seq2SeqDecoder, Seq2SeqSentence
from simulmt.text import END, SPECIAL_SYMBOLS, Tokenizer
from tiny_models import AGREEMENTS, CONFIDENCES, facts, trained, translator

V = 8  # symbols 6 and 7 beside the special ones
WORDS = ([11, 12], [13], [14, 15, 16])  # they end after 2, 3 and 6 tokens
A, B = 6, 7

Attempt = tuple[
    int, int, float, bool
]  # source tokens seen, the prediction and its probability, and whether it is written


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


def test_beam_search_writes_no_special_symbol_and_something() -> None:
    tempting = np.zeros((1, V))
    tempting[0, len(SPECIAL_SYMBOLS) :] = -5
    search = BeamSearch(size=1, longest=1)
    search.extend(tempting)
    assert search.open == [[6]]
    search.extend(tempting)
    assert (search.is_done, search.best) == (True, [6])


# With delay 1, the positions see 2, 2, 3, 6, 6 and 6 tokens at first.
READING: dict[str, tuple[Policy, list[Attempt]]] = {
    "agreement takes another word, not another token": (
        Policy(2),
        [(2, A, 0.9, False), (3, A, 0.1, True), (3, B, 0.1, False), (6, B, 0.1, True), (6, A, 0.1, False)],
    ),
    "what was written does not count for the next position": (
        Policy(2),
        [(2, A, 0.1, False), (3, A, 0.1, True), (3, A, 0.1, False), (6, A, 0.1, True), (6, A, 0.1, False)],
    ),
    "a changed prediction is counted anew": (Policy(2), [(2, A, 0.1, False), (3, B, 0.1, False), (6, B, 0.1, True)]),
    "and so is one that returns": (Policy(2), [(2, A, 0.1, False), (3, B, 0.1, False), (6, A, 0.1, False)]),
    "three in a row": (Policy(3), [(2, A, 0.1, False), (3, A, 0.1, False), (6, A, 0.1, True), (6, A, 0.1, False)]),
    "a sure prediction is written at once": (
        Policy(3, 0.6),
        [(2, A, 0.6, True), (2, B, 0.59, False), (3, A, 0.61, True), (3, A, 0.59, False)],
    ),
    "without agreement": (Policy(1), [(2, A, 0.1, True), (2, A, 0.1, True), (3, B, 0.1, True), (6, A, 0.1, True)]),
    "END reads on, however sure and often predicted": (
        Policy(2, 0.6),
        [(2, A, 0.9, True), (2, END, 0.9, False), (3, END, 0.9, False), (6, END, 0.9, False)],
    ),
    "END interrupts": (Policy(2), [(2, A, 0.1, False), (3, END, 0.1, False), (6, A, 0.1, False)]),
}


@pytest.mark.parametrize(("policy", "attempts"), READING.values(), ids=READING)
def test_what_is_written_while_reading(policy: Policy, attempts: list[Attempt]) -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    assert _attempts(sentence, policy, attempts) == attempts
    assert sentence.is_due == (attempts[-1][0] < 6 or attempts[-1][3])  # what has read all words waits for the next one


@pytest.mark.parametrize("policy", [Policy(2), Policy(9, 0.6)])
def test_after_the_whole_source_everything_is_written(policy: Policy) -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    _attempts(sentence, policy, [(2, A, 0.1, False), (3, B, 0.1, False), (6, A, 0.1, False)])
    assert not sentence.is_due
    sentence.close(delay=1)
    rest: list[Attempt] = [(7, B, 0.1, True), (7, A, 0.1, True), (7, END, 0.1, True)]
    assert _attempts(sentence, policy, rest) == rest
    assert sentence.is_over


def test_a_closed_sentence_is_read_on_word_by_word() -> None:
    """The policy does not depend on whether the next words have already arrived."""
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    sentence.close(delay=1)
    attempts: list[Attempt] = [(2, A, 0.1, False), (3, B, 0.1, False), (6, B, 0.1, True), (6, A, 0.1, False)]
    attempts += [(7, B, 0.1, True), (7, END, 0.1, True)]
    assert _attempts(sentence, Policy(2), attempts) == attempts


def test_without_a_policy_it_sees_and_reads_on_by_tokens() -> None:
    attempts: list[Attempt] = [(1, A, 0.1, True), (2, END, 0.1, False), (3, END, 0.1, False), (4, B, 0.1, True)]
    assert _attempts(_reading(Seq2SeqSentence(beam=1)), Policy(), attempts) == attempts


def test_a_sentence_that_may_end_early_ends_once_predictions_of_its_end_agree() -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, reads_on=False, by_word=True))
    attempts: list[Attempt] = [(2, A, 0.1, False), (3, A, 0.1, True), (3, END, 0.1, False), (6, END, 0.1, True)]
    assert _attempts(sentence, Policy(2), attempts) == attempts
    assert not sentence.is_due


def test_what_had_been_read_is_reported() -> None:
    sentence = _reading(Seq2SeqSentence(beam=1, by_word=True))
    triggers = []
    for _ in range(4):
        sentence.next_due()
        triggers.append(sentence.write([A], 0.1, Policy(2)).trigger)
    assert triggers == [1, 2, 2, 5]


def test_a_failed_step_changes_no_counts(
    source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The second of two batches fails, when the first has its predictions."""
    network = trained("wait-k", source_tokenizer, target_tokenizer)
    model = translator(network, "wait-k", "fp32", tmp_path, agreements=AGREEMENTS, confidences=CONFIDENCES)
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

    def fail_behind_the_first(decoder: Seq2SeqDecoder, rows: Sequence[Row], output: str) -> Array:
        calls.append(len(rows))
        if len(calls) > 1:
            raise RuntimeError("a fault of the engine")
        return predict(decoder, rows, output)

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


def _attempts(sentence: Seq2SeqSentence, policy: Policy, predictions: Sequence[Attempt]) -> list[Attempt]:
    """Let a sentence predict what is given; return what it saw and whether it wrote."""
    found = []
    for _, symbol, probability, _ in predictions:
        assert sentence.is_due
        seen = sentence.next_due().visible
        written = sentence.write([symbol], probability, policy).tokens
        assert written in ([], [symbol])
        found.append((seen, symbol, probability, written == [symbol]))
    return found


def _state(sentence: Any) -> dict[str, Any]:
    """Copy all that decides what a sentence writes; its place in the cache does not."""
    sentence.next_due()  # which may be called at any time
    return copy.deepcopy({name: value for name, value in vars(sentence).items() if name not in ("slot", "cached")})


def _prefixes(length: int) -> list[tuple[int, ...]]:
    return list(product(range(len(SPECIAL_SYMBOLS), V), repeat=length))
