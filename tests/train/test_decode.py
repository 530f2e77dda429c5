from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from simulmt.data.store import Dataset
from simulmt.model.beam import beam_search
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.runtime.decoding import SentenceState
from simulmt.runtime.rules import DecodingRules, RulesConfig
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS, START, Tokenizer
from simulmt.train.batches import DeviceStore
from simulmt.train.decode import GREEDY, bleu, collapse, scores_by_blank_penalty, translate_store
from tiny_models import seeing

CPU = torch.device("cpu")


def collapse_slowly(symbols: list[int]) -> list[int]:
    return [symbol for symbol, _ in groupby(symbols) if symbol != BLANK]


def test_a_blank_between_equal_symbols_makes_both_count() -> None:
    frames = torch.tensor([[7, 7, BLANK, 7, 8, 8, BLANK, BLANK, 9]])
    assert collapse(frames, [9]) == [[7, 7, 8, 9]]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(3, 6), min_size=9, max_size=9), st.integers(0, 9)), min_size=1, max_size=5)
)
def test_collapse_is_groups_without_blanks(rows: list[tuple[list[int], int]]) -> None:
    frames = torch.tensor([symbols for symbols, _ in rows])
    lengths = [length for _, length in rows]
    expected = [collapse_slowly(symbols[:length]) for symbols, length in rows]
    assert collapse(frames, lengths) == expected


def lively(model: nn.Module) -> nn.Module:
    """Return a model in fp64 and training mode, with weights so large that translations are long and differ."""
    torch.manual_seed(3)
    model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def sentences(dataset: Dataset) -> list[Tensor]:
    return [torch.from_numpy(dataset.dev.pair(row)[0].astype("int64"))[None] for row in range(len(dataset.dev))]


@pytest.fixture(scope="module", params=[False, True], ids=["pieces", "whole words"])
def ctc(dataset: Dataset, request: pytest.FixtureRequest) -> CTCModel:
    sizes = dataset.source_tokenizer.size, dataset.target_tokenizer.size
    config = CTCConfig(*sizes, width=16, inner=32, heads=2, layers=2, dropout=0.3, whole_words=request.param)
    model = lively(CTCModel.build(config))
    assert isinstance(model, CTCModel)
    model.encoder.mark_words(dataset.source_tokenizer.word_starts)
    return model


@torch.no_grad()
def stream(model: CTCModel, words: list[list[int]], delay: int, blank_penalty: float) -> list[int]:
    """Translate word by word, as a live stream; recompute the prefix and keep what each word finishes."""
    read, symbols = list[int](), list[int]()
    for word in words:
        read += word
        finished = len(read) if word[-1] == END else max(0, len(read) - delay + 1)
        logits = model(torch.tensor([read]), torch.tensor([len(read)]), delay)
        logits[:, :, BLANK] -= blank_penalty
        symbols += logits[0, len(symbols) : finished * model.mu].argmax(-1).tolist()
    assert len(symbols) == model.mu * sum(map(len, words))
    return collapse_slowly(symbols)


@pytest.mark.parametrize(("delay", "blank_penalty"), [(1, 0.0), (3, 0.0), (3, 5.0), (9, -5.0), (200, 0.0)])
def test_a_store_is_translated_as_streams_would_be(
    dataset: Dataset, ctc: CTCModel, delay: int, blank_penalty: float
) -> None:
    store = DeviceStore(dataset.dev, CPU)
    translated = translate_store(ctc, store, delay, batch_tokens=150, blank_penalty=blank_penalty)
    assert ctc.training  # as it was before
    ctc.eval()
    part = dataset.source_tokenizer.split_to_word_tokens
    expected = [stream(ctc, part(source[0].tolist()), delay, blank_penalty) for source in sentences(dataset)]
    ctc.train()
    assert translated == dict(enumerate(expected))
    assert len({tuple(ids) for ids in expected}) > len(expected) / 2


class RecordingRules(DecodingRules):
    """Rules that change nothing and record the visible source tokens of each frame."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(RulesConfig(repeated_symbol=1.0), pieces)
        self.sources: list[list[list[int]]] = []

    def choose(self, symbols: Any, _scores: Any, sources: Any, *_: Any) -> list[int]:
        self.sources.append([source.tokens for source in sources])
        return list(symbols)


@pytest.mark.parametrize("whole_words", [True, False])
def test_rules_see_what_a_stream_has_read(dataset: Dataset, whole_words: bool) -> None:
    source, target = dataset.source_tokenizer, dataset.target_tokenizer
    model = CTCModel.build(CTCConfig(source.size, target.size, 16, 32, 2, 1, whole_words=whole_words)).eval()
    model.encoder.mark_words(source.word_starts)
    rules, store = RecordingRules(target.pieces), DeviceStore(dataset.dev, CPU)
    scores_by_blank_penalty(model, store, 2, [0.0], [["-"] * len(store)], target, 150, rules)
    in_order = dict(zip((int(row) for rows, _ in store.by_length(150) for row in rows), rules.sources, strict=True))
    for number, (sentence,) in enumerate(sentences(dataset)):
        stream = SentenceState(whole_words)
        for word in source.split_to_word_tokens(sentence.tolist()[:-1]):
            stream.read(word, 2)
        stream.close(2)
        assert in_order[number] == [stream.tokens[: due.visible] for due in stream.due for _ in range(model.mu)]


def test_one_pass_scores_every_blank_penalty(dataset: Dataset, ctc: CTCModel) -> None:
    store, penalties = DeviceStore(dataset.dev, CPU), (-20.0, -5.0, 0.0)
    ctc.eval()
    expected = {}
    for penalty in penalties:
        ids = translate_store(ctc, store, 3, blank_penalty=penalty)
        hypotheses = [dataset.target_tokenizer.decode(ids[row]) for row in range(len(store))]
        expected[penalty] = bleu(hypotheses, [hypotheses[5:] + hypotheses[:5]], dataset.target_tokenizer)
        references = [hypotheses[5:] + hypotheses[:5]]
        found = scores_by_blank_penalty(ctc, store, 3, penalties, references, dataset.target_tokenizer, 150)
        assert found[penalty] == expected[penalty]
    ctc.train()
    assert len(set(expected.values())) == len(penalties)


@torch.no_grad()
def write_greedily(model: Seq2SeqModel, source: Tensor, delay: int | None) -> list[int]:
    """Alternate reading and writing, reading on instead of ending early; the teacher reads everything first."""
    longest = int(GREEDY.max_ratio * source.shape[1] + GREEDY.max_extra)
    state = model.encode(source, torch.tensor([source.shape[1]]), longest + 1)
    written: list[int] = []
    read, token = 0 if delay else source.shape[1], START
    while True:
        if delay is not None:
            read = max(read, min(len(written) + delay, source.shape[1]))
        logits, after = model.step(torch.tensor([[token]]), seeing(state, read))
        allowed = logits[0].clone()
        allowed[[symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]] = -torch.inf
        if len(written) < GREEDY.min_length:
            allowed[END] = -torch.inf
        is_full = len(written) == longest
        if int(allowed.argmax()) == END and read < source.shape[1] and not is_full:
            read += 1
            continue
        token, state = int(allowed.argmax()), after._replace(context=state.context)
        if token == END or is_full:
            return written
        written.append(token)


@pytest.mark.parametrize("delay", [1, 3, 200, None])
def test_wait_k_and_teacher_write_what_reading_step_by_step_gives(dataset: Dataset, delay: int | None) -> None:
    sizes = {"width": 16, "inner": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 1, "dropout": 0.3}
    vocabularies = dataset.source_tokenizer.size, dataset.target_tokenizer.size
    model = Seq2SeqModel.build(Seq2SeqConfig(*vocabularies, causal=delay is not None, **sizes))  # type: ignore[arg-type]
    lively(model)
    with torch.no_grad():  # otherwise it would repeat its first word
        model.target_embedding.weight *= 0.02
        for layer in model.layers:
            layer.cross_attention.key_value.weight *= 4
    store = DeviceStore(dataset.dev, CPU)
    words = Counter(word for ids in translate_store(model, store, delay).values() for word in ids)
    with torch.no_grad():  # it ends where it would write the rarest of them
        model.target_embedding.weight[END] = 1.01 * model.target_embedding.weight[words.most_common()[-1][0]]
    translated = translate_store(model, store, delay, batch_tokens=150)
    model.eval()
    if delay == 1:
        config, sources = replace(GREEDY, reads_on=False), sentences(dataset)
        hasty = [beam_search(model, each, torch.tensor([each.shape[1]]), config, delay)[0][0] for each in sources]
        assert sum(len(hypothesis.tokens) < len(translated[row]) for row, hypothesis in enumerate(hasty)) > 2
    assert translated == {row: write_greedily(model, source, delay) for row, source in enumerate(sentences(dataset))}


def test_shards_are_parts_of_the_whole(dataset: Dataset, ctc: CTCModel) -> None:
    store = DeviceStore(dataset.dev, CPU)
    whole = translate_store(ctc, store, 2, batch_tokens=150)
    parts = [translate_store(ctc, store, 2, batch_tokens=150, shard=(index, 3)) for index in range(3)]
    assert all(parts)
    assert sum(map(len, parts)) == len(whole)
    assert {row: ids for part in parts for row, ids in part.items()} == whole


def test_more_shards_than_batches_leave_some_empty(dataset: Dataset, ctc: CTCModel) -> None:
    store = DeviceStore(dataset.dev, CPU)
    assert translate_store(ctc, store, 1, batch_tokens=10**6, shard=(1, 2)) == {}


def test_text_without_spaces_is_scored_by_characters(
    ideograph_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> None:
    hypothesis, reference = ["我们在车站等火车来。"], ["我们在车站等汽车来。"]
    by_characters = sacrebleu.corpus_bleu(hypothesis, [reference], tokenize="zh").score
    assert bleu(hypothesis, [reference], ideograph_tokenizer) == pytest.approx(by_characters)
    assert by_characters > 50
    assert bleu(hypothesis, [reference], target_tokenizer) < 1  # with the other tokenisation, it is one wrong word


def test_text_with_spaces_is_scored_by_words_whatever_their_case(target_tokenizer: Tokenizer) -> None:
    reference = ["Die alte Brücke war im Winter gesperrt."]
    assert bleu(["die ALTE brücke war im winter gesperrt ."], [reference], target_tokenizer) == pytest.approx(100)
    assert bleu([""], [reference], target_tokenizer) == 0


def test_every_set_of_references_counts(target_tokenizer: Tokenizer) -> None:
    hypotheses = ["Die alte Brücke war gesperrt.", "Der Bus fährt heute nicht mehr."]
    sets = [
        ["Die alte Brücke war gesperrt.", "Etwas ganz anderes."],
        ["Nichts davon.", "Der Bus fährt heute nicht mehr."],
    ]
    assert bleu(hypotheses, sets, target_tokenizer) == pytest.approx(100)
    assert bleu(hypotheses, sets[:1], target_tokenizer) < 90
