"""Exceptions.

    SimulmtError                 base class
    ├── ConfigError              unknown, missing or invalid setting
    ├── DataError                unusable corpus, token store or alignment file
    ├── VocabularyError          unusable SentencePiece model, or token id out of range
    ├── BundleError              missing, damaged or incompatible model bundle
    ├── StreamError              illegal use of a live stream
    │   └── RefusedError         stream refused by a server (simulmt.serve.protocol)
    ├── SpeechError              unusable audio, microphone or recogniser
    ├── CheckpointError          checkpoint cannot be written or read
    ├── TrainingError            training cannot continue (diverged, no usable data)
    └── MissingExtraError        optional dependency not installed

A message is one line that says what was found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SimulmtError(Exception):
    """Base class of errors meant for the user; any other exception is a bug."""


class ConfigError(SimulmtError):
    """Unknown, missing or invalid setting."""


class DataError(SimulmtError):
    """Unusable corpus, token store or alignment file."""


class VocabularyError(SimulmtError):
    """Unusable SentencePiece model, or token id out of range."""


class BundleError(SimulmtError):
    """Missing, damaged or incompatible model bundle."""


class StreamError(SimulmtError):
    """Illegal use of a live stream, such as pushing text after `finish`."""


class SpeechError(SimulmtError):
    """Unusable audio, microphone or recogniser."""


class CheckpointError(SimulmtError):
    """Checkpoint cannot be written or read."""


class TrainingError(SimulmtError):
    """Training cannot continue."""


class MissingExtraError(SimulmtError):
    """Optional dependency not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra '{extra}': pip install 'simulmt[{extra}]'")


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Raise MissingExtraError if the block cannot import a third-party package."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("simulmt"):
            raise
        raise MissingExtraError(feature, extra) from None
