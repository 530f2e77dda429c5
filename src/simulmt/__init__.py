"""Simultaneous machine translation: words go in, the translation comes out, nothing is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulmt.stream import Translator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(name_or_path: str | Path, threads: int = 0) -> Translator:
    """Load a model by the name of a shipped bundle or the path of any; `threads` 0 takes all physical cores."""
    from simulmt.stream import load

    return load(name_or_path, threads)
