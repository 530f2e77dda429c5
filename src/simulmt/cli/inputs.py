"""Checks of what a command line names, where the modules that read it cannot tell what it is for."""

from __future__ import annotations

from pathlib import Path

from simulmt.errors import DataError


def require_file(path: Path) -> Path:
    """The path of a file that is there; DataError otherwise, since the command line itself is right."""
    if path.is_file():
        return path
    raise DataError(f"{path}: is a directory, expected a file" if path.is_dir() else f"{path}: no such file")


def require_vocabularies(data: Path) -> None:
    """Raise DataError unless there are two vocabularies in what --data names."""
    for name in ("source.model", "target.model"):
        if not (data / name).is_file():
            raise DataError(f"--data {data}: there is no {name} in it; give a data directory of simulmt prepare")
