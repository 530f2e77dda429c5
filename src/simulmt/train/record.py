"""Record configuration, data, code and machine of a run in `run.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from simulmt.config import as_table
from simulmt.data.store import TokenStore
from simulmt.errors import CheckpointError, DataError, TrainingError
from simulmt.files import lock, write_whole
from simulmt.provenance import commit, environment, timestamp
from simulmt.train.settings import RunConfig
from simulmt.train.world import World

# When to stop: may change when a run is resumed.
MAY_CHANGE = ("max_updates", "max_minutes", "patience")


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
            for change in differences(_fixed_settings(earlier["config"]), _fixed_settings(record["config"])):
                warn(f"{path}: the run was started with a different setting: {change}")
            _compare_threads(path, earlier, record, warn)
            record["resumed"] = [*earlier.get("resumed", []), record["started"]]
            record["started"] = earlier["started"]
        write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / ".lock").open("w")
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}") from None
    with opened as file:
        if not lock(file, wait=False):
            raise TrainingError(f"{directory}: another process is training in this directory; wait for it or stop it")
        yield


def describe_run(config: RunConfig, world: World) -> dict[str, Any]:
    """Return everything needed to know what produced a result."""
    _require_prepared(config.data)
    manifests = {name: TokenStore.open(config.data / name).manifest for name in ("train", "dev")}
    return {
        "config": as_table(replace(config, data=config.data.resolve())),
        "data": {name: {"pairs": manifest.kept, "files": manifest.files} for name, manifest in manifests.items()},
        "commit": commit(),
        "environment": {
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


def _fixed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as flat `section.key` entries, without those that may change."""
    return {key: value for key, value in flat(config).items() if key.removeprefix("training.") not in MAY_CHANGE}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as `section.key` entries."""
    return {
        f"{section}.{key}" if key else section: value
        for section, entries in config.items()
        for key, value in (entries.items() if isinstance(entries, dict) else [("", entries)])
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each setting that differs."""
    keys = sorted(before.keys() | now.keys())
    return [f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)]
