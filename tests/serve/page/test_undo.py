"""Undoing sentences, and typing them again."""

from __future__ import annotations

from playwright.sync_api import BrowserContext, Page, expect

from .support import FIRST, SECOND, THIRD, Complaints, choose, draft, offline, open_page, serving, wait_for_translation


def test_the_last_sentence_is_undone_and_retyped(page: Page) -> None:
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    draft(page).press("Backspace")
    expect(draft(page)).to_have_value(SECOND.strip())
    expect(page.locator(".sent .text")).to_have_text(FIRST.strip())
    expect(page.get_by_role("deletion")).to_have_text(offline([SECOND]))
    draft(page).press("Control+a")
    draft(page).press_sequentially(THIRD)
    expect(page.locator(".lane .text p:not([role])")).to_have_text([offline([FIRST]), offline([THIRD])])
    expect(page.locator(".sent .text p")).to_have_text([FIRST.strip(), THIRD.strip()])


def test_editing_text_that_was_read_undoes_the_sentence(page: Page) -> None:
    draft(page).press_sequentially(f"{FIRST}felfun nolbos faltin mir")
    wait_for_translation(page, offline([FIRST, "felfun nolbos faltin "]))
    for _ in range(len("faltin mir")):
        draft(page).press("Backspace")
    expect(draft(page)).to_have_value("felfun nolbos ")
    expect(page.get_by_role("deletion")).to_have_text(offline(["felfun nolbos faltin "]))
    expect(page.locator(".ink span")).to_have_text("")
    draft(page).press_sequentially("fisfi .\n")
    expect(page.locator(".lane .text p:not([role])")).to_have_text(
        [offline([FIRST]), offline(["felfun nolbos fisfi .\n"])]
    )


def test_repeated_undo_goes_back_one_sentence_at_a_time(page: Page) -> None:
    draft(page).press_sequentially(FIRST + SECOND + THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD]))
    draft(page).press("Control+z")
    expect(draft(page)).to_have_value(THIRD.strip())
    draft(page).press("Control+z")
    expect(draft(page)).to_have_value(f"{SECOND}{THIRD.strip()}")
    expect(page.get_by_role("deletion")).to_have_text([offline([SECOND]), offline([THIRD])])
    draft(page).press("Enter")
    expect(page.locator(".lane .text p:not([role])")).to_have_text(
        [offline([FIRST]), offline([SECOND]), offline([THIRD])]
    )


def test_an_undone_sentence_stays_undone_after_a_reload(page: Page) -> None:
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    page.get_by_role("button", name="Undo the last sentence").click()
    expect(draft(page)).to_have_value(SECOND.strip())
    page.reload()
    page.wait_for_selector(".connection[data-state=live]")
    expect(draft(page)).to_have_value(SECOND.strip())
    expect(page.locator(".sent .text p")).to_have_text([FIRST.strip()])
    expect(page.get_by_role("deletion")).to_have_text(offline([SECOND]))
    choose(page, "Compare two delays")
    wait_for_translation(page, offline([FIRST], delay=5), lane=1)


def test_an_undone_sentence_is_not_exported(page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    page.get_by_role("button", name="Undo the last sentence").click()
    expect(page.get_by_role("deletion")).to_have_count(1)
    page.get_by_role("button", name="Copy: Translation").click()
    page.wait_for_selector("[data-action=copy][data-state=done]")
    assert page.evaluate("navigator.clipboard.readText()") == f"{offline([FIRST])}\n"


def test_undo_while_the_server_is_unreachable(page: Page, context: BrowserContext, complaints: Complaints) -> None:
    complaints.expected = ("ERR_INTERNET_DISCONNECTED",)
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    context.set_offline(True)
    page.wait_for_selector(".connection[data-state=lost]")
    draft(page).press("Backspace")
    draft(page).press_sequentially(THIRD[:10])
    context.set_offline(False)
    expect(draft(page)).to_have_value(f"{SECOND}{THIRD[:10]}")
    draft(page).press_sequentially(THIRD[10:])
    expect(page.locator(".lane .text p:not([role])")).to_have_text(
        [offline([FIRST]), offline([SECOND]), offline([THIRD])]
    )


def test_enter_waits_for_a_pending_undo(page: Page, context: BrowserContext, complaints: Complaints) -> None:
    complaints.expected = ("ERR_INTERNET_DISCONNECTED",)
    draft(page).press_sequentially(f"{FIRST}felfun nolbos faltin mir")
    wait_for_translation(page, offline([FIRST, "felfun nolbos faltin "]))
    context.set_offline(True)
    page.wait_for_selector(".connection[data-state=lost]")
    draft(page).press("Control+a")
    draft(page).press_sequentially(SECOND)
    context.set_offline(False)
    expect(page.locator(".lane .text p:not([role])")).to_have_text([offline([FIRST]), offline([SECOND])])
    expect(draft(page)).to_have_value("")
    choose(page, "Compare two delays")
    wait_for_translation(page, offline([FIRST, SECOND], delay=5), lane=1)


def test_undo_is_not_repeated_after_a_server_restart(context: BrowserContext) -> None:
    with serving() as server:
        page = open_page(context, server)
        draft(page).press_sequentially(FIRST + SECOND)
        wait_for_translation(page, offline([FIRST, SECOND]))
        draft(page).press("Backspace")
        expect(draft(page)).to_have_value(SECOND.strip())
        server.kill()
        page.wait_for_selector(".connection[data-state=lost]")
        draft(page).press("Control+a")
        draft(page).press_sequentially(THIRD)
        server.start()
        expect(page.locator(".lane .text p:not([role])")).to_have_text([offline([FIRST]), offline([THIRD])])
        expect(page.get_by_role("deletion")).to_have_text([offline([SECOND])])
        expect(page.locator(".sent .text p")).to_have_text([FIRST.strip(), THIRD.strip()])
        expect(draft(page)).to_have_value("")
