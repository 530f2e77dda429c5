"""A training run: its state, its checkpoints, run.json, which records what produced it, and its processes.

A checkpoint is a directory `update-000001000/` with `tensors.safetensors` and `state.json`, which holds a checksum of
both. It is written to a temporary directory, synced and renamed. Because batches and random draws are functions of the
update number, the state is small: weights, optimiser moments, averaged weights and a few numbers.

The processes of a run (`World`) are configured by torchrun's environment variables; without them there is one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from simulmt import __version__
from simulmt.config import as_table
from simulmt.data.store import TokenStore
from simulmt.errors import CheckpointError, ConfigError, DataError, TrainingError
from simulmt.files import atomic_directory, commit, environment, lock, timestamp, write_atomic
from simulmt.train.systems import SCRATCH, RunConfig, TrainingConfig

# When to stop: may change when a run is resumed.
MAY_CHANGE = ("training.max_updates", "training.max_minutes", "training.patience")
TENSORS, STATE = "tensors.safetensors", "state.json"
KEPT_LAST = 2  # checkpoints kept whatever their score


@dataclass
class RunProgress:
    """Counters of a run."""

    update: int = 0
    batches: int = 0  # batches taken so far, over all processes
    scores: dict[str, float] = field(default_factory=dict)  # validation score by update
    average_loss: float = math.inf  # running average of the loss per token; infinite before the first
    skipped_in_a_row: int = 0
    skipped_updates: int = 0
    skipped_sentences: int = 0

    def best(self, count: int) -> list[int]:
        """Return the updates with the highest scores, best first; among equal scores, the latest first."""
        ranked = sorted(self.scores, key=lambda update: (self.scores[update], int(update)), reverse=True)
        return [int(update) for update in ranked[:count]]

    def record_step(self, loss: float) -> None:
        self.skipped_in_a_row = 0
        self.average_loss = loss if math.isinf(self.average_loss) else 0.99 * self.average_loss + 0.01 * loss

    def record_skipped_step(self) -> None:
        self.skipped_in_a_row += 1
        self.skipped_updates += 1


@dataclass
class RunState:
    """Weights, optimiser, moving average of the weights (possibly empty) and progress."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    moving_average: dict[str, Tensor]
    progress: RunProgress

    @staticmethod
    def start(model: nn.Module, settings: TrainingConfig) -> RunState:
        """Return the initial state."""
        optimizer = torch.optim.AdamW(
            model.parameters(),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=next(model.parameters()).is_cuda,
        )
        copies = {name: p.detach().clone() for name, p in model.named_parameters()} if settings.ema_decay > 0 else {}
        return RunState(model, optimizer, copies, RunProgress())

    @property
    def validated_prefix(self) -> str:
        """Return the prefix of the validated weights in a checkpoint."""
        return "average." if self.moving_average else "model."

    def step(self, learning_rate: float, ema_decay: float) -> None:
        """Apply the gradients and update the moving average."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        if self.moving_average:
            parameters = [parameter.detach() for parameter in self.model.parameters()]
            # In a short run, a constant decay would average in much of the initial weights: 0.999**1400 is a quarter.
            decay = min(ema_decay, (1 + self.progress.update) / (10 + self.progress.update))
            torch._foreach_lerp_(list(self.moving_average.values()), parameters, 1.0 - decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Use the moving average as the model's weights inside the context."""
        if not self.moving_average:
            yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.model.load_state_dict(self.moving_average)
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.moving_average.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"moments.{name}.{key}"] = value
        return tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint."""
        try:
            self.model.load_state_dict(_strip_prefix("model.", checkpoint.tensors))
            for name, tensor in self.moving_average.items():
                tensor.copy_(checkpoint.tensors[f"average.{name}"])
            self._restore_moments(checkpoint.tensors)
            self.progress = RunProgress(**checkpoint.state["progress"])
        except (RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint of update {checkpoint.update} does not fit this configuration "
                f"({str(error).splitlines()[0]}); use the one the run was started with, or another run directory"
            ) from None

    def _restore_moments(self, tensors: dict[str, Tensor]) -> None:
        fused = bool(self.optimizer.defaults["fused"])  # if not, the step counter stays on the CPU
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                key: value.to(parameter.device) if fused or key != "step" else value
                for key, value in _strip_prefix(f"moments.{name}.", tensors).items()
            }


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Checkpoint:
    """State needed to resume a run."""

    update: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints of a run: the last few, and those still needed."""

    folder: Path

    def save(self, update: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint; a failure leaves earlier ones untouched and no partial files."""
        try:
            with atomic_directory(self.path(update), SCRATCH) as temporary:
                safetensors.torch.save_file(dict(tensors), temporary / TENSORS)
                record = {**state, "update": update}
                record["sha256"] = _checksum(temporary / TENSORS, record)
                (temporary / STATE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except (OSError, safetensors.SafetensorError) as error:
            kept = self.updates()
            last = f"the last good checkpoint is update {kept[-1]}" if kept else "there is no earlier checkpoint"
            raise CheckpointError(
                f"{self.folder}: cannot write the checkpoint of update {update}: {error}; {last}; "
                "free disk space or fix the permissions, then run the same command again"
            ) from None

    def load_latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Load the newest intact checkpoint, skipping damaged ones; None if there is none."""
        updates = self.updates()
        for update in reversed(updates):
            try:
                return self.load(update)
            except CheckpointError as error:
                warn(f"{error}; using the previous checkpoint")
        if updates:
            raise CheckpointError(f"{self.folder}: every checkpoint is damaged; to start over, remove the directory")
        return None

    def intact(self, updates: list[int], warn: Callable[[str], None]) -> list[int]:
        """Return the updates whose checkpoints are intact, at least one; report the others."""
        if not updates:
            raise CheckpointError(f"{self.folder}: no update has been validated yet; raise training.max_updates")
        found = []
        for update in updates:
            try:
                found.append(self.load(update).update)
            except CheckpointError as error:
                warn(f"{error}; ignoring it")
        if not found:
            raise CheckpointError(
                f"{self.folder}: all of the best checkpoints (updates {updates}) are damaged; "
                "to start over, remove the directory"
            )
        return found

    def load(self, update: int) -> Checkpoint:
        """Load a checkpoint and verify its checksum."""
        path = self.path(update)
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            if _checksum(path / TENSORS, state) != state["sha256"]:
                raise CheckpointError(f"{path}: damaged (checksum differs)")
            return Checkpoint(update, safetensors.torch.load_file(path / TENSORS), state)
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from None

    def average(self, updates: list[int], prefix: str) -> dict[str, Tensor]:
        """Average the tensors under `prefix` over several checkpoints, loading one at a time.

        Sums are in float64, so that the average of equal tensors (frozen weights) has the same bits.
        """
        total, tensors = dict[str, Tensor](), dict[str, Tensor]()
        for update in updates:
            tensors = _strip_prefix(prefix, self.load(update).tensors)
            for name, tensor in tensors.items():
                total[name] = total[name] + tensor if name in total else tensor.double()
        return {name: (total[name] / len(updates)).to(tensor.dtype) for name, tensor in tensors.items()}

    def updates(self) -> list[int]:
        """Return the update numbers of all checkpoints, oldest first."""
        return sorted(int(path.name.removeprefix("update-")) for path in self.folder.glob("update-" + "[0-9]" * 9))

    def prune(self, needed: set[int]) -> None:
        """Delete all but the last few and the needed checkpoints."""
        for update in self.updates()[:-KEPT_LAST]:
            if update not in needed:
                shutil.rmtree(self.path(update))

    def path(self, update: int) -> Path:
        return self.folder / f"update-{update:09d}"


def _checksum(tensors: Path, state: Mapping[str, Any]) -> str:
    """Hash the tensors and the state without its checksum."""
    with tensors.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps({**state, "sha256": None}, sort_keys=True).encode())
    return digest.hexdigest()


def record_run(config: RunConfig, directory: Path, world: World, warn: Callable[[str], None]) -> None:
    """Write run.json of a new run; for an existing run, warn of changed settings."""
    path = directory / "run.json"
    record = describe_run(config, world)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists():
            earlier = _read(path)
            if earlier["data"] != record["data"]:
                raise CheckpointError(f"{path}: the run was started on different data; choose another run directory")
            if (system := earlier["config"].get("system", config.system)) != config.system:
                raise CheckpointError(f"{path}: a {system} run; choose another run directory for {config.system}")
            for change in differences(flat(earlier["config"]), flat(record["config"]), ignored=MAY_CHANGE):
                warn(f"{path}: the run was started with a different setting: {change}")
            _compare_threads(path, earlier, record, warn)
            record["resumed"] = [*earlier.get("resumed", []), record["started"]]
            record["started"] = earlier["started"]
        write_atomic(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot record the run: {error}") from None


def _compare_threads(path: Path, earlier: dict[str, Any], record: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Warn if this process has another number of threads: sums in another order are not bit-identical."""
    before, now = (each.get("environment", {}) for each in (earlier, record))
    if now["device"] == "cpu" and before.get("threads", now["threads"]) != now["threads"]:
        warn(
            f"{path}: the run was started with {before['threads']} CPU threads, this process has {now['threads']}: "
            f"results will not be bit-identical unless OMP_NUM_THREADS={before['threads']}"
        )


def _read(path: Path) -> dict[str, Any]:
    """Read the record of an earlier call."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {"data", "config", "started"} <= record.keys():
            return record
    except (ValueError, AttributeError):
        pass
    raise CheckpointError(f"{path}: damaged; remove it to resume the run without its history")


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Lock a run directory; the lock is released when the process ends."""
    with open_to_lock(directory / ".lock") as file:
        if not lock(file, wait=False):
            raise TrainingError(f"{directory}: another process is training in this directory; wait for it or stop it")
        yield


def open_to_lock(path: Path) -> TextIO:
    """Open a lock file, creating its directory; a lock is released when the file is closed or the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise CheckpointError(f"{path.parent}: cannot be written: {error.strerror}") from None


def describe_run(config: RunConfig, world: World) -> dict[str, Any]:
    """Return everything that determines the result of a run."""
    _require_prepared(config.data)
    manifests = {name: TokenStore.open(config.data / name).manifest for name in ("train", "dev")}
    resolved = replace(config, data=config.data.resolve())
    if config.low_delay.data is not None:
        _require_prepared(config.low_delay.data)
        manifests["low_delay"] = TokenStore.open(config.low_delay.data / "train").manifest
        resolved = replace(resolved, low_delay=replace(config.low_delay, data=config.low_delay.data.resolve()))
    return {
        "config": as_table(resolved),
        "data": {name: {"pairs": manifest.kept, "files": manifest.files} for name, manifest in manifests.items()},
        "commit": commit(),
        "environment": {
            "simulmt": __version__,
            **environment("numpy", "sentencepiece"),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "processes": world.size,
        },
        "command": sys.argv,
        "started": timestamp(),
    }


def _require_prepared(data: Path) -> None:
    for name in ("source.model", "target.model", "train", "dev"):
        if not (data / name).exists():
            found = f"no {name}" if data.is_dir() else "no such directory"
            raise DataError(
                f"{data}: {found}; `data` must be a data directory; make one with simulmt prepare ... --output {data}"
            )


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as `section.key` entries."""
    return {
        f"{section}.{key}" if key else section: value
        for section, entries in config.items()
        for key, value in (entries.items() if isinstance(entries, dict) else [("", entries)])
    }


def differences(before: dict[str, Any], now: dict[str, Any], ignored: Sequence[str] = ()) -> list[str]:
    """Describe each setting that differs."""
    keys = sorted((before.keys() | now.keys()).difference(ignored))
    return [f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


@dataclass(frozen=True)
class World:
    """This process and the size of its group."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def distribute(self, module: nn.Module) -> nn.Module:
        """Wrap a module to average gradients over all processes."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def sync_gradients(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Average gradients over processes in this backward pass if `enabled`, or only accumulate them."""
        return nullcontext() if enabled or self.size == 1 else cast(DistributedDataParallel, module).no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def merge(self, part: dict[int, Any]) -> dict[int, Any]:
        """Return the union of all processes' results, in every process."""
        if self.size == 1:
            return part
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return {key: value for each in parts for key, value in each.items()}

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def init_distributed(device: str = "auto") -> Iterator[World]:
    """Join the process group inside the context; `device` is auto, cpu, cuda or cuda:N."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if size > 1:
        # After a restart, the store may still hold addresses of dead processes.
        store, *_ = next(rendezvous("env://"))
        attempt = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    try:
        yield World(rank, size, place)
    finally:
        if size > 1:
            dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    if name == "cpu":
        return torch.device(name)
    number = re.fullmatch("cuda:([0-9]+)", name)
    if number is None:
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: PyTorch finds no CUDA device on this machine; try --device cpu")
    index, last = int(number[1]), torch.cuda.device_count() - 1
    if index > last:
        raise ConfigError(f"--device {name}: no such GPU; the last one is cuda:{last}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
