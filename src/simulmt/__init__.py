"""Simultaneous machine translation: text in as it arrives, append-only translation out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulmt.runtime.stream import Translator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(name_or_path: str | Path, threads: int = 0) -> Translator:
    """Load a shipped model by name, or a bundle by path; `threads` 0 uses OMP_NUM_THREADS or all cores."""
    from simulmt.runtime.stream import load

    return load(name_or_path, threads)
