from __future__ import annotations

from simulmt.runtime import benchmark


def test_percentiles() -> None:
    found = benchmark._percentiles([float(value) for value in range(101)])
    assert (found.median, found.p95, found.p99) == (50, 95, 99)
