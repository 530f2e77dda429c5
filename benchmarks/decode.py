"""Beam search of a teacher: sentences per second, on a CPU next to CTranslate2 with the same weights.

    python benchmarks/decode.py                 base size, V=32,000, beam 5, on one thread of a CPU
    python benchmarks/decode.py --device cuda   8 + 4 layers, V=16,000, beam 4, bfloat16

Weights are random, since their values do not affect speed. Every translation is forced to the length of its source,
since random weights rarely predict END. Greedy search must give the same output in CTranslate2, which verifies the
conversion. On a CPU, CPU time is measured, which depends less on other load.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.layers import Attention, DecoderLayer, EncoderLayer, FeedForward, sinusoids
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.text import END, SPECIAL_SYMBOLS, START
from simulmt.train.loop import precision
from simulmt.train.systems import TrainingConfig

Tokens = list[list[int]]


@dataclass(frozen=True)
class Size:
    vocabulary: int
    encoder_layers: int
    decoder_layers: int
    beam: int
    length: int  # of every source and translation
    sentences: int  # in a batch
    batches: int
    width: int = 512


ON_CPU = Size(32_000, encoder_layers=6, decoder_layers=6, beam=5, length=20, sentences=32, batches=1)
ON_GPU = Size(16_000, encoder_layers=8, decoder_layers=4, beam=4, length=20, sentences=3200, batches=10)
TOY = Size(100, encoder_layers=1, decoder_layers=1, beam=2, length=5, sentences=8, batches=1, width=64)


def build(size: Size) -> Seq2SeqModel:
    torch.manual_seed(1)
    sizes = size.width, 4 * size.width, size.width // 64, size.encoder_layers, size.decoder_layers
    model = Seq2SeqModel.build(Seq2SeqConfig(size.vocabulary, size.vocabulary, False, *sizes))
    with torch.no_grad():  # otherwise every token would predict itself, since output and input embeddings are tied
        model.final_norm.weight.normal_()
    return model.eval()


def data(size: Size) -> list[Tensor]:
    torch.manual_seed(2)
    shape = size.sentences, size.length
    return [torch.randint(len(SPECIAL_SYMBOLS), size.vocabulary, shape) for _ in range(size.batches)]


def translate(model: Seq2SeqModel, batch: Tensor, beam: int, device: torch.device) -> Tokens:
    length = batch.shape[1]
    config = BeamConfig(beam, 1.0, max_ratio=0.0, max_extra=length, min_length=length - 1)
    lengths = torch.full((len(batch),), length)
    with precision(TrainingConfig(), device), torch.inference_mode():
        found = beam_search(model, batch.to(device), lengths, config, best=1)
    return [hypotheses[0].tokens for hypotheses in found]


def piece(token: int) -> str:
    return SPECIAL_SYMBOLS[token] if token < len(SPECIAL_SYMBOLS) else str(token)


def convert(model: Seq2SeqModel, size: Size, directory: str) -> None:
    """Convert a model to CTranslate2; pieces are named by their ids."""
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (size.encoder_layers, size.decoder_layers),
        size.width // 64,
        pre_norm=True,
        activation=common_spec.Activation.RELU,
    )
    positions = _array(sinusoids(torch.arange(512), model.target_embedding.embedding_dim))
    for part, embedding in ((spec.encoder, model.encoder.embedding), (spec.decoder, model.target_embedding)):
        embeddings = part.embeddings[0] if isinstance(part.embeddings, list) else part.embeddings
        embeddings.weight = _array(embedding.weight)
        part.position_encodings.encodings = positions
    spec.decoder.projection.weight = _array(model.target_embedding.weight)
    _copy_norm(spec.encoder.layer_norm, model.encoder.final_norm)
    _copy_norm(spec.decoder.layer_norm, model.final_norm)
    for layer, theirs in zip(model.encoder.layers, spec.encoder.layer, strict=True):
        _copy_layer(theirs, layer)
    for decoder_layer, theirs in zip(model.layers, spec.decoder.layer, strict=True):
        _copy_layer(theirs, decoder_layer)
        _copy_norm(theirs.attention.layer_norm, decoder_layer.cross_norm)
        cross = decoder_layer.cross_attention
        for their_linear, linear in zip(
            theirs.attention.linear, (cross.query, cross.key_value, cross.output), strict=True
        ):
            _copy_linear(their_linear, linear)
    pieces = [piece(token) for token in range(size.vocabulary)]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token = spec.config.decoder_start_token = SPECIAL_SYMBOLS[START]
    spec.config.eos_token = SPECIAL_SYMBOLS[END]
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.validate()
    spec.save(directory)


def _copy_layer(theirs: Any, layer: EncoderLayer | DecoderLayer) -> None:
    """Copy self-attention and feed-forward, which both kinds of layer have."""
    _copy_norm(theirs.self_attention.layer_norm, layer.attention_norm)
    attention: Attention = layer.attention
    fused, output = theirs.self_attention.linear
    fused.weight = _array(torch.cat([attention.query.weight, attention.key_value.weight]))
    fused.bias = _array(torch.cat([attention.query.bias, attention.key_value.bias]))
    _copy_linear(output, attention.output)
    network: FeedForward = layer.feed_forward
    _copy_norm(theirs.ffn.layer_norm, layer.feed_forward_norm)
    _copy_linear(theirs.ffn.linear_0, network.expand)
    _copy_linear(theirs.ffn.linear_1, network.contract)


def _copy_norm(theirs: Any, norm: nn.LayerNorm) -> None:
    theirs.gamma, theirs.beta = _array(norm.weight), _array(norm.bias)


def _copy_linear(theirs: Any, linear: nn.Linear) -> None:
    theirs.weight, theirs.bias = _array(linear.weight), _array(linear.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().numpy()


class Peer:
    """CTranslate2 on one thread."""

    def __init__(self, directory: str, compute_type: str) -> None:
        import ctranslate2

        threads = {"inter_threads": 1, "intra_threads": 1}
        translator: Any = ctranslate2.Translator  # type: ignore[attr-defined]
        self._translator = translator(directory, device="cpu", compute_type=compute_type, **threads)

    def translate(self, batch: Tensor, beam: int) -> Tokens:
        length = batch.shape[1]
        forbidden = [[symbol] for symbol in SPECIAL_SYMBOLS if symbol != SPECIAL_SYMBOLS[END]]
        results = self._translator.translate_batch(
            [[piece(token) for token in row] for row in batch.tolist()],
            beam_size=beam,
            min_decoding_length=length - 1,
            max_decoding_length=length,
            suppress_sequences=forbidden,
        )
        return [[int(name) for name in result.hypotheses[0]] for result in results]


def measure(translate: Callable[[], object], runs: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest run, after one run to warm up."""
    translate()
    times = []
    for _ in range(runs):
        started = clock()
        translate()
        times.append(clock() - started)
    return min(times)


def measure_on_cpu(size: Size, runs: int) -> None:
    torch.set_num_threads(1)
    device, model = torch.device("cpu"), build(size)
    (batch,) = data(size)
    with tempfile.TemporaryDirectory() as directory:
        convert(model, size, directory)
        peers = {kind: Peer(directory, kind) for kind in ("float32", "int8")}
        few = batch[:8]
        if translate(model, few, 1, device) != peers["float32"].translate(few, 1):
            raise SystemExit(
                "CTranslate2 gives another translation than simulmt with the same weights: check `convert`"
            )
        versions: dict[str, Callable[[], Tokens]] = {
            "simulmt float32": partial(translate, model, batch, size.beam, device),
            **{f"CTranslate2 {kind}": partial(peer.translate, batch, size.beam) for kind, peer in peers.items()},
        }
        seconds = {name: measure(translate, runs, time.process_time) for name, translate in versions.items()}
    print(f"{size}, one thread, torch {torch.__version__}; greedy search agrees")
    first = seconds["simulmt float32"]
    for name, each in seconds.items():
        print(f"{name:20} {size.sentences / each:8.1f} sentences/s  {first / each:5.2f} times simulmt")


def measure_on_gpu(size: Size, runs: int, device: torch.device) -> None:
    model, batches = build(size).to(device), data(size)

    def translate_all() -> None:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            for batch in batches:
                translate(model, batch, size.beam, device)

    seconds = measure(translate_all, runs, time.perf_counter)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"{size}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{size.sentences * size.batches / seconds:,.0f} sentences/s, peak {memory:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--beam", type=int, help="beam size")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--runs", type=int, default=3, help="number of runs; the fastest counts")
    arguments = parser.parse_args()
    size = TOY if arguments.toy else ON_GPU if arguments.device.startswith("cuda") else ON_CPU
    if arguments.beam:
        size = Size(**{**vars(size), "beam": arguments.beam})
    if arguments.device == "cpu":
        measure_on_cpu(size, arguments.runs)
    else:
        measure_on_gpu(size, arguments.runs, torch.device(arguments.device))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
