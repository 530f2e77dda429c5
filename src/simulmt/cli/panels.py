"""Under which headings `simulmt --help` lists the commands."""

from __future__ import annotations

TRANSLATE = "Translate"
TRAIN = "Train"
MEASURE = "Measure"
