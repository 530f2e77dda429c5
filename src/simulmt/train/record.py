"""What a run was: its configuration, data, code and machine, in `run.json`."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from simulmt import __version__
from simulmt.config import as_table
from simulmt.errors import CheckpointError, DataError, TrainingError
from simulmt.files import write_whole
from simulmt.store import TokenStore
from simulmt.train.settings import RunConfig
from simulmt.train.world import World

# Settings that say when to stop: a run may go on under other ones and is still the same run.
FREE = ("max_updates", "max_minutes", "patience")


def record_run(config: RunConfig, directory: Path, world: World, warn: Callable[[str], None]) -> None:
    """Write run.json for a new run; for an existing one, warn of every setting that has changed since."""
    path = directory / "run.json"
    record = describe_run(config, world)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists():
            earlier = _read(path)
            if earlier["data"] != record["data"]:
                raise CheckpointError(f"{path}: the run was started on other data; choose another run directory")
            for change in _differences(_fixed(earlier["config"]), _fixed(record["config"])):
                warn(f"{path}: the run was started with another setting: {change}")
            record["resumed"] = [*earlier.get("resumed", []), record["started"]]
            record["started"] = earlier["started"]
        write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot record the run: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    """The record of an earlier call."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {"data", "config", "started"} <= record.keys():
            return record
    except (ValueError, AttributeError):
        pass
    raise CheckpointError(f"{path}: damaged; remove it, and the run goes on without its history")


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold a run directory for this process alone; the lock goes with the process, however that ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error.strerror}") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{directory}: another process is training in it; wait for it or stop it") from None
        yield


def describe_run(config: RunConfig, world: World) -> dict[str, Any]:
    """All that is needed to know what produced a result."""
    _require_prepared(config.data)
    manifests = {name: TokenStore.open(config.data / name).manifest for name in ("train", "dev")}
    return {
        "config": as_table(replace(config, data=config.data.resolve())),
        "data": {name: {"pairs": manifest.kept, "files": manifest.files} for name, manifest in manifests.items()},
        "commit": _commit(),
        "environment": {
            "simulmt": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": metadata.version("numpy"),
            "sentencepiece": metadata.version("sentencepiece"),
            "machine": platform.platform(),
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "processes": world.size,
        },
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _require_prepared(data: Path) -> None:
    for name in ("source.model", "target.model", "train", "dev"):
        if not (data / name).exists():
            found = f"there is no {name} in it" if data.is_dir() else "no such directory"
            raise DataError(
                f"{data}: {found}; `data` must name a data directory: make one with simulmt prepare ... --output {data}"
            )


def _commit() -> str | None:
    """The commit of the code that runs, with a mark if it was changed since; None outside a checkout."""
    where = Path(__file__).parent
    command = ["git", "-C", os.fspath(where), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as flat `section.key` entries, without those that may change."""
    flat = {}
    for key, value in config.items():
        entries = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
        flat.update(entries)
    return {key: value for key, value in flat.items() if key.removeprefix("training.") not in FREE}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    keys = sorted(before.keys() | now.keys())
    return [f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)]
