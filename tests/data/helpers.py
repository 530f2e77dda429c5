"""Files of lines."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path


def write(path: Path, lines: Sequence[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]
