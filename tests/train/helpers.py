"""Helpers for tests of training: short runs, a recording monitor, and processes to kill."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simulmt.cli.recipes import PRELOADED
from simulmt.data.store import FORMAT_VERSION, Manifest, SideManifest, TokenStore
from simulmt.model.asn import ASNConfig, SortingStatistics
from simulmt.train.batches import BatchPlan
from simulmt.train.loop import Outcome, train
from simulmt.train.monitor import Monitor, UpdateReport
from simulmt.train.run import RunProgress, World
from simulmt.train.systems import RunConfig, System, TrainingConfig

ALONE = World(0, 1, torch.device("cpu"))
SIZES = {"width": 16, "inner": 32, "heads": 2, "dropout": 0.1}


class Recorder(Monitor):
    """A silent monitor that records reports, and the weights at each update."""

    def __init__(self) -> None:
        super().__init__(Path(), quiet=True)
        self.reports: list[UpdateReport] = []
        self.scores: dict[int, dict[str, float]] = {}
        self.sorted: dict[int, SortingStatistics] = {}
        self.warnings: list[str] = []
        self.weights: list[dict[str, Tensor]] = []  # before the first update, then after each

    def start(self, update: int, max_updates: int, model: nn.Module, plan: BatchPlan, metric: str = "BLEU") -> None:
        super().start(update, max_updates, model, plan, metric)
        self.model, self.plan, self.started_at, self.metric = model, plan, update, metric
        self.weights.append(snapshot(model))

    def update(self, report: UpdateReport, totals: RunProgress) -> None:
        super().update(report, totals)
        self.reports.append(report)
        self.weights.append(snapshot(self.model))

    def validation(self, update: int, scores: dict[str, float], best: float) -> None:
        super().validation(update, scores, best)
        self.scores[update] = scores

    def sorting(self, update: int, statistics: SortingStatistics) -> None:
        super().sorting(update, statistics)
        self.sorted[update] = statistics

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    @property
    def losses(self) -> list[float]:
        return [report.loss / report.tokens for report in self.reports]


def tiny(data: Path, system: System = "ctc", **changes: Any) -> RunConfig:
    """Return the configuration of a short run; `changes` are fields of RunConfig or TrainingConfig."""
    layers = {"layers": 1} if system.startswith(("ctc", "transducer")) else {"encoder_layers": 1, "decoder_layers": 1}
    own = {
        name: changes.pop(name)
        for name in ("delays", "init", "asn", "objective", "reading", "low_delay")
        if name in changes
    }
    own.setdefault("asn", ASNConfig(layers=1, iterations=4))
    model = {**SIZES, **layers, **changes.pop("model", {})}
    training: dict[str, Any] = {
        "batch_tokens": 256,
        "update_tokens": 512,
        "learning_rate": 5e-3,
        "warmup_updates": 4,
        "max_updates": 20,
        "validate_every": 5,
        "keep_best": 2,
        **changes,
    }
    return RunConfig(system, data, model=model, training=TrainingConfig(**training), **own)


def run(config: RunConfig, directory: Path, monitor: Monitor | None = None) -> Outcome:
    """Train in this process."""
    return train(config, directory, ALONE, monitor or Recorder())


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether names and bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def outcome_of(directory: Path) -> dict[str, Any]:
    """Return all files of a run except its curves, by path."""
    files = [path for path in directory.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def strict_json(path: Path) -> Any:
    """Read standard JSON, in which NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise ValueError(f"{path}: {name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def store_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: str = "<u2") -> TokenStore:
    """Return a token store in memory."""
    sides = []
    for side in zip(*pairs, strict=True):
        tokens = np.array([token for sentence in side for token in sentence], dtype)
        sides.append((tokens, np.cumsum([0, *map(len, side)])))
    (source, source_offsets), (target, target_offsets) = sides
    about = SideManifest(1 << 17, "", dtype, 0)  # type: ignore[arg-type]
    manifest = Manifest(FORMAT_VERSION, len(pairs), len(pairs), {}, None, about, about, {}, {})
    return TokenStore(manifest, source, source_offsets, target, target_offsets)


def start_fork_server() -> None:
    """Start the server that all processes of the tests are forked from, with the slow imports of training done.

    There is one for the whole session, and what it has imported is decided by whoever starts it.
    """
    set_forkserver_preload(["pytest", "hypothesis", *PRELOADED])
    ensure_running()


def fork(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that has all modules imported, with as many threads as this one.

    The server it is forked from may be older than this test and have other settings.
    """
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_with_threads, args=(torch.get_num_threads(), function, *arguments))
    process.start()
    return process


def _with_threads(threads: int, function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(threads)
    function(*arguments)
