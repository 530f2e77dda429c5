from __future__ import annotations

import subprocess
import sys

import pytest

from simulmt.runtime.memory import _anonymous_blocks

MAPS = """\
55d000000000-55d000100000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 r--p 00000000 08:01 42                         /models/ctc.weights
7f0002000000-7f0002800000 rw-p 00001000 08:01 43                         /lib/lib with spaces.so
7f0003000000-7f0003001000 ---p 00000000 00:00 0
7f0004000000-7f0004100000 rw-s 00000000 00:00 0
"""

LARGE_PAGES_OF_A_BLOCK = """
import mmap
from pathlib import Path
from simulmt.runtime.memory import use_large_pages

def huge():
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("AnonHugePages"))

block = mmap.mmap(-1, 16 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block[:] = bytes(range(256)) * 2**16
before = huge()
use_large_pages()
assert block[:] == bytes(range(256)) * 2**16
print(before, huge())
"""


def test_only_writable_memory_that_is_no_files() -> None:
    assert list(_anonymous_blocks(MAPS)) == [(0x7F0000000000, 0x7F0000800000), (0x7F0004000000, 0x7F0004100000)]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_memory_is_moved_and_keeps_what_it_holds() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE_PAGES_OF_A_BLOCK], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    if after == before:
        pytest.skip("this system has no large pages to give")
    assert after >= before + 12 * 1024
