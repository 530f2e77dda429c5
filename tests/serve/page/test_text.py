"""Editing text, undoing it, and keeping it across a reload."""

from __future__ import annotations

from playwright.sync_api import BrowserContext, Page, Route, expect

from .support import (
    FIRST,
    SECOND,
    THIRD,
    WRITTEN,
    PageServer,
    choose,
    draft,
    frames_sent,
    offline,
    open_page,
    wait_for_translation,
)


def reload(page: Page) -> None:
    """Load the page again, and wait until it is connected."""
    page.reload()
    page.wait_for_selector(".connection[data-state=live]")


def test_a_reload_loses_nothing(page: Page) -> None:
    page.get_by_role("slider", name="Translation: faster or better").press("End")
    draft(page).press_sequentially(FIRST + "felfun nolbos fal")
    wait_for_translation(page, offline([5, FIRST, "felfun nolbos "]))
    reload(page)
    wait_for_translation(page, offline([5, FIRST, "felfun nolbos "]))
    expect(page.locator(".sent .text")).to_have_text(FIRST.strip())
    expect(draft(page)).to_have_value("felfun nolbos fal")
    expect(page.locator(".ink span")).to_have_text("felfun nolbos")
    expect(page.locator(".delay b")).to_have_text("1.0 s")
    expect(draft(page)).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.type("tin mirgus fisfi kallil .\n")
    wait_for_translation(page, offline([5, FIRST, SECOND]))


def test_a_reload_resumes_the_session(context: BrowserContext, server: PageServer) -> None:
    page = open_page(context, server)
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    resumed = frames_sent(page, "resume")
    started = frames_sent(page, "start")
    reload(page)
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    assert resumed
    assert not started


def test_a_closed_tab_loses_nothing(page: Page, context: BrowserContext, server: PageServer) -> None:
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.close(run_before_unload=True)
    page.wait_for_event("close") if not page.is_closed() else None
    again = open_page(context, server)
    wait_for_translation(again, offline([FIRST]))


def test_two_tabs_have_a_text_each(page: Page, context: BrowserContext, server: PageServer) -> None:
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.wait_for_function("() => Object.values(localStorage).some(entry => entry.includes('Korsar'))")
    other = open_page(context, server)
    assert other.evaluate(WRITTEN, 0) == ""
    draft(other).press_sequentially(SECOND)
    wait_for_translation(other, offline([SECOND]))
    reload(page)
    wait_for_translation(page, offline([FIRST]))
    reload(other)
    wait_for_translation(other, offline([SECOND]))


def test_a_duplicated_tab_has_a_copy_of_its_own(page: Page, context: BrowserContext) -> None:
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.wait_for_function("() => Object.values(localStorage).some(entry => entry.includes('Korsar'))")
    with context.expect_page() as opened:
        page.evaluate("void window.open(location.href)")  # takes the session storage along
    copy = opened.value
    copy.wait_for_selector(".connection[data-state=live]")
    wait_for_translation(copy, offline([FIRST]))
    draft(copy).press_sequentially(SECOND)
    draft(page).press_sequentially(THIRD)
    wait_for_translation(copy, offline([FIRST, SECOND]))
    wait_for_translation(page, offline([FIRST, THIRD]))


def test_a_browser_that_keeps_nothing_still_translates(context: BrowserContext, server: PageServer) -> None:
    context.add_init_script("""for (const name of ['localStorage', 'sessionStorage'])
        Object.defineProperty(window, name, {get() { throw new DOMException('no', 'SecurityError'); }});""")
    page = open_page(context, server)
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))


def test_a_paused_text_can_be_edited(page: Page) -> None:
    page.get_by_role("button", name="Play a sample").click()
    page.get_by_role("button", name="Pause").click()
    read = page.locator(".ink span").inner_text()
    draft(page).press("Control+End")
    draft(page).press_sequentially(" gul ")
    draft(page).press("Enter")
    draft(page).press_sequentially("gul mivan ")
    page.wait_for_timeout(1_200)
    assert page.locator(".ink span").inner_text() == read
    expect(page.locator(".sent .text")).to_have_text("")


def test_a_change_within_the_draft_sends_nothing(page: Page) -> None:
    draft(page).press_sequentially("gulmivan")
    for _ in range(5):
        draft(page).press("ArrowLeft")
    draft(page).press_sequentially(" ")
    page.wait_for_timeout(1_200)
    expect(page.locator(".ink span")).to_have_text("")
    draft(page).press("Enter")
    wait_for_translation(page, offline(["gul mivan\n"]))


def test_the_last_word_is_sent_by_a_button(page: Page) -> None:
    button = page.get_by_role("button", name="Translate")
    expect(button).to_be_hidden()
    draft(page).press_sequentially("gul mivan")
    button.click()
    wait_for_translation(page, offline(["gul mivan\n"]))
    expect(button).to_be_hidden()
    expect(draft(page)).to_be_focused()
    page.get_by_role("button", name="Undo the last sentence").click()
    expect(draft(page)).to_have_value("gul mivan")
    button.click()
    expect(page.locator(".lane .text p:not([role])")).to_have_text([offline(["gul mivan\n"])])


def test_undo_and_redo_of_unsent_text(page: Page) -> None:
    draft(page).press_sequentially("gul")
    draft(page).press("Control+a")
    draft(page).press_sequentially("mivan")
    draft(page).press("Control+z")
    expect(draft(page)).to_have_value("gul")
    draft(page).press("Control+z")
    expect(draft(page)).to_have_value("")
    draft(page).press("Control+Shift+z")
    draft(page).press("Control+y")
    expect(draft(page)).to_have_value("mivan")


def test_another_source_language_asks_first(context: BrowserContext, server: PageServer) -> None:
    common = {"kind": "ctc", "delays": [1, 3, 5], "default_delay": 3}
    models = [
        {"name": "toy", "source": "synthetic", "target": "synthetic", **common},
        {"name": "other", "source": "de", "target": "en", **common},
    ]
    context.route("**/v1/models", lambda route: route.fulfill(json={"models": models}))
    page = open_page(context, server)
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    picker = page.get_by_label("Languages")
    picker.select_option("other")
    page.get_by_role("button", name="Keep this text").click()
    expect(picker).to_have_value("toy")
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    picker.select_option("other")
    page.get_by_role("button", name="Clear it").click()
    wait_for_translation(page, "")
    expect(picker).to_have_value("other")


def test_a_second_lane_gets_the_text_so_far(page: Page) -> None:
    draft(page).fill(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    reload(page)
    choose(page, "Compare two delays")
    wait_for_translation(page, offline([FIRST, SECOND], delay=5), lane=1)
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD]))


def test_hours_of_text_fit_into_the_browser(page: Page) -> None:
    size = page.evaluate("""async () => {
        const {Lane} = await import('/static/lane.js');
        const places = {text: document.createElement('div'), details: document.createElement('div')};
        const model = {name: 'toy', source: 'de', target: 'en', delays: [], default_delay: null};
        const words = Array.from({length: 54000}, (_, index) => ({type: 'source', text: `word${index % 1000} `}));
        const written = words.map((_, index) => [` word${index % 1000}`, index * 0.4, 0, index >> 4, index]);
        const saved = Lane.fresh({model: 'toy', delay: null}, words);
        const lane = new Lane(places, model, 'long', {...saved, written}, null, {state() {}});
        const size = JSON.stringify(lane.saved).length;
        lane.close();
        return size;
    }""")
    assert size < 3_000_000


def test_text_typed_before_the_server_is_ready(page: Page, context: BrowserContext) -> None:
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    held: list[Route] = []
    context.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    expect(page.locator(".sent .text")).to_have_text(FIRST.strip())
    draft(page).press_sequentially(SECOND)
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    wait_for_translation(page, offline([FIRST, SECOND]))


def test_an_empty_page_leaves_nothing_behind(page: Page, context: BrowserContext, server: PageServer) -> None:
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.goto("about:blank")
    other = open_page(context, server)
    wait_for_translation(other, offline([FIRST]))
    other.get_by_role("button", name="New", exact=True).click()
    other.get_by_role("button", name="Clear it").click()
    wait_for_translation(other, "")
    other.goto(f"{server.address}/captions")
    assert other.evaluate("Object.keys(localStorage).filter(key => key.startsWith('simulmt.text.'))") == []
