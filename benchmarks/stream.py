"""Time per source token of a live stream, compared with other implementations on the same weights in the same run.

    python benchmarks/stream.py [--vocabulary 8000 32000] [--threads 1 2] [--rounds 5] [--toy]

Compared are: PyTorch with caches, which computes all k unfinished positions per token and keeps one; PyTorch
recomputing the whole prefix; and a wait-k model in this runtime. A floor is the time to read the weights of a step once
with as many threads, at a bandwidth measured here: that of main memory, over a block larger than all caches, or that
over a block of the size of the weights, which may fit in a cache. "Products alone" are the matrix products of a step in
onnxruntime and nothing else, a lower bound for this runtime. Implementations take turns, and the best of all rounds
counts, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import KeysValues, look_ahead_mask
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.runtime.bundle import (
    FORMAT,
    SOURCE,
    TARGET,
    Bundle,
    BundleConfig,
    Kind,
    huge_pages,
    onnxruntime,
    write_description,
)
from simulmt.runtime.decoding import CTCDecoder
from simulmt.runtime.seq2seq import Seq2SeqDecoder, max_target_length
from simulmt.text import SPECIAL_SYMBOLS, Tokenizer, VocabularySpec
from simulmt.train.graph import IR_VERSION, OPSET, Precision, ctc_graph, decoder_graph, encoder_graph

DELAY = 3
TOKENS = 40  # source tokens of a sentence
WARM_UP = 5  # first tokens, which are not timed
STREAMS = 32
LONGEST = 256
BEYOND_CACHES = 512 * 2**20  # bytes
PRECISIONS: tuple[Precision, ...] = ("int8", "fp32")

LOADING = """
import sys, time
from pathlib import Path
from simulmt.runtime.bundle import Bundle
from simulmt.runtime.decoding import CTCDecoder
before = time.perf_counter()
decoder = CTCDecoder(Bundle(Path(sys.argv[1])), int(sys.argv[2]))
loaded = time.perf_counter()
sentence = decoder.open(1)
for token in range(6, 46):
    sentence.read([token], 3)
    while sentence.is_due:
        decoder.advance([sentence])
status = Path("/proc/self/status").read_text()
resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
print(loaded - before, int(resident) / 1024)
"""


@dataclass
class Implementation:
    """A way to translate a sentence; iterating over `run()` computes it token by token."""

    run: Callable[[], Iterable[object]]
    best: float = float("inf")  # milliseconds per token

    def take_turn(self) -> None:
        times, before = [], time.perf_counter()
        for _ in self.run():
            now = time.perf_counter()
            times.append(now - before)
            before = now
        self.best = min(self.best, 1000 * statistics.median(times[WARM_UP:]))


def through_runtime(decoder: CTCDecoder | Seq2SeqDecoder, tokens: np.ndarray) -> Iterable[None]:
    """Advance sentences [B T] together, token by token."""
    sentences = [decoder.open(1) for _ in tokens]
    for column in tokens.T.tolist():
        for sentence, token in zip(sentences, column, strict=True):
            sentence.read([token], DELAY)
        while due := [sentence for sentence in sentences if sentence.is_due]:
            decoder.advance(due)  # type: ignore[arg-type]
        yield


@torch.inference_mode()
def recompute_unfinished(model: CTCModel, tokens: torch.Tensor) -> Iterable[None]:
    """Cache finished positions; for each token compute all k unfinished ones and keep one."""
    layers = model.encoder.layers
    kept = [layer.attention.project(torch.empty(1, 0, model.encoder.embedding.embedding_dim)) for layer in layers]
    for read in range(DELAY, tokens.shape[1] + 1):
        finished = read - DELAY
        x = model.encoder.embedding.embed(tokens[:, finished:read], finished)
        grown = []
        for index, (layer, past) in enumerate(zip(layers, kept, strict=True)):
            normed = layer.attention_norm(x)
            seen = KeysValues(*(torch.cat(each, 2) for each in zip(past, layer.attention.project(normed), strict=True)))
            mask = look_ahead_mask(DELAY, read, finished, DELAY if index == 0 else 1, x.device)
            x = x + layer.attention(normed, seen, mask)
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
            grown.append(KeysValues(*(each[:, :, : finished + 1] for each in seen)))
        kept = grown
        model.logits(model.frames(model.encoder.final_norm(x[:, :1]))).argmax(-1)
        yield


@torch.inference_mode()
def recompute_prefix(model: CTCModel, tokens: torch.Tensor) -> Iterable[None]:
    """Use no caches: for each token recompute all states and keep the last finished one."""
    for read in range(DELAY, tokens.shape[1] + 1):
        states = model.encoder(tokens[:, :read], None, DELAY)
        model.logits(model.frames(states[:, read - DELAY : read - DELAY + 1])).argmax(-1)
        yield


def bandwidth(size: int, threads: int) -> float:
    """Return the bytes per second at which `threads` threads read a block of `size` bytes."""
    parts = [np.ones(size // threads // 8) for _ in range(threads)]
    repeats, best = max(1, int(4e8) // size), 0.0
    for _ in range(5):
        workers = [threading.Thread(target=lambda part=part: [part.max() for _ in range(repeats)]) for part in parts]
        before = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, size * repeats / (time.perf_counter() - before))
    return best


def write_bundle(directory: Path, kind: Kind, precision: Precision, model: CTCModel | Seq2SeqModel) -> Bundle:
    """Write a bundle with real graphs and dummy vocabularies, which decoding does not use."""
    directory.mkdir()
    words = ["the quick brown fox jumps over the lazy dog and runs away with a bag of very old wine"]
    for name in (SOURCE, TARGET):
        Tokenizer.train(words, directory / name, VocabularySpec(size=36))
    if isinstance(model, CTCModel):
        ctc_graph(model, LONGEST, precision).save(directory / "ctc.onnx")
    else:
        encoder_graph(model, LONGEST, precision).save(directory / "encoder.onnx")
        decoder_graph(model, max_target_length(LONGEST) + 1, precision).save(directory / "decoder.onnx")
    config = BundleConfig(FORMAT, kind, "en", "de", precision, LONGEST, delays=(DELAY,), default_delay=DELAY)
    write_description(directory, config, "")
    return Bundle(directory)


def bytes_per_step(model: CTCModel, precision: Precision) -> int:
    """Return the bytes of the matrices that a step multiplies by: all but the source embeddings."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not model.encoder.embedding.weight]
    return sum(matrix.numel() for matrix in matrices) * (4 if precision == "fp32" else 1)


def products_alone(model: CTCModel, path: Path, threads: int) -> Callable[[], Iterable[None]]:
    """Return a function that runs only the fp32 matrix products of a step, in onnxruntime."""
    nodes, inputs, outputs, tensors = [], {}, [], []
    for index, matrix in enumerate(p for p in model.parameters() if p.ndim == 2):
        if matrix is model.encoder.embedding.weight:
            continue
        rows, name = model.mu if matrix is model.target_embedding.weight else 1, f"weight_{index}"
        inputs[f"x_{rows}_{matrix.shape[1]}"] = np.ones((rows, matrix.shape[1]), np.float32)
        tensors.append(onnx.numpy_helper.from_array(matrix.detach().numpy(), name))
        nodes.append(helper.make_node("Gemm", [f"x_{rows}_{matrix.shape[1]}", name], [f"y_{index}"], transB=1))
        outputs.append(helper.make_tensor_value_info(f"y_{index}", TensorProto.FLOAT, [rows, matrix.shape[0]]))
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()]
    graph = helper.make_graph(nodes, "products", declared, outputs, tensors)
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save_model(onnx_model, str(path / "products.onnx"), save_as_external_data=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with huge_pages():
        session = onnxruntime.InferenceSession(str(path / "products.onnx"), options, providers=["CPUExecutionProvider"])

    def run() -> Iterable[None]:
        for _ in range(TOKENS):
            session.run(None, inputs)
            yield

    return run


@dataclass(frozen=True)
class Setting:
    """Settings of one block of the table."""

    vocabulary: int
    threads: int
    rounds: int
    toy: bool = False

    def model(self) -> CTCModel:
        config = CTCConfig(self.vocabulary, self.vocabulary)
        tiny = replace(config, width=32, inner=64, heads=2, layers=1)
        return CTCModel.build(tiny if self.toy else config).eval()

    def wait_k(self) -> Seq2SeqModel:
        config = Seq2SeqConfig(self.vocabulary, self.vocabulary, causal=True)
        tiny = replace(config, width=32, inner=64, heads=2, encoder_layers=1, decoder_layers=1)
        return Seq2SeqModel.build(tiny if self.toy else config).eval()


def implementations(setting: Setting, folder: Path, model: CTCModel) -> dict[str, Implementation]:
    """Return all implementations by name."""
    threads, vocabulary = setting.threads, setting.vocabulary
    wait_k = setting.wait_k()
    tokens = np.random.default_rng(1).integers(len(SPECIAL_SYMBOLS), vocabulary, (STREAMS, TOKENS))
    source = torch.from_numpy(tokens[:1])
    runs: dict[str, Callable[[], Iterable[object]]] = {
        "eager": lambda: recompute_unfinished(model, source),
        "recompute": lambda: recompute_prefix(model, source),
    }
    for precision in PRECISIONS:
        ctc = CTCDecoder(write_bundle(folder / f"ctc-{precision}", "ctc", precision, model), threads)
        other = Seq2SeqDecoder(write_bundle(folder / f"wait-k-{precision}", "wait-k", precision, wait_k), threads)
        runs[precision] = partial(through_runtime, ctc, tokens[:1])
        runs[f"{precision} together"] = partial(through_runtime, ctc, tokens)
        runs[f"{precision} wait-k"] = partial(through_runtime, other, tokens[:1])
    runs["products"] = products_alone(model, folder, threads)
    return {name: Implementation(run) for name, run in runs.items()}


def compare(setting: Setting) -> None:
    """Measure all implementations and print a block of the table."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(1)
    model = setting.model()
    with tempfile.TemporaryDirectory() as folder:
        found = implementations(setting, Path(folder), model)
        for _ in range(setting.rounds):
            for implementation in found.values():
                implementation.take_turn()
        loading = {
            precision: measure_loading(Path(folder) / f"ctc-{precision}", setting.threads) for precision in PRECISIONS
        }
    report(setting, model, {name: implementation.best for name, implementation in found.items()}, loading)


def measure_loading(bundle: Path, threads: int) -> tuple[float, float]:
    """Return the seconds to load a bundle in a new process, and its resident megabytes after a sentence."""
    arguments = [sys.executable, "-c", LOADING, str(bundle), str(threads)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


def report(
    setting: Setting, model: CTCModel, best: dict[str, float], loading: dict[Precision, tuple[float, float]]
) -> None:
    memory = bandwidth(BEYOND_CACHES // 64 if setting.toy else BEYOND_CACHES, setting.threads)
    floors: dict[str, tuple[float, float]] = {}
    for precision in PRECISIONS:
        size = bytes_per_step(model, precision)
        floors[precision] = (1000 * size / memory, 1000 * size / bandwidth(size, setting.threads))
    eager = best["eager"]
    names = {
        "eager": "PyTorch, k positions per token",
        "recompute": "PyTorch, prefix recomputed",
        "fp32 wait-k": "wait-k in this runtime, fp32",
        "int8 wait-k": "wait-k in this runtime, int8",
        "products": "onnxruntime's products alone, fp32",
        "fp32": "this runtime, fp32",
        "int8": "this runtime, int8",
    }
    print(f"\nV = {setting.vocabulary:,}, {setting.threads} thread(s), k = {DELAY}\n")
    print_row("", "ms/token", "x faster", "x memory", "x cache")
    print_row("---", "--:", "--:", "--:", "--:")
    for key, name in names.items():
        above = [f"{best[key] / floor:.2f}" for floor in floors.get(key.replace("products", "fp32"), ())] or ["", ""]
        print_row(name, f"{best[key]:.2f}", f"{eager / best[key]:.1f}", *above)
    for key, (floor, cached) in floors.items():
        print_row(f"floor, {key}, weights from memory", f"{floor:.2f}", f"{eager / floor:.1f}", "1.00", "")
        print_row(f"floor, {key}, block of their size", f"{cached:.2f}", f"{eager / cached:.1f}", "", "1.00")
    print()
    print_row("", "tokens/s", "x one", "load, s", "MB")
    print_row("---", "--:", "--:", "--:", "--:")
    for precision in PRECISIONS:
        alone, together = 1000 / best[precision], STREAMS * 1000 / best[f"{precision} together"]
        seconds, megabytes = loading[precision]
        print_row(f"one stream, {precision}", f"{alone:,.0f}", "1.0", f"{seconds:.2f}", f"{megabytes:.0f}")
        print_row(f"{STREAMS} streams together, {precision}", f"{together:,.0f}", f"{together / alone:.1f}", "", "")


def print_row(*cells: str) -> None:
    first, *others = cells
    print("| " + " | ".join([f"{first:38}", *(f"{cell:>8}" for cell in others)]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8000, 32_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the benchmark")
    arguments = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    for vocabulary in arguments.vocabulary:
        for threads in arguments.threads:
            compare(Setting(vocabulary, threads, arguments.rounds, arguments.toy))


if __name__ == "__main__":
    main()
