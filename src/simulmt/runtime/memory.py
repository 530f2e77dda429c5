"""Large pages for the weights: a step reads all of them once, and page by page of 4 KiB it is 1.1 times slower.

numpy asks Linux for large pages when it takes memory, onnxruntime does not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

LARGE_PAGE = 2 * 2**20
MADV_COLLAPSE = 25  # since Linux 6.1: move to large pages now, if there are any


def use_large_pages() -> None:
    """Move this process's large blocks of memory to large pages, where the system can; else nothing changes."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, stop in _anonymous_blocks(Path("/proc/self/maps").read_text()):
        first, end = -(-start // LARGE_PAGE) * LARGE_PAGE, stop // LARGE_PAGE * LARGE_PAGE
        if first < end:
            madvise(first, end - first, MADV_COLLAPSE)


def _anonymous_blocks(maps: str) -> Iterator[tuple[int, int]]:
    """Start and end of every writable block that is no file's, from the lines of /proc/self/maps."""
    for line in maps.splitlines():
        addresses, permissions, *rest = line.split()
        if permissions.startswith("rw") and len(rest) == 3:  # no path behind offset, device and inode
            start, stop = addresses.split("-")
            yield int(start, 16), int(stop, 16)
