"""A server, a browser, and the expected contents of the page."""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import axe_playwright_python  # type: ignore[import-untyped]
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

import simulmt
from simulmt.runtime.captions import CaptionWriter, Format
from simulmt.runtime.stream import Commit, Lag, Stream, Translator

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--use-fake-device-for-media-stream",
)
PATIENCE_MS = 120_000  # before a test gives up; the machine may be busy with much else
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"

FIRST = "gul mivan kovan du don Korsar .\n"
SECOND = "felfun nolbos faltin mirgus fisfi kallil .\n"
THIRD = "dis malkor fomin las rolki .\n"

# Pieces of the translation in the order of the page, exactly as they were committed.
WRITTEN = """lane => [...document.querySelectorAll('.lane')[lane]?.querySelectorAll('.text span') ?? []]
    .map(piece => piece.textContent).join('')"""

# Notes everything that happens to a translation other than growth at its very end.
WATCH = """() => {
    window.violations = [];
    const body = document.querySelector('.lane .text');
    let before = body.textContent;
    new MutationObserver(records => {
        for (const record of records) {
            if (record.type === 'characterData') window.violations.push('text was changed');
            if (record.removedNodes.length) window.violations.push('a node was removed');
            if (record.nextSibling) window.violations.push('a node was inserted');
        }
        if (!body.textContent.startsWith(before)) window.violations.push('the text is no continuation');
        before = body.textContent;
    }).observe(body, {childList: true, characterData: true, subtree: true});
}"""

# The contrast of every visible text with what is behind it, by the formula of WCAG 2.
CONTRASTS = """() => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const luminance = color => channels(color).slice(0, 3)
        .map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        const color = getComputedStyle(element).backgroundColor;
        return channels(color)[3] === 0 && element.parentElement ? behind(element.parentElement) : color;
    };
    const hasText = element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    return [...document.body.querySelectorAll('*')]
        .filter(element => hasText(element) && element.checkVisibility() && !element.closest('.unseen, :disabled'))
        .map(element => {
            const {color, fill} = getComputedStyle(element);
            const front = luminance(element.tagName === 'text' ? fill : color);
            const back = luminance(behind(element));
            return [element.textContent.trim(), (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05)];
        });
}"""


class PageServer:
    """`simulmt serve` in a separate process, which keeps its port when it is restarted."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "simulmt", "serve", "--model", "toy", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--threads", "1", *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not self._answers():
            assert self._process.poll() is None, "the server ended before it served"
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the process without draining."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=10):
                return True
        except OSError:
            return False


@contextmanager
def serving(*options: str) -> Iterator[PageServer]:
    """Run a server inside the context."""
    server = PageServer(*options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start the installed Chromium."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium on PATH; install it to test the page")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS), timeout=PATIENCE_MS)
        yield browser
        browser.close()


class Complaints:
    """Collects what a page must never do: report an error, or request anything from another host."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.found: list[str] = []
        self.expected: tuple[str, ...] = ()
        context.on("console", lambda message: self._hear(message.type, message.text))
        context.on("weberror", lambda error: self._hear("error", str(error.error)))
        context.on("request", lambda request: self._check(request.url, address))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self.expected):
            self.found.append(text)

    def _check(self, url: str, address: str) -> None:
        if not url.startswith((f"{address}/", "blob:", "data:")):
            self.found.append(f"a request to {url}")


def open_page(context: BrowserContext, server: PageServer) -> Page:
    """Open the live page and wait until it is connected."""
    page = context.new_page()
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    return page


def draft(page: Page) -> Any:
    """The text field of the page."""
    return page.locator("textarea")


def choose(page: Page, name: str) -> None:
    """Press a button of the menu."""
    page.get_by_role("button", name="More").click()
    page.locator("#menu").get_by_role("button", name=name).click()


def frames_sent(page: Page, kind: str) -> list[str]:
    """Return a list that collects the messages of one type that the page sends from now on."""
    frames: list[str] = []

    def note(payload: str | bytes) -> None:
        if f'"type":"{kind}"' in str(payload):
            frames.append(str(payload))

    page.on("websocket", lambda socket: socket.on("framesent", note))
    return frames


def wait_for_translation(page: Page, text: str, lane: int = 0) -> None:
    """Wait until a lane shows exactly this text; on failure, report what it shows."""
    try:
        page.wait_for_function(f"([lane, text]) => ({WRITTEN})(lane) === text", arg=[lane, text])
    except Exception:
        assert page.evaluate(WRITTEN, lane) == text, page.locator(".connection").inner_text()
        raise


def violations(page: Page) -> list[str]:
    """Return the accessibility violations that axe-core finds."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(results => results.violations)")
    return [f"{rule['id']}: {node['html']}" for rule in found for node in rule["nodes"]]


def violations_in_both_schemes(page: Page) -> list[str]:
    """Return the accessibility violations in light and in dark colours."""
    found = []
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found += [f"{scheme}: {violation}" for violation in violations(page)]
    return found


def offline(source: Sequence[str | int], delay: int | None = None) -> str:
    """Translate lines, each a sentence, with the toy model and changes of the delay between them."""
    stream = _toy().stream(delay)
    return "".join(commit.text for part in source for commit in _push(stream, part))


@cache
def _toy() -> Translator:
    return simulmt.load("toy", threads=1)


def _push(stream: Stream, part: str | int) -> Iterable[Any]:
    if isinstance(part, int):
        stream.set_delay(part)
        return []
    return [*stream.push(part), *stream.end_sentence()] if part.endswith("\n") else stream.push(part)


def subtitles(kind: str, commits: Sequence[dict[str, Any]]) -> str:
    """Return the subtitles that the command line writes for commits at the given seconds."""
    output = io.StringIO()
    now = 0.0
    writer = CaptionWriter(output, Format(kind), clock=lambda: now)
    for commit in commits:
        now = commit["seconds"]
        writer.commit(Commit(1, commit["text"], 1, Lag(0, 0, 0), 0))
        if commit["endsSentence"]:
            writer.end_line()
    writer.close()
    return output.getvalue()
