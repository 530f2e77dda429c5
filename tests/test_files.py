"""Atomic writes, and the peak of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simulmt.files import atomic_writer, write_atomic


def test_text_and_bytes_are_written_unchanged_into_new_folders(tmp_path: Path) -> None:
    write_atomic(tmp_path / "new" / "text", "Grüße\n你好\r\n")
    write_atomic(tmp_path / "new" / "bytes", b"\x00\xff")
    assert (tmp_path / "new" / "text").read_bytes() == "Grüße\n你好\r\n".encode()
    assert (tmp_path / "new" / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bytes", "text"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "earlier")
    with pytest.raises(RuntimeError):
        _fail_half_way(path)
    assert path.read_text() == "earlier"
    write_atomic(path, "later")  # what the failure left is no hindrance
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "later"


def _fail_half_way(path: Path) -> None:
    with atomic_writer(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_the_peak_counts_memory_that_was_freed() -> None:
    program = "from simulmt.files import peak_memory_mb\nb'x' * len(range(200_000_000))\nprint(peak_memory_mb())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 190 < float(done.stdout) < 300
