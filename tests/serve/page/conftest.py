"""A browser, a server and a page for the tests of the pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from .support import PATIENCE_MS, Complaints, PageServer, browsing, open_page, serving

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="package")  # while Playwright runs, no other test can start an event loop
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="package")  # while Playwright runs, no other test can start an event loop
def server(browser: Browser) -> Iterator[PageServer]:  # noqa: ARG001 - no server where there is no browser
    with serving() as server:
        yield server


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def complaints(context: BrowserContext, server: PageServer) -> Iterator[Complaints]:
    complaints = Complaints(context, server.address)
    yield complaints
    assert complaints.found == []


@pytest.fixture(scope="module")
def scripts(browser: Browser, server: PageServer) -> Iterator[Page]:
    """A page for tests that only call the functions of scripts; they share it."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    complaints = Complaints(context, server.address)
    yield open_page(context, server)
    context.close()
    assert complaints.found == []


@pytest.fixture
def page(context: BrowserContext, server: PageServer, complaints: Complaints) -> Page:  # noqa: ARG001
    return open_page(context, server)
