"""Checks of files and directories named on the command line."""

from __future__ import annotations

from pathlib import Path

from simulmt.errors import DataError


def require_file(path: Path) -> Path:
    """Return the path if it is a file; raise DataError otherwise."""
    if path.is_file():
        return path
    raise DataError(f"{path}: is a directory, expected a file" if path.is_dir() else f"{path}: no such file")


def require_vocabularies(data: Path) -> None:
    """Raise DataError unless --data is a directory with two vocabularies."""
    for name in ("source.model", "target.model"):
        if not (data / name).is_file():
            raise DataError(f"--data {data}: there is no {name} in it; give a data directory of simulmt prepare")
