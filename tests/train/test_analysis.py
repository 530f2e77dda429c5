from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from simulmt.cli import app
from simulmt.data.corpus import read_lines
from simulmt.data.store import Dataset
from simulmt.errors import CheckpointError, ConfigError, VocabularyError
from simulmt.eval.order import OracleScore, SortedSentence
from simulmt.eval.results import read_records
from simulmt.model.asn import ASNConfig, SortedCTCModel, SortingStatistics
from simulmt.model.beam import beam_search
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import Batch
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.text import BLANK, END, SPECIAL_SYMBOLS, START, Tokenizer
from simulmt.train import analysis
from simulmt.train.analysis import (
    BLANK_LABEL,
    GREEDY,
    Sorter,
    align_words,
    bleu,
    collapse,
    explained_variance,
    heat_map,
    oracle_order,
    scores_by_blank_penalty,
    sort_pairs,
    translate_store,
    viterbi,
)
from simulmt.train.batches import DeviceStore
from simulmt.train.run import record_run
from tiny_models import seeing

from .helpers import ALONE, run, tiny

CPU = torch.device("cpu")
PAIRS = [
    ("The old bridge was closed.", "Die alte Brücke war gesperrt."),
    ("We waited.", "Wir warteten am Bahnhof, bis der letzte Zug kam, und die Kinder sangen."),
    ("Nobody knows why the clock in the kitchen runs backwards.", "Niemand weiß es."),
    ("Have you ever seen the harbour before sunrise?", ""),
]


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


# --- The fit of a policy ------------------------------------------------------------------------------------


RATE = 1.5  # source tokens per target token; the translations of the development set are longer than their sources


class Shown(nn.Module):
    """A policy that returns what it is shown."""

    def forward(self, states: Tensor) -> Tensor:
        return states[..., 0]


@pytest.fixture
def deciding(dataset: Dataset) -> Seq2SeqModel:
    """A wait-k model with a policy, in training mode."""
    sizes = {"width": 16, "inner": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "policy_inner": 8}
    vocabularies = dataset.source_tokenizer.size, dataset.target_tokenizer.size
    model = lively(Seq2SeqModel.build(Seq2SeqConfig(*vocabularies, causal=True, dropout=0.3, **sizes)))
    assert isinstance(model, Seq2SeqModel)
    with torch.no_grad():  # otherwise nearly everything would be stable
        model.final_norm.weight.mul_(3)
    return model.float()


def stabilities(model: Seq2SeqModel, dataset: Dataset, delays: Sequence[int], proportional: bool) -> list[Tensor]:
    """Return the predicted stability of every token of the development set, sentence by sentence, and the true one."""
    assert model.policy is not None
    found = []
    for delay, (source, target) in product(delays, map(dataset.dev.pair, range(len(dataset.dev)))):
        rows = [torch.from_numpy(side.astype("int64"))[None] for side in (source, target)]
        rates = torch.tensor([RATE]) if proportional else None
        batch = Batch(rows[0], torch.tensor([len(source)]), rows[1], torch.tensor([len(target)]))
        states, stability = model.stability(batch, delay, rates)
        found.append(torch.stack([model.policy(states).sigmoid().detach(), stability]))
    return list(torch.cat(found, 1))


@pytest.mark.parametrize("delays", [(1,), (1, 3)])
@pytest.mark.parametrize("proportional", [False, True])
def test_the_fit_of_a_policy_is_the_share_of_variance_explained(
    dataset: Dataset,
    deciding: Seq2SeqModel,
    delays: tuple[int, ...],
    proportional: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(analysis, "proportional_rates", lambda batch: torch.full((len(batch.source),), RATE))
    store = DeviceStore(dataset.dev, CPU)
    predicted, true = stabilities(deciding, dataset, delays, proportional)
    residual, total = ((true - predicted) ** 2).sum(), ((true - true.mean()) ** 2).sum()
    for batch_tokens in (150, 4096):
        found = explained_variance(deciding, store, delays, proportional, batch_tokens)
        assert found == pytest.approx(100 * (1 - float(residual / total)), rel=1e-3)
    assert deciding.training  # as it was before
    assert found != pytest.approx(explained_variance(deciding, store, (2,), proportional), rel=1e-3)
    assert found != pytest.approx(explained_variance(deciding, store, delays, not proportional), rel=1e-3)


def test_a_perfect_policy_explains_all_variance_and_the_mean_none(
    dataset: Dataset, deciding: Seq2SeqModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stability = DeviceStore(dataset.dev, CPU), deciding.stability
    _, true = stabilities(deciding, dataset, (1, 3), proportional=False)
    assert true.std() > 0.05
    deciding.policy = Shown()  # type: ignore[assignment]

    def showing(value: Tensor | None) -> float:
        """Show the policy the true stability, or a constant."""

        def shown(*arguments: Any) -> tuple[Tensor, Tensor]:
            _, found = stability(*arguments)
            return (found if value is None else value.expand_as(found)).logit()[:, None], found

        monkeypatch.setattr(deciding, "stability", shown)
        return explained_variance(deciding, store, (1, 3), proportional=False)

    assert showing(None) == pytest.approx(100, abs=1e-3)
    assert showing(true.mean()) == pytest.approx(0, abs=1e-3)
    assert showing(true.mean() / 2) < -10


def test_where_stability_never_varies_the_fit_is_finite(dataset: Dataset, deciding: Seq2SeqModel) -> None:
    """Every token is stable once the delay is as long as the source."""
    assert math.isfinite(explained_variance(deciding, DeviceStore(dataset.dev, CPU), (200,), proportional=False))


# --- Shards and BLEU ----------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def sorter(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> Sorter:
    return lively_sorter(source_tokenizer, target_tokenizer)


def lively_sorter(source: Tokenizer, target: Tokenizer) -> Sorter:
    """Return an untrained model in fp64, with weights so large that sortings and translations vary."""
    torch.manual_seed(5)
    translator = CTCModel.build(CTCConfig(source.size, target.size, width=16, inner=24, heads=2, layers=1))
    model = SortedCTCModel.build(translator, ASNConfig(layers=1, iterations=60, tau=0.5)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2 / parameter.shape[1] ** 0.5)
    return Sorter(model, source, target, (1, 3))


# --- Viterbi ------------------------------------------------------------------------------------------------


def collapsed(path: Sequence[int], labels: Sequence[int]) -> list[int]:
    """Return the symbols of a path of label numbers, collapsed as in CTC."""
    symbols = [BLANK if number == 0 else labels[number - 1] for number in path]
    return [symbol for symbol, _ in groupby(symbols) if symbol != BLANK]


def every_path(frames: int, labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for path in product(range(len(labels) + 1), repeat=frames):
        numbers = [number for number, _ in groupby(path) if number]
        if numbers == list(range(1, len(labels) + 1)) and collapsed(path, labels) == list(labels):
            yield path


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(6, 7), max_size=3))
def test_viterbi_is_the_best_of_all_paths(data: st.DataObject, frames: int, labels: list[int]) -> None:
    rows = st.lists(st.integers(-9, 9), min_size=len(labels) + 1, max_size=len(labels) + 1)
    scores = np.array(data.draw(st.lists(rows, min_size=frames, max_size=frames)), float)
    found = viterbi(scores, labels)
    totals = {path: sum(scores[u, c] for u, c in enumerate(path)) for path in every_path(frames, labels)}
    if not totals:
        assert found is None
    else:
        assert found is not None
        assert totals[tuple(found)] == max(totals.values())


def test_viterbi_puts_a_blank_between_equal_labels() -> None:
    scores = np.array([[0.0, 5.0, 0.0], [0.0, 5.0, 5.0], [0.0, 0.0, 5.0]])
    assert viterbi(scores, [8, 8]) == [1, 0, 2]
    assert viterbi(scores, [8, 9]) in ([1, 1, 2], [1, 2, 2])
    assert viterbi(scores[:2], [8, 8]) is None


# --- Oracle order -------------------------------------------------------------------------------------------


@torch.inference_mode()
def translated_alone(sorter: Sorter, pair: tuple[str, str], delay: int, penalty: float, oracle: bool) -> str:
    source, target = (torch.tensor([tokens]) for tokens in sorter.encode(*pair))
    lengths = torch.tensor([source.shape[1]]), torch.tensor([target.shape[1]])
    H, Z = sorter.model.sort(Batch(source, lengths[0], target, lengths[1]), delay)
    translator = sorter.model.translator
    logits = translator.logits(translator.frames(Z.double() @ H if oracle else H))[0]
    logits[:, BLANK] -= penalty
    return sorter.target.decode(symbol for symbol, _ in groupby(logits.argmax(-1).tolist()) if symbol != BLANK)


@pytest.mark.parametrize(("delay", "penalty"), [(1, 0.0), (3, -2.0)])
def test_oracle_order_translates_the_sorted_states(sorter: Sorter, delay: int, penalty: float) -> None:
    found = oracle_order(sorter, PAIRS, delay, penalty)
    assert found.oracle == [translated_alone(sorter, pair, delay, penalty, oracle=True) for pair in PAIRS]
    assert found.default == [translated_alone(sorter, pair, delay, penalty, oracle=False) for pair in PAIRS]
    assert found.oracle != found.default


def test_oracle_order_measures_z_of_all_sentences(sorter: Sorter) -> None:
    matrices = [torch.from_numpy(each.Z)[None] for each in sort_pairs(sorter, PAIRS, 1)]
    expected = SortingStatistics.of((Z, torch.tensor([Z.shape[1]])) for Z in matrices)
    assert oracle_order(sorter, PAIRS, 1).statistics == pytest.approx(expected, rel=1e-5)


def test_the_reference_changes_only_the_oracle_translation(sorter: Sorter) -> None:
    swapped = [(source, PAIRS[0][1]) for source, _ in PAIRS]
    one, other = oracle_order(sorter, PAIRS, 1), oracle_order(sorter, swapped, 1)
    assert one.default == other.default
    assert one.oracle != other.oracle


# --- Z and its labels ---------------------------------------------------------------------------------------


def test_the_sorting_of_a_sentence_does_not_depend_on_its_batch(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = sort_pairs(sorter, PAIRS, 3)
    monkeypatch.setattr(analysis, "BATCH_TOKENS", 1)
    for one, other in zip(together, sort_pairs(sorter, PAIRS, 3), strict=True):
        np.testing.assert_allclose(one.Z, other.Z, atol=1e-6)
        assert one.path == other.path


def test_rows_are_labelled_with_the_whole_target_in_order(sorter: Sorter) -> None:
    for (source, target), sorting in zip(PAIRS, sort_pairs(sorter, PAIRS, 1), strict=True):
        drawn = heat_map(sorter, sorting)
        tokens = [*sorter.source.encode(source), END]
        assert drawn.columns == [sorter.source.pieces[token] for token in tokens]
        assert drawn.Z.shape == (len(tokens), len(tokens)) == (len(drawn.rows), len(drawn.columns))
        np.testing.assert_allclose(drawn.Z.sum(0), 1, atol=1e-4)
        labels = [label for row in drawn.rows for label in row.split(" ")]
        assert len(labels) == len(tokens) * sorter.model.translator.mu
        pieces = [sorter.target.pieces[token] for token in [*sorter.target.encode(target), END]]
        fits = sorting.path is not None
        assert [label for label, _ in groupby(labels) if label != BLANK_LABEL] == (pieces if fits else [])
    assert [sorting.path is None for sorting in sort_pairs(sorter, PAIRS, 1)] == [False, True, False, False]


# --- Word alignments ----------------------------------------------------------------------------------------


class FirstComesLast:
    """A stand-in for a trained model that writes the first source piece last, before END."""

    def __init__(self, target: list[int], mu: int = 2) -> None:
        self.target = target
        self.translator = SimpleNamespace(
            mu=mu, frames=lambda H: H, logits=self.logits, target_embedding=SimpleNamespace(weight=torch.zeros(1))
        )

    def sort(self, batch: Batch, *_: Any) -> tuple[Tensor, Tensor]:
        N = batch.source.shape[1]
        Z = torch.eye(N)[[*range(1, N - 1), 0, N - 1] if N > 1 else [0]]
        return torch.arange(N, dtype=torch.float32)[None, :, None], 0.7 * Z[None] + 0.3 / N

    def logits(self, states: Tensor) -> Tensor:
        """Return logits by which output position r, of mu frames, begins with target token r."""
        logits = torch.zeros(1, states.shape[1] * self.translator.mu, 1000)
        logits[:, :, BLANK] = 1
        for position, token in enumerate(self.target):
            logits[0, position * self.translator.mu, token] = 9
        return logits


def first_comes_last(source: Tokenizer, target: Tokenizer, tokens: list[int]) -> Sorter:
    return Sorter(cast(SortedCTCModel, FirstComesLast([*tokens, END])), source, target, (1,))


def test_links_go_through_pieces_to_words(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> None:
    source, target = ["The", "harbours", "closing"], ["gesperrt", "Hafens", "Der"]
    assert [len(source_tokenizer.encode(word)) for word in source] == [1, 2, 3]
    outside = [target_tokenizer.encode(word) for word in target]
    assert [len(pieces) for pieces in outside] == [1, 2, 1]
    sorter = first_comes_last(source_tokenizer, target_tokenizer, list(chain(*outside)))
    # The source pieces are now of words 2 2 3 3 3 1, the target pieces beside them of words 1 2 2 3.
    assert align_words(sorter, [(source, target)], 1) == [{(2, 1), (2, 2), (3, 2), (3, 3)}]
    # With Z = I the source pieces stay 1 2 2 3 3 3 beside the same target pieces.
    assert align_words(sorter, [(source, target)], 1, identity=True) == [{(1, 1), (2, 2), (3, 3)}]


def test_a_piece_without_spaces_is_part_of_all_words_it_touches(
    source_tokenizer: Tokenizer, ideograph_tokenizer: Tokenizer
) -> None:
    words = ["孩子", "们", "用", "Lego", "Python", "㐀", "造"]
    tokens = ideograph_tokenizer.encode("孩子们用Lego Python㐀造")
    pieces = [ideograph_tokenizer.pieces[token] for token in tokens]
    assert pieces == ["孩子们", "用", *"Lego", "▁", *"Python", "<unk>", "造"]
    source = ["the"] * 16  # words of one piece, of which the second stands first
    sorter = first_comes_last(source_tokenizer, ideograph_tokenizer, tokens)
    lego, python = {(i, 4) for i in range(4, 8)}, {(i, 5) for i in range(9, 15)}
    expected = {(2, 1), (2, 2), (3, 3), *lego, *python, (15, 6), (16, 7)}
    assert align_words(sorter, [(source, words)], 1) == [expected]


def test_end_links_to_nothing(source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> None:
    assert align_words(first_comes_last(source_tokenizer, target_tokenizer, []), [(["the"], [])], 1) == [set()]


def test_a_target_that_does_not_fit_has_no_alignment(sorter: Sorter) -> None:
    pairs = [(source.split(), target.split()) for source, target in PAIRS]
    found = align_words(sorter, pairs, 1)
    assert [links is None for links in found] == [False, True, False, False]
    for links, (source, target) in zip(found, pairs, strict=True):
        assert all(1 <= i <= len(source) and 1 <= j <= len(target) for i, j in links or ())
    assert found[0]
    assert found[3] == set()


# --- Runs on disk -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finish a short run."""
    directory = tmp_path_factory.mktemp("runs") / "sorted"
    config = tiny(data, "ctc+asn", delays=(1, 2), max_updates=2, validate_every=2)
    record_run(config, directory, ALONE, warn=lambda _: None)
    run(config, directory)
    return directory


def test_a_run_is_loaded_with_its_vocabularies(finished: Path, data: Path) -> None:
    for path in (finished, finished / "final"):
        sorter = Sorter.load(path)
        assert sorter.delays == (1, 2)
        assert sorter.target.model == (data / "target.model").read_bytes()
        assert not sorter.model.training
    assert Sorter.load(finished, data).source.model == (data / "source.model").read_bytes()


def test_a_delay_must_have_been_trained(finished: Path) -> None:
    sorter = Sorter.load(finished)
    assert (sorter.delay_or_default(None), sorter.delay_or_default(2)) == (1, 2)
    with pytest.raises(ConfigError, match="delay 5: the model was trained for 1, 2"):
        sorter.delay_or_default(5)


def test_a_run_that_cannot_be_loaded(
    finished: Path, data: Path, tmp_path: Path, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> None:
    (tmp_path / "lost").symlink_to(finished / "final")
    with pytest.raises(CheckpointError, match=r"lost: no run.json with its data directory"):
        Sorter.load(tmp_path / "lost")
    with pytest.raises(VocabularyError, match="no such vocabulary file"):
        Sorter.load(finished, tmp_path)
    (tmp_path / "source.model").write_bytes(source_tokenizer.model)
    (tmp_path / "target.model").write_bytes(target_tokenizer.model)
    with pytest.raises(
        VocabularyError, match=r"vocabularies of \(150, 150\) pieces, but .* was trained with \(300, 300\)"
    ):
        Sorter.load(finished, tmp_path)
    run(tiny(data, "ctc", max_updates=1, validate_every=1), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="a 'ctc' model has no sorting network"):
        Sorter.load(tmp_path / "plain", data)
    run(tiny(data, "transducer+asn", max_updates=1, validate_every=1), tmp_path / "transducer")
    with pytest.raises(CheckpointError, match="analyses decode CTC, without a label context"):
        Sorter.load(tmp_path / "transducer", data)


# --- Commands -----------------------------------------------------------------------------------------------


@pytest.fixture
def text(data: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Write six sentences of the training text and their translations."""
    paths = tmp_path / "six.source", tmp_path / "six.target"
    for path in paths:
        lines = list(read_lines(data.parent / "text" / f"train{path.suffix}"))[:6]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_analyse_writes_oracle_scores_and_heat_maps(finished: Path, text: tuple[Path, Path], tmp_path: Path) -> None:
    files = ("--source", text[0], "--reference", text[1], "--output", tmp_path / "results", "--device", "cpu")
    shown = invoke("analyse", finished, *files, "--sentences", "2,5", "--blank-penalty", "0.5")
    scores = read_records(OracleScore, [tmp_path / "results"])
    assert [(score.test_set, score.model, score.delay) for score in scores] == [
        ("six", "sorted", 1),
        ("six", "sorted", 2),
    ]
    sorter, pairs = Sorter.load(finished), list(zip(*map(read_lines, text), strict=True))
    assert "1-gram" in shown
    statistics = oracle_order(sorter, pairs, 2).statistics
    assert (scores[1].diagonal, scores[1].displacement) == pytest.approx(statistics, rel=1e-5)
    assert f"{statistics.diagonal:.4f}" in shown
    assert len(scores[0].oracle_precisions) == len(scores[0].default_precisions) == 4
    assert {score.blank_penalty for score in scores} == {0.5}
    assert "case:lc" in scores[0].signature
    sentences = read_records(SortedSentence, [tmp_path / "results"])
    assert [sentence.number for sentence in sentences] == [2, 5]
    expected = heat_map(sorter, sort_pairs(sorter, [pairs[4]], 1)[0])
    assert sentences[1].rows == tuple(expected.rows)
    np.testing.assert_allclose(sentences[1].Z, expected.Z, atol=1e-4)
    assert (tmp_path / "results" / "six-line5-sorted-k1-Z.svg").exists()
    assert (tmp_path / "results" / "six-line5-sorted-k1-Z.png").exists()


def test_the_network_is_an_aligner_beside_others(finished: Path, text: tuple[Path, Path], tmp_path: Path) -> None:
    files = ("--source", text[0], "--target", text[1], "--output", tmp_path, "--device", "cpu", "--delay", 2)
    invoke("anticipation", *files, "--aligner", f"asn:{finished}", "--aligner", f"identity:{finished}", "--name", "toy")
    record, control = map(json.loads, (tmp_path / "anticipation.jsonl").read_text(encoding="utf-8").splitlines())
    assert (record["corpus"], record["sentences"], len(record["rates"])) == ("toy", 6, 9)
    pairs = [(source.split(), target.split()) for source, target in zip(*map(read_lines, text), strict=True)]
    alignments = align_words(Sorter.load(finished), pairs, 2)
    assert record["links"] == sum(len(links or ()) for links in alignments)
    assert record["skipped"] == sum(links is None for links in alignments)
    unsorted = align_words(Sorter.load(finished), pairs, 2, identity=True)
    assert control["aligner"] == f"identity:{finished}"
    assert control["links"] == sum(len(links or ()) for links in unsorted)
