"""File and system helpers: atomic writes, checksums, locks, core count, peak memory, provenance of results."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, TextIO


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8; an earlier file stays until the new one is on disk."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` if the block succeeds, and is deleted otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def atomic_directory(directory: Path, scratch: str = "", keep: Path | None = None) -> Iterator[Path]:
    """Yield an empty directory that replaces `directory` if the block succeeds, and is deleted otherwise.

    With a fixed `scratch` name, leftovers of a killed process are found and removed; without one, several processes may
    write at the same time. The earlier directory is deleted, or moved to `keep`.
    """
    scratch = scratch or f".{directory.name}.{uuid.uuid4().hex}"
    new = directory.with_name(f"{scratch}.new")
    old = keep or directory.with_name(f"{scratch}.old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for path in (*new.iterdir(), new):
            fsync(path)
        if directory.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)  # a directory cannot be replaced atomically
        new.rename(directory)
        fsync(directory.parent)
        if keep is None:
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as stored on disk."""
    import hashlib  # loads a large library, which translation does not need

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(file: TextIO, wait: bool = True) -> bool:
    """Lock an open file; return False if another process holds it and `wait` is False.

    The lock belongs to the open file: it is inherited by child processes, and released when the last of them has
    closed the file or ended.
    """
    import fcntl  # not available on Windows, and not needed for translation

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory_mb() -> float | None:
    """Return the peak resident memory of this process, or None if the system does not report it."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, it does not count the memory of the parent before exec
        (peak,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 1e6  # from KiB
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # in bytes, on macOS


@cache
def commit() -> str | None:
    """Return the commit of the running code, marked if there are uncommitted changes; None outside a checkout."""
    import subprocess  # translation needs none of the modules imported here and below

    command = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment(*packages: str) -> dict[str, str]:
    """Return the versions of Python and some packages, and the platform."""
    import platform
    from importlib import metadata

    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "machine": platform.platform(),
    }


def timestamp() -> str:
    """Return the current time in UTC, to the second."""
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
