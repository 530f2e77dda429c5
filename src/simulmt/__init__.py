"""Simultaneous machine translation: words go in, the translation comes out, nothing is taken back."""

from __future__ import annotations

__version__ = "0.1.0"
