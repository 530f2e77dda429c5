from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simulmt.runtime.memory import anonymous_blocks, huge_pages

MAPS = """\
55d000000000-55d000100000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 r--p 00000000 08:01 42                         /models/ctc.weights
7f0002000000-7f0002800000 rw-p 00001000 08:01 43                         /lib/lib with spaces.so
7f0003000000-7f0003001000 ---p 00000000 00:00 0
7f0004000000-7f0004100000 rw-s 00000000 00:00 0
"""

# Prints the huge pages, in KiB, of a block taken inside and of one that was there before; or that there are none.
TWO_BLOCKS = """
import ctypes, mmap, sys
from pathlib import Path
from simulmt.runtime.memory import HUGE_PAGE, collapse, huge_pages

def block():
    taken = mmap.mmap(-1, 9 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken[:] = bytes(range(256)) * (len(taken) // 256)
    return taken

def address(taken):
    return ctypes.addressof(ctypes.c_char.from_buffer(taken))

def large(taken):
    start, total, inside = address(taken), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            inside = low < start + len(taken) and start < high
        elif inside and line.startswith("AnonHugePages"):
            total += int(line.split()[1])
    return total

trial = block()
first = -(-address(trial) // HUGE_PAGE) * HUGE_PAGE
if collapse(first, HUGE_PAGE) != 0:
    sys.exit("none")
earlier = block()
with huge_pages():
    inside = block()
assert inside[:] == earlier[:]
print(large(inside), large(earlier))
"""


def test_only_writable_memory_that_is_no_files() -> None:
    assert anonymous_blocks(MAPS) == {0x7F0000000000: 0x7F0000800000, 0x7F0004000000: 0x7F0004100000}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_what_is_taken_inside_is_moved_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_BLOCKS], capture_output=True, text=True)
    if done.stderr == "none\n":
        pytest.skip("this system has no huge pages to give")
    assert done.returncode == 0, done.stderr
    inside, _earlier = map(int, done.stdout.split())
    assert inside >= 7 * 2048


def test_a_system_that_does_not_tell_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    with huge_pages():
        pass


def test_the_peak_counts_memory_that_was_freed() -> None:
    program = (
        "from simulmt.runtime.memory import peak_memory_mb\nb'x' * len(range(200_000_000))\nprint(peak_memory_mb())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 190 < float(done.stdout) < 300
