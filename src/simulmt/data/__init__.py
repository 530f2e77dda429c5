"""Corpora: reading, cleaning, tokenizing, storing and aligning parallel text, without PyTorch."""
