"""Every error that simulmt raises on purpose, drawn as one tree.

    SimulmtError                 catch this to catch them all
    ├── ConfigError              a setting is unknown, missing or out of range
    ├── DataError                a corpus, token store or alignment file cannot be used
    ├── VocabularyError          a SentencePiece model or a token id does not fit
    ├── BundleError              a model bundle is missing, damaged or of another format
    ├── StreamError              a live stream was used in an illegal order
    │   └── RefusedError         a server cannot go on with a stream (simulmt.serve.protocol)
    ├── CheckpointError          a checkpoint cannot be written or read
    ├── TrainingError            training cannot go on (diverged, no data fits)
    └── MissingExtraError        a feature needs an extra that is not installed

A message says what was found, what was expected and what to do, on one line.
"""

from __future__ import annotations


class SimulmtError(Exception):
    """Base of all errors that are the user's to see; anything else is a bug in simulmt."""


class ConfigError(SimulmtError):
    """A setting is unknown, missing or out of range."""


class DataError(SimulmtError):
    """A corpus, token store or alignment file cannot be used."""


class VocabularyError(SimulmtError):
    """A SentencePiece model or a token id does not fit."""


class BundleError(SimulmtError):
    """A model bundle is missing, damaged or of another format."""


class StreamError(SimulmtError):
    """A live stream was used in an illegal order."""


class CheckpointError(SimulmtError):
    """A checkpoint cannot be written or read."""


class TrainingError(SimulmtError):
    """Training cannot go on."""


class MissingExtraError(SimulmtError):
    """A feature needs an optional extra that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra '{extra}': pip install 'simulmt[{extra}]'")
