"""A training step of CTC+ASN, compared with a plain eager PyTorch version of the same step in the same run.

    python benchmarks/train_step.py                           base size, V=32,000, 32K source tokens, on a GPU
    python benchmarks/train_step.py --toy --device cpu        toy size
    python benchmarks/train_step.py --system transducer+asn   the step of a live model, 12 layers, V=12,000, alone

"launching" is the time until the CPU has launched all kernels: where it is close to the whole step, larger batches cost
nothing. The plain version has the same networks and weights, but is written as one would at first: logits of all frames
in one tensor, a full log-softmax, PyTorch's CTC loss, Sinkhorn as a loop of logsumexp under autograd, no compilation.
Both run in bfloat16 autocast on a GPU and in float32 on a CPU, and both include the optimiser.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from simulmt.model import asn
from simulmt.model.asn import ASNConfig, SortedCTCModel
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import Batch
from simulmt.model.risk import risk_loss
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.text import BLANK, END
from simulmt.train.loop import compile_layers, precision
from simulmt.train.systems import TrainingConfig

PEAK_BF16 = 790e12  # FLOP/s, measured on an H200 with a large matrix product


@dataclass(frozen=True)
class Size:
    vocabulary: int
    width: int
    inner: int
    heads: int
    layers: int
    sorter_layers: int
    length: int
    sentences: int

    @property
    def source_tokens(self) -> int:
        return self.length * self.sentences


BASE = Size(32_000, 512, 2048, 8, 6, 3, 32, 1024)
LIVE = Size(12_000, 512, 2048, 8, 12, 3, 32, 1024)
TOY = Size(540, 128, 256, 4, 3, 2, 16, 128)


Model = CTCModel | SortedCTCModel


class Measured(NamedTuple):
    milliseconds: float
    launching: float  # milliseconds until all kernels are launched
    memory: float  # GiB
    loss: float  # per target token


def build(size: Size, device: torch.device, system: str = "ctc+asn") -> Model:
    torch.manual_seed(1)
    sizes = (size.vocabulary, size.vocabulary, size.width, size.inner, size.heads, size.layers)
    is_ctc = system.startswith("ctc")
    translator = CTCModel.build(CTCConfig(*sizes)) if is_ctc else TransducerModel.build(TransducerConfig(*sizes))
    is_sorted = system.endswith("+asn")
    model = SortedCTCModel.build(translator, ASNConfig(layers=size.sorter_layers)) if is_sorted else translator
    return model.to(device).train()


def data(size: Size, device: torch.device) -> Batch:
    """Draw sentences of one source length, with targets of 75% to 100% of that length."""
    torch.manual_seed(2)
    source = torch.randint(6, size.vocabulary, (size.sentences, size.length))
    lengths = torch.randint(3 * size.length // 4, size.length + 1, (size.sentences,))
    target = torch.randint(6, size.vocabulary, (size.sentences, size.length))
    positions = torch.arange(size.length)
    target = target.masked_fill(positions == lengths[:, None] - 1, END).masked_fill(positions >= lengths[:, None], 0)
    source_lengths = torch.full((size.sentences,), size.length)
    return Batch(source.to(device), source_lengths, target.to(device), lengths)


def plain_sinkhorn(X: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        X = X - X.logsumexp(2, keepdim=True)
        X = X - X.logsumexp(1, keepdim=True)
    return X.exp()


def plain_loss(model: Model, batch: Batch, smoothing: float = 0.1) -> Tensor:
    assert isinstance(model, SortedCTCModel)
    _, source_lengths, target, target_lengths = batch
    with mock.patch.object(asn, "sinkhorn", plain_sinkhorn):
        H, Z = model.sort(batch)
    frames = model.translator.frames(Z.to(H.dtype) @ H)
    log_probs = model.translator.logits(frames).float().log_softmax(-1)
    frame_lengths = source_lengths * model.translator.mu
    ctc = F.ctc_loss(
        log_probs.transpose(0, 1), target, frame_lengths, target_lengths, BLANK, reduction="sum", zero_infinity=True
    )
    return (1 - smoothing) * ctc - smoothing * log_probs.mean(-1).sum()


def our_loss(model: Model, batch: Batch) -> Tensor:
    return model.loss(batch).total


def minimum_risk(model: Model, batch: Batch) -> Tensor:
    assert isinstance(model, TransducerModel)
    return risk_loss(model, batch).total


SYSTEMS = {"ctc+asn": our_loss, "transducer+asn": our_loss, "transducer": our_loss, "risk": minimum_risk}


def measure(
    loss_of: Callable[[Model, Batch], Tensor],
    model: Model,
    size: Size,
    device: torch.device,
    seconds: float,
) -> Measured:
    """Return median times of a step, its peak memory and the loss of the first step."""
    batch = data(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Tensor:
        torch.manual_seed(3)
        with precision(TrainingConfig(), device):
            loss = loss_of(model, batch) / float(batch.target_lengths.sum())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    first = float(step())
    for _ in range(4):  # compile, and fill the memory pool
        step()
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        started = time.perf_counter()
        step()
        launched = time.perf_counter()
        _synchronize(device)
        times.append((time.perf_counter() - started, launched - started))
    whole, launching = (statistics.median(column) * 1000 for column in zip(*times, strict=True))
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan
    return Measured(whole, launching, memory, first)


def step_flops(size: Size, mu: int = 2) -> float:
    """Return the FLOPs of the matrix products of a step; the backward pass costs twice the forward pass."""
    D, n = size.width, size.source_tokens
    attention = 4 * size.length * D  # scores and weighted sums, per token
    encoder = size.layers * (2 * (4 * D * D + 2 * D * size.inner) + attention)
    sorter = size.sorter_layers * (2 * (8 * D * D + 2 * D * size.inner) + 2 * attention)
    sorting = 2 * 2 * size.length * D  # A, and Z H
    output = 2 * mu * D * (D + size.vocabulary)
    return 3.0 * n * (encoder + sorter + sorting + output)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--toy", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--system", choices=SYSTEMS, default="ctc+asn", help="only ctc+asn has a plain version")
    parser.add_argument("--sentences", type=int, help="batch size")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of timing per version")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the most time")
    arguments = parser.parse_args()
    device, system = torch.device(arguments.device), arguments.system
    size = TOY if arguments.toy else BASE if system == "ctc+asn" else LIVE
    size = replace(size, sentences=arguments.sentences or size.sentences)

    rows = {}
    versions = {"simulmt": SYSTEMS[system]}
    if system == "ctc+asn":
        versions = {"plain": plain_loss, **versions}
    for name, loss_of in versions.items():
        model = build(size, device, system)
        if name == "simulmt":
            compile_layers(model, TrainingConfig(), device)
        rows[name] = measure(loss_of, model, size, device, arguments.seconds)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    where = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(f"{system}, {size}, {where}, torch {torch.__version__}")
    columns = ("ms/step", "launching", "source tok/s", "peak GiB", "TFLOP/s", "of peak", "loss")
    print("version " + "".join(f"{column:>13}" for column in columns))
    for name, (ms, launching, memory, loss) in rows.items():
        # Only the products of CTC+ASN are counted.
        rate = step_flops(size) / ms * 1000 if system == "ctc+asn" else math.nan
        speed = size.source_tokens / ms * 1000
        share = rate / PEAK_BF16 if device.type == "cuda" else math.nan
        times = f"{ms:13.2f}{launching:13.2f}{speed:13,.0f}"
        print(f"{name:8}{times}{memory:13.2f}{rate / 1e12:13.2f}{share:13.1%}{loss:13.4f}")
    if "plain" in rows:
        plain, ours = rows["plain"], rows["simulmt"]
        faster, leaner = plain.milliseconds / ours.milliseconds, ours.memory / plain.memory
        print(f"speed-up {faster:.2f}x; memory {leaner:.2f} of plain")
    if arguments.profile:
        _profile(size, device, system)


def _profile(size: Size, device: torch.device, system: str) -> None:
    model, batch = build(size, device, system), data(size, device)
    compile_layers(model, TrainingConfig(), device)

    def passes(count: int) -> None:
        for _ in range(count):
            with precision(TrainingConfig(), device):
                SYSTEMS[system](model, batch).backward()
        _synchronize(device)

    passes(3)
    with torch.profiler.profile() as profiler:
        passes(3)
    for kind in dict.fromkeys((device.type, "cpu")):
        print(profiler.key_averages().table(f"self_{kind}_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    main()
