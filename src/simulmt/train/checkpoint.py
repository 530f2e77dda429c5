"""Atomic checkpoints.

A checkpoint is a directory `update-000001000/` with `tensors.safetensors` and `state.json`, which holds a checksum of
both. It is written to a temporary directory, synced and renamed. Because batches and random draws are functions of the
update number, the state is small: weights, optimiser moments, averaged weights and a few numbers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from simulmt.errors import CheckpointError
from simulmt.files import replacing_directory

TENSORS, STATE = "tensors.safetensors", "state.json"
KEPT_LAST = 2  # checkpoints kept whatever their score
SCRATCH = ".checkpoint"  # fixed, so that leftovers of a killed run are found and removed


@dataclass(frozen=True)
class Checkpoint:
    """State needed to resume a run."""

    update: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointFolder:
    """Checkpoints of a run: the last few, and those still needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, update: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint; a failure leaves earlier ones untouched and no partial files."""
        try:
            with replacing_directory(self.path(update), SCRATCH) as temporary:
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
        found = []
        for update in updates:
            try:
                found.append(self.load(update).update)
            except CheckpointError as error:
                warn(f"{error}; ignoring it")
        if not updates:
            raise CheckpointError(f"{self.folder}: no update has been validated yet; raise training.max_updates")
        if not found:
            raise CheckpointError(f"{self.folder}: none of the best checkpoints is intact (updates {updates})")
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


def average(folder: CheckpointFolder, updates: list[int], prefix: str) -> dict[str, Tensor]:
    """Average the tensors under `prefix` over several checkpoints, loading one at a time."""
    total: dict[str, Tensor] = {}
    for update in updates:
        for name, tensor in folder.load(update).tensors.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                total[key] = total[key] + tensor if key in total else tensor
    return {name: tensor / len(updates) for name, tensor in total.items()}


def _checksum(tensors: Path, state: Mapping[str, Any]) -> str:
    """Hash the tensors and the state without its checksum."""
    with tensors.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps({**state, "sha256": None}, sort_keys=True).encode())
    return digest.hexdigest()
