"""Helpers that write and check files of lines."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def write(path: Path, lines: Sequence[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@contextmanager
def unchanged_texts(folder: Path, *names: str) -> Iterator[None]:
    """Write texts; check afterwards that they are unchanged and that no other file was added."""
    for name in names:
        write(folder / name, ["a b", "c d"])
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before
    assert all(lines(folder / name) == ["a b", "c d"] for name in names)
