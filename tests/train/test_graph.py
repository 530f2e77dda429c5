from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simulmt.model.seq2seq import Seq2SeqModel
from simulmt.runtime import decoding
from simulmt.runtime.bundle import Bundle
from simulmt.runtime.decoding import Array, CTCDecoder, CTCSentence, Due, Written
from simulmt.runtime.seq2seq import Row, Seq2SeqDecoder
from simulmt.text import START, Tokenizer
from simulmt.train.export import export
from simulmt.train.graph import Precision, quantise
from tiny_models import STABILITIES, export_config, trained, translator

TOKENS = [[9, 30, 12, 7, 77, 8, 25, 9, 9, 60, 14], [40, 41, 6], [99, 12, 12, 13, 80, 20], [6] * 9]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def bundle(
    request: pytest.FixtureRequest,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    precision: Precision = request.param
    directory = tmp_path_factory.mktemp("bundle") / precision
    export(trained("ctc", source_tokenizer, target_tokenizer), directory, export_config("ctc", precision))
    return Bundle(directory)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("int8", 0.1)])
def test_stability_is_that_of_the_model(
    precision: Precision,
    tolerance: float,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    network = trained("wait-k", source_tokenizer, target_tokenizer, policy=True)
    model = network.model
    assert isinstance(model, Seq2SeqModel)
    assert model.policy is not None
    exported = translator(network, "wait-k", precision, tmp_path, stabilities=STABILITIES)
    decoder = exported.decoder
    assert isinstance(decoder, Seq2SeqDecoder)
    differences, seen = list[float](), list[float]()
    for delay, source, target in product((1, 3), TOKENS, TOKENS):
        with torch.no_grad():
            H = model.encoder(torch.tensor([source]))
            expected = model.policy(model.decode(H, None, torch.tensor([target]), delay))[0].sigmoid().tolist()
        sentence = decoder.open()
        sentence.tokens = list(source)
        decoder.caches.reserve(sentence.slot, max(len(source), len(target)))
        for position, last in enumerate([START, *target[:-1]]):
            visible = min(len(source), position + delay)
            decoder.read({sentence: visible})
            found = decoder.predict([Row(sentence.slot, last, Due(position, visible, 0, delay))], "stability")
            differences.append(abs(float(found["stability"][0]) - expected[position]))
        seen += expected
    assert np.std(seen) > 0.1
    assert max(differences) < (tolerance if precision == "fp32" else 0.5)
    assert np.mean(differences) < tolerance


class Recorded(CTCSentence):
    """A sentence that records the bits of its log-probabilities."""

    wants_scores = True

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[bytes] = []

    def write(self, frames: Array, due: Due) -> Written:
        self.frames.append(frames.tobytes())
        return Written([], due.position, due.trigger)


def bits(decoder: CTCDecoder, tokens: list[int], at_once: bool) -> list[bytes]:
    sentence = Recorded()
    for _ in _read(sentence, tokens):
        while sentence.is_due and not at_once:
            decoder.advance([sentence])
    while sentence.is_due:
        decoder.advance([sentence])
    return sentence.frames


def test_a_position_has_the_same_bits_alone_or_beside_others(bundle: Bundle) -> None:
    """Neither the rows of other sentences nor positions computed in the same call may change a single bit."""
    decoder = CTCDecoder(bundle, threads=1)
    alone = [bits(decoder, tokens, at_once=False) for tokens in TOKENS]
    assert [bits(decoder, tokens, at_once=True) for tokens in TOKENS] == alone
    together = [Recorded() for _ in TOKENS]
    readers = [_read(sentence, tokens) for sentence, tokens in zip(together, TOKENS, strict=True)]
    for _ in range(max(map(len, TOKENS)) + 1):
        for reader in readers:
            next(reader, None)
        while due := [sentence for sentence in together if sentence.is_due]:
            decoder.advance(due)
    assert [sentence.frames for sentence in together] == alone


def test_positions_of_different_delays_share_a_call(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the delay falls, a position sees fewer tokens than the one before it, in the same call."""
    found = []
    for together in (1, 2, 3, 32):
        monkeypatch.setattr(decoding, "POSITIONS", together)
        decoder = CTCDecoder(bundle, threads=1)  # with empty caches
        sentence = Recorded()
        for index, token in enumerate(TOKENS[0]):
            sentence.read([token], delay=5 if index < 6 else 1)
        sentence.close(delay=3)
        while sentence.is_due:
            decoder.advance([sentence])
        found.append(sentence.frames)
    assert all(frames == found[0] for frames in found)


def _read(sentence: CTCSentence, tokens: list[int]) -> Iterator[None]:
    for token in tokens:
        sentence.read([token], delay=2)
        yield
    sentence.close(delay=2)
    yield


def test_the_graph_is_plain_onnx_with_its_weights_beside_it(bundle: Bundle) -> None:
    path = bundle.directory / "ctc.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    assert {opset.domain for opset in model.opset_import} == {""}
    assert Path(bundle.directory / "ctc.weights").stat().st_size > path.stat().st_size / 4
    inside = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    assert inside < 20_000


@given(st.integers(0, 1000), st.sampled_from([63, 127]))
def test_quantised_rows_are_half_a_step_off_at_most(seed: int, levels: int) -> None:
    table = np.random.default_rng(seed).normal(size=(3, 8)).astype(np.float32)
    table[1] = 0
    codes, scales = quantise(table, levels)
    assert np.abs(codes.astype(int)).max(-1).tolist() == [levels, 0, levels]
    assert np.all(np.abs(codes * scales[:, None] - table) <= 0.5001 * scales[:, None])
