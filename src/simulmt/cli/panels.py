"""Headings of `simulmt --help`."""

from __future__ import annotations

TRANSLATE = "Translate"
TRAIN = "Train"
MEASURE = "Measure"
