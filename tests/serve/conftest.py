"""Servers for the tests of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from simulmt.runtime.stream import Translator, load

from .helpers import Served, serving


@pytest.fixture(scope="session")
def translator() -> Translator:
    """The same model without a server, for reference translations."""
    return load("toy", threads=1)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with default limits, except that rooms are not kept from one test to the next."""
    with serving(kept_seconds=0.001) as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers with other settings, see `serving`."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serving(**settings))
