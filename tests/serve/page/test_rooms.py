"""Rooms: the captions page, sharing, and QR codes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import qrcode  # type: ignore[import-untyped]
from playwright.sync_api import BrowserContext, Page, expect
from qrcode.util import MODE_8BIT_BYTE, QRData  # type: ignore[import-untyped]

from .support import (
    FIRST,
    SECOND,
    THIRD,
    Complaints,
    PageServer,
    draft,
    frames_sent,
    offline,
    open_page,
    serving,
    violations_in_both_schemes,
    wait_for_translation,
)

TRANSPARENT = "rgba(0, 0, 0, 0)"


def share(page: Page, room: str) -> None:
    """Open a room from the live page."""
    page.get_by_role("button", name="Share").click()
    page.get_by_label("Room").fill(room)
    page.get_by_label("Room").press("Tab")
    page.get_by_role("button", name="Done").click()
    page.wait_for_selector(".connection[data-state=live]")


def open_captions(context: BrowserContext, server: PageServer, room: str) -> Page:
    """Open the captions page of a room."""
    captions = context.new_page()
    captions.goto(f"{server.address}/captions/{room}")
    return captions


def test_an_audience_reads_along(page: Page, context: BrowserContext, server: PageServer) -> None:
    captions = open_captions(context, server, "hall-1")
    expect(captions.get_by_role("status")).to_have_text("Waiting for the speaker…")
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    share(page, "Hall 1")
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    draft(page).fill(SECOND)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST]), offline([SECOND]).strip()])
    expect(captions.get_by_role("status")).to_have_text("Live")
    wait_for_translation(page, offline([FIRST, SECOND]))
    expect(captions.locator("[role=log] p")).to_have_text([offline([FIRST]), offline([SECOND])])
    late = open_captions(context, server, "hall-1")
    expect(late.locator(".captions p")).to_have_text([offline([FIRST]), offline([SECOND]).strip()])


def test_viewers_see_an_undone_sentence_struck_through(page: Page, context: BrowserContext, server: PageServer) -> None:
    share(page, "taken-back")
    captions = open_captions(context, server, "taken-back")
    draft(page).fill(FIRST + SECOND)
    expect(captions.locator(".captions p")).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(captions.get_by_role("deletion")).to_have_text(offline([SECOND]))
    expect(draft(page)).to_have_value(re.compile(SECOND.strip()))
    draft(page).fill(THIRD)
    expect(captions.locator(".captions p:not([role])")).to_have_text([offline([FIRST]), offline([THIRD])])


def test_an_audience_whose_network_was_away(
    page: Page, context: BrowserContext, server: PageServer, complaints: Complaints
) -> None:
    complaints.expected = ("ERR_INTERNET_DISCONNECTED",)
    share(page, "away")
    captions = open_captions(context, server, "away")
    expect(captions.get_by_role("status")).to_have_text("Live")
    context.set_offline(True)
    expect(captions.get_by_role("status")).to_have_text("Connection lost, trying again…")
    context.set_offline(False)
    draft(page).fill(FIRST)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    expect(captions.get_by_role("status")).to_have_text("Live")


def test_a_page_without_captions_says_why(page: Page, context: BrowserContext, server: PageServer) -> None:
    note = "getComputedStyle(document.querySelector('.captions'), '::after').content"
    captions = open_captions(context, server, "note")
    expect(captions.get_by_role("status")).to_have_text("Waiting for the speaker…")
    assert "as soon as somebody speaks" in captions.evaluate(note)
    share(page, "note")
    draft(page).fill(FIRST)
    expect(captions.locator(".captions p")).to_have_count(1)
    assert captions.evaluate(note) == "none"


def test_the_audience_stays_when_the_page_is_reloaded(page: Page, context: BrowserContext, server: PageServer) -> None:
    share(page, "reload")
    captions = open_captions(context, server, "reload")
    draft(page).fill(FIRST)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    page.reload()
    page.wait_for_selector(".connection[data-state=live]")
    draft(page).fill(SECOND)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST]), offline([SECOND])])
    expect(page.get_by_role("button", name="Share")).to_have_attribute("aria-pressed", "true")


def test_a_room_that_somebody_else_has(
    page: Page, context: BrowserContext, server: PageServer, complaints: Complaints
) -> None:
    complaints.expected = ("room",)
    share(page, "taken")
    draft(page).fill(FIRST)
    other = open_page(context, server)
    other.get_by_role("button", name="Share").click()
    other.get_by_label("Room").fill("taken")
    other.get_by_label("Room").press("Tab")
    expect(other.get_by_role("dialog")).to_contain_text("Choose another name")
    other.get_by_label("Room").fill("free")
    other.get_by_label("Room").press("Tab")
    expect(other.locator(".link")).to_have_text(re.compile("captions/free$"))
    other.get_by_role("button", name="Done").click()
    other.wait_for_selector(".connection[data-state=live]")


def test_sharing_can_be_stopped(page: Page, context: BrowserContext, server: PageServer) -> None:
    share(page, "short")
    draft(page).fill(FIRST)
    captions = open_captions(context, server, "short")
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    page.get_by_role("button", name="Share").click()
    page.get_by_role("button", name="Stop sharing").click()
    expect(captions.get_by_role("status")).to_have_text("The speaker has finished.")
    draft(page).fill(SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])


def test_a_new_text_is_for_the_same_audience(page: Page, context: BrowserContext, server: PageServer) -> None:
    share(page, "twice")
    captions = open_captions(context, server, "twice")
    draft(page).fill(FIRST)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_role("button", name="Clear it").click()
    wait_for_translation(page, "")
    draft(page).fill(SECOND)
    expect(captions.locator(".captions p")).to_have_text([offline([SECOND])])
    expect(captions.get_by_role("status")).to_have_text("Live")


def test_other_languages_for_the_same_audience(context: BrowserContext, server: PageServer) -> None:
    common = {"kind": "ctc", "source": "synthetic", "target": "synthetic", "delays": [1, 3, 5], "default_delay": 3}
    models = [{"name": name, **common} for name in ("toy", "again")]
    context.route("**/v1/models", lambda route: route.fulfill(json={"models": models}))
    page = context.new_page()
    frames = frames_sent(page, "start")
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    share(page, "other")
    page.get_by_label("Languages").select_option("again")
    page.wait_for_selector(".connection[data-state=failed]")  # the server has no such model
    shared = [start for start in map(json.loads, frames) if start.get("room") == "other"]
    assert len({start["room_key"] for start in shared}) == len(shared) == 2


def test_the_code_leads_to_the_room(page: Page, server: PageServer) -> None:
    share(page, "hall-2")
    page.get_by_role("button", name="Share").click()
    address = f"{server.address}/captions/hall-2"
    expect(page.locator(".link")).to_have_attribute("href", address)
    expect(page.get_by_role("img", name=f"QR code of {address}")).to_be_visible()
    expect(page.locator(".warning")).to_contain_text("This address works only on this computer")


def reference(text: str, mask: int) -> list[list[bool]]:
    """Return the QR code of a reference encoder."""
    code = qrcode.QRCode(error_correction=qrcode.ERROR_CORRECT_M, border=0, mask_pattern=mask)
    code.add_data(QRData(text.encode(), mode=MODE_8BIT_BYTE))
    code.make(fit=True)
    return [[bool(module) for module in row] for row in code.modules]


def test_qr_codes_are_those_of_another_encoder(scripts: Page) -> None:
    draw = random.Random(3)
    lengths = [1, 14, 15, 26, 27, 42, 62, 84, 106, 122, 123, 152, 180, 181, 213]  # up to and beyond each version's
    texts = ["".join(draw.choices("abcxyz/:?-äß語", k=length))[:length] for length in lengths]
    cases = [
        (text.encode()[:length].decode(errors="ignore"), draw.randrange(8))
        for text, length in zip(texts, lengths, strict=True)
    ]
    made = scripts.evaluate(
        """async cases => {
            const {qrCode} = await import('/static/qr.js');
            return cases.map(([text, mask]) => [qrCode(text, mask), qrCode(text)]);
        }""",
        cases,
    )
    for (text, mask), (masked, best) in zip(cases, made, strict=True):
        assert masked == reference(text, mask)
        assert best in [reference(text, other) for other in range(8)]


def test_a_text_too_long_for_a_qr_code(scripts: Page) -> None:
    with pytest.raises(Exception, match="214 bytes are too many for a QR code"):
        scripts.evaluate("async () => (await import('/static/qr.js')).qrCode('x'.repeat(214))")


def test_axe_finds_nothing(page: Page, context: BrowserContext, server: PageServer) -> None:
    captions = open_captions(context, server, "axe")
    share(page, "axe")
    draft(page).fill(FIRST + SECOND)
    expect(captions.locator(".captions p")).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(captions.get_by_role("deletion")).to_have_count(1)
    page.get_by_role("button", name="Share").click()
    for tab in (page, captions):
        assert violations_in_both_schemes(tab) == []


def test_an_overlay_for_a_video(page: Page, context: BrowserContext, server: PageServer) -> None:
    share(page, "video")
    draft(page).fill(FIRST)
    overlay = context.new_page()
    overlay.emulate_media(color_scheme="dark")
    overlay.goto(f"{server.address}/captions/video?overlay&size=40&lines=3&color=rgb(255,200,0)")
    expect(overlay.locator(".captions p")).to_have_text([offline([FIRST])])
    expect(overlay.get_by_role("status")).to_be_hidden()
    style = overlay.evaluate("""() => {
        const {fontSize, color, height} = getComputedStyle(document.querySelector('.captions'));
        const behind = [document.documentElement, document.body].map(part => getComputedStyle(part).backgroundColor);
        return [fontSize, color, parseFloat(height), ...behind];
    }""")
    assert style == ["40px", "rgb(255, 200, 0)", pytest.approx(3 * 1.3 * 40), TRANSPARENT, TRANSPARENT]


def test_bad_overlay_parameters_are_ignored(context: BrowserContext, server: PageServer) -> None:
    overlay = context.new_page()
    overlay.goto(f"{server.address}/captions/room?size=huge&lines=none&color=url(x)")
    assert overlay.evaluate("document.documentElement.getAttribute('style')") in (None, "")


def test_captions_without_a_room_ask_for_one(context: BrowserContext, server: PageServer) -> None:
    captions = context.new_page()
    captions.goto(f"{server.address}/captions")
    captions.get_by_label("Room").fill("Hall 1")
    captions.get_by_role("button", name="Read along").click()
    captions.wait_for_url("**/captions/hall-1")


def test_viewers_with_keys(context: BrowserContext, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n", encoding="utf-8")
    limits = ("--limit", "opening_seconds=1")
    with serving("--api-keys-file", str(keys), "--room-keys", *limits) as server:
        captions = open_captions(context, server, "hall")
        for key in ("wrong", "sesame"):
            captions.get_by_label("Key").fill(key)
            captions.get_by_label("Key").press("Enter")
        expect(captions.get_by_role("status")).to_have_text("Waiting for the speaker…")


def test_the_text_size_is_kept(context: BrowserContext, server: PageServer) -> None:
    size = "parseFloat(getComputedStyle(document.querySelector('.captions')).fontSize)"
    captions = open_captions(context, server, "sizes")
    before = captions.evaluate(size)
    captions.get_by_role("button", name="Larger text").click()
    larger = captions.evaluate(size)
    captions.reload()
    assert captions.evaluate(size) == larger > before
