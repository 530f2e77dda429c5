"""Speech on the live page: the browser's recogniser, the server's, and microphone errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, WebSocketRoute, expect

from .support import PATIENCE_MS, PageServer

GERMAN = {
    "name": "toy",
    "kind": "ctc",
    "source": "de",
    "target": "en",
    "delays": [1, 3, 5],
    "default_delay": 3,
    "audio": False,
}

RECOGNISER = """window.SpeechRecognition = class {
    start() { window.recognition = this; }
    stop() { this.onend?.(); }
};"""


def open_with(context: BrowserContext, server: PageServer, model: dict[str, Any]) -> Page:
    """Open the page with a faked list of models."""
    context.route("**/v1/models", lambda route: route.fulfill(json={"models": [model]}))
    page = context.new_page()
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    return page


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    """Run the browser's event loop until a condition holds, so that its messages arrive."""
    for _ in range(PATIENCE_MS // 20):
        if condition():
            return
        page.wait_for_timeout(20)
    pytest.fail("the condition never held")


def test_a_browser_without_a_recogniser_offers_no_microphone(context: BrowserContext, server: PageServer) -> None:
    context.add_init_script("delete window.SpeechRecognition; delete window.webkitSpeechRecognition;")
    page = open_with(context, server, GERMAN)
    expect(page.get_by_role("button", name="Listen")).to_be_hidden()
    expect(page.get_by_label("Your text")).to_have_attribute("placeholder", "Type or paste here.")


def test_only_final_results_are_sent(context: BrowserContext, server: PageServer) -> None:
    context.add_init_script(RECOGNISER)
    page = open_with(context, server, GERMAN)
    page.get_by_role("button", name="Listen").click()
    expect(page.locator(".ink i")).to_have_text("Listening…")
    hear = """results => recognition.onresult({resultIndex: 0, results: results.map(([transcript, isFinal]) =>
        Object.assign([{transcript}], {isFinal}))})"""
    page.evaluate(hear, [["guten", False]])
    expect(page.locator(".ink i")).to_have_text("guten")
    expect(page.locator(".sent .text")).to_have_text("")
    page.evaluate(hear, [["Guten Tag", True], ["wie", False]])
    expect(page.locator(".sent .text p")).to_have_text(["Guten Tag"])
    expect(page.locator(".ink i")).to_have_text("wie")
    page.get_by_role("button", name="Listen").click()
    expect(page.locator(".ink i")).to_have_text("")
    assert page.evaluate("recognition.lang") == "de"


@pytest.mark.parametrize(
    ("error", "words"),
    [("not-allowed", "is blocked"), ("audio-capture", "No microphone"), ("network", "needs an internet connection")],
)
def test_errors_of_the_microphone_are_explained(
    context: BrowserContext, server: PageServer, error: str, words: str
) -> None:
    context.add_init_script(RECOGNISER)
    page = open_with(context, server, GERMAN)
    page.get_by_role("button", name="Listen").click()
    page.evaluate("error => recognition.onerror({error})", "no-speech")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.evaluate("error => recognition.onerror({error})", error)
    expect(page.get_by_role("alert")).to_contain_text(words)
    expect(page.get_by_role("button", name="Listen")).to_have_attribute("aria-pressed", "false")
    page.get_by_role("button", name="Close this message").click()
    expect(page.get_by_role("alert")).to_have_count(0)


class Recogniser:
    """A fake server that recognises every 100 ms of audio as two words, and records what it receives."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.sources: list[str | None] = []  # None for the end of a sentence
        self.starts: list[dict[str, Any]] = []
        self.samples = 0
        self.is_lost = False  # whether what comes is lost on the way

    def serve(self, socket: WebSocketRoute) -> None:
        socket.on_message(lambda message: self._receive(socket, message))

    def _receive(self, socket: WebSocketRoute, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._hear(socket, message)
            return
        content = json.loads(message)
        if content["type"] in ("start", "resume"):
            self._open(socket, content)
        elif content["type"] in ("source", "end"):
            self.sources.append(content.get("text"))

    def _open(self, socket: WebSocketRoute, start: dict[str, Any]) -> None:
        self.starts.append(start)
        is_audio = start.get("input") == "audio" or start.get("session") == "audio"
        ready = {"type": "ready", "session": "audio" if is_audio else "text", "model": "toy", "delay": 3, "received": 0}
        if is_audio:
            ready["samples"] = self.samples
        socket.send(json.dumps(ready))

    def _hear(self, socket: WebSocketRoute, frame: bytes) -> None:
        if self.is_lost:
            self.is_lost = False
            socket.close(code=1011)
            return
        self.frames.append(frame)
        self.samples += len(frame) // 2
        socket.send(json.dumps({"type": "ack", "samples": self.samples}))
        if len(self.frames) == 1:
            transcript = {
                "type": "transcript",
                "seq": 1,
                "text": "guten Tag ",
                "tentative": "gut",
                "ends_sentence": True,
            }
            socket.send(json.dumps(transcript))
            transcript = {"type": "transcript", "seq": 2, "text": "guten Morgen ", "tentative": "zusam"}
            socket.send(json.dumps(transcript))


def test_the_server_recognises(context: BrowserContext, server: PageServer) -> None:
    context.grant_permissions(["microphone"])
    context.add_init_script("delete window.SpeechRecognition; delete window.webkitSpeechRecognition;")
    recogniser = Recogniser()
    context.route_web_socket("**/v1/stream", recogniser.serve)
    page = open_with(context, server, {**GERMAN, "audio": True})
    page.get_by_role("button", name="Listen").click()
    expect(page.locator(".ink span")).to_have_text("guten Morgen")
    expect(page.locator(".ink i")).to_have_text("zusam")
    expect(page.locator(".sent .text p")).to_have_text(["guten Tag"])
    assert recogniser.sources == ["guten Tag ", None, "guten Morgen "]
    start = {"type": "start", "model": "toy", "input": "audio", "output": "transcript", "api_key": None}
    assert recogniser.starts[-1] == start
    assert len(recogniser.frames[0]) == 3_200
    page.get_by_role("button", name="Listen").click()
    expect(page.locator(".ink i")).to_have_text("")


def test_audio_that_was_not_acknowledged_is_sent_again(context: BrowserContext, server: PageServer) -> None:
    recogniser = Recogniser()
    context.route_web_socket("**/v1/stream", recogniser.serve)
    page = open_with(context, server, GERMAN)
    page.evaluate("""async () => {
        const {AudioSession} = await import('/static/audio.js');
        const listener = {text() {}, tentative() {}, sentence() {}, failed() {}};
        window.audio = new AudioSession({model: 'toy', api_key: null}, listener);
    }""")
    send = "([first, count]) => audio.send(Int16Array.from({length: count}, (_, index) => first + index))"
    page.evaluate(send, [0, 1_600])
    wait_until(page, lambda: recogniser.samples == 1_600)
    recogniser.is_lost = True
    page.evaluate(send, [1_600, 1_600])
    page.evaluate(send, [3_200, 1_600])
    wait_until(page, lambda: recogniser.samples == 4_800)
    assert recogniser.starts[-1] == {"type": "resume", "session": "audio", "seq": 2, "api_key": None}
    heard = b"".join(recogniser.frames)
    assert [int.from_bytes(heard[index : index + 2], "little") for index in range(0, len(heard), 2)] == [*range(4_800)]


def test_a_microphone_that_is_not_allowed(context: BrowserContext, server: PageServer) -> None:
    recogniser = Recogniser()
    context.route_web_socket("**/v1/stream", recogniser.serve)
    page = open_with(context, server, {**GERMAN, "audio": True})
    page.get_by_role("button", name="Listen").click()
    expect(page.get_by_role("alert")).to_contain_text("The microphone is blocked")
    assert recogniser.frames == []
