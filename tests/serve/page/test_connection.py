"""The connection of the live page, and servers that fail."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import BrowserContext, WebSocketRoute, expect

from .support import (
    FIRST,
    SECOND,
    THIRD,
    WATCH,
    WRITTEN,
    Complaints,
    PageServer,
    draft,
    frames_sent,
    offline,
    open_page,
    serving,
    wait_for_translation,
)


def test_a_cut_connection_loses_nothing(context: BrowserContext, server: PageServer, complaints: Complaints) -> None:
    complaints.expected = ("ERR_INTERNET_DISCONNECTED",)
    page = context.new_page()
    resumed = frames_sent(page, "resume")
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    page.evaluate(WATCH)
    draft(page).press_sequentially(FIRST + SECOND[:12])
    context.set_offline(True)
    page.wait_for_selector(".connection[data-state=lost]")
    draft(page).press_sequentially(SECOND[12:])
    context.set_offline(False)
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD]))
    page.wait_for_selector(".connection[data-state=live]")
    assert page.evaluate("window.violations") == []
    assert resumed


def test_a_restarted_server_loses_nothing(context: BrowserContext) -> None:
    with serving() as server:
        complaints = Complaints(context, server.address)
        complaints.expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET")
        page = open_page(context, server)
        page.evaluate(WATCH)
        page.get_by_role("slider", name="Translation: faster or better").press("Home")
        draft(page).press_sequentially(FIRST + SECOND[:30])
        page.get_by_role("slider", name="Translation: faster or better").press("End")
        server.kill()
        page.wait_for_selector(".connection[data-state=lost]")
        draft(page).press_sequentially(SECOND[30:])
        server.start()
        wait_for_translation(page, offline([FIRST, SECOND[:30], 5, SECOND[30:]], delay=1))
        draft(page).press_sequentially(THIRD)
        wait_for_translation(page, offline([FIRST, SECOND[:30], 5, SECOND[30:], THIRD], delay=1))
        page.wait_for_selector(".connection[data-state=live]")
        assert page.evaluate("window.violations") == []
        assert complaints.found == []


def test_a_server_that_always_fails_is_tried_ever_less_often(context: BrowserContext, server: PageServer) -> None:
    attempts = []

    def fail(socket: WebSocketRoute) -> None:
        def answer(text: str | bytes) -> None:
            if json.loads(text)["type"] not in ("start", "resume"):
                return
            attempts.append(text)
            socket.send(json.dumps({"type": "ready", "session": "s", "model": "toy", "delay": 3, "received": 0}))
            socket.send(json.dumps({"type": "error", "code": "internal", "message": "failed"}))
            socket.close(code=1011)

        socket.on_message(answer)

    page = context.new_page()
    page.clock.install()
    page.route_web_socket("**/v1/stream", fail)
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=lost]")
    for _ in range(250):
        page.clock.run_for(100)
    assert 3 <= len(attempts) <= 10


def test_connecting_before_the_server_has_started(context: BrowserContext, server: PageServer) -> None:
    context.route("**/v1/models", lambda route: route.abort())
    page = context.new_page()
    page.goto(server.address)
    expect(page.get_by_role("status")).to_contain_text("trying again")
    expect(page.get_by_role("button", name="Play a sample")).to_be_hidden()
    for name in ("Share", "More"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    draft(page).press_sequentially(FIRST)
    context.unroute("**/v1/models")
    page.wait_for_selector(".connection[data-state=live]")
    wait_for_translation(page, offline([FIRST]))
    for name in ("Share", "More"):
        expect(page.get_by_role("button", name=name)).to_be_enabled()


def test_a_server_with_keys_is_opened_with_one(context: BrowserContext, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n", encoding="utf-8")
    with serving("--api-keys-file", str(keys)) as server:
        page = context.new_page()
        page.goto(server.address)
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Enter a key").click()
        field.fill("wrong")
        field.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("That key is not valid")
        field.fill("sesame")
        field.press("Enter")
        page.wait_for_selector(".connection[data-state=live]")
        expect(page.get_by_role("button", name="Enter a key")).to_be_hidden()
        page.reload()
        page.wait_for_selector(".connection[data-state=live]")
        draft(page).press_sequentially(FIRST)
        wait_for_translation(page, offline([FIRST]))
        assert page.evaluate(WRITTEN, 0) == offline([FIRST])
