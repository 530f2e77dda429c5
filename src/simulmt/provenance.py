"""Provenance of results: commit, versions, platform, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

from simulmt import __version__


@cache
def commit() -> str | None:
    """Return the commit of the running code, marked if there are uncommitted changes; None outside a checkout."""
    command = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(*packages: str) -> dict[str, str]:
    """Return the versions of simulmt, Python and some packages, and the platform."""
    return {
        "simulmt": __version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "machine": platform.platform(),
    }


def timestamp() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
