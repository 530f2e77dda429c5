"""Appearance and accessibility of the live page: colours, layout, keyboard, screen readers."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .support import (
    CONTRASTS,
    FIRST,
    SCHEMES,
    SECOND,
    THIRD,
    PageServer,
    choose,
    draft,
    offline,
    open_page,
    violations_in_both_schemes,
    wait_for_translation,
)


def test_dark_and_light(page: Page, context: BrowserContext, server: PageServer) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    toggle = page.locator("[data-action=theme]")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    choose(page, "Dark theme")
    expect(toggle).to_have_attribute("aria-pressed", "false")
    assert page.evaluate(background) == light
    again = open_page(context, server)
    again.emulate_media(color_scheme="dark")
    assert again.evaluate(background) == light


def test_all_text_has_contrast(page: Page) -> None:
    choose(page, "Compare two delays")
    choose(page, "Show how it works")
    draft(page).fill(FIRST + "half a")
    wait_for_translation(page, offline([FIRST, "half "], delay=5), lane=1)
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 25
        assert [text for text, ratio in contrasts if ratio < 4.5] == [], scheme


def test_nothing_is_wider_than_the_screen(page: Page) -> None:
    choose(page, "Compare two delays")
    choose(page, "Show how it works")
    for width, letter in ((320, "l"), (390, "m"), (800, "n"), (1280, "o")):
        page.set_viewport_size({"width": width, "height": 844})
        draft(page).fill(FIRST + letter * 120 + "\n")
        expect(page.locator(".path .read").last).to_have_text(letter * 120)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.body.scrollWidth") <= width


# Pairs of visible controls that overlap, with all that may be shown.
OVERLAPS = """() => {
    document.querySelector('[data-action=listen]').hidden = false;
    document.querySelector('.source').dataset.script = '';
    const controls = [...document.querySelectorAll('button, a, input, select, h1, h2, .figure, .connection, .lag')]
        .filter(control => control.checkVisibility({visibilityProperty: true}))
        .filter(control => getComputedStyle(control).clipPath === 'none');
    const boxes = controls.map(control => control.getBoundingClientRect());
    const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 1 && other.top < one.bottom - 1;
    return controls.flatMap((control, index) => controls.slice(index + 1)
        .filter((_, rest) => meet(boxes[index], boxes[index + 1 + rest]))
        .map(other => `${control.outerHTML} over ${other.outerHTML}`));
}"""


@pytest.mark.parametrize(("lanes", "widths"), [(1, (360, 1280)), (2, (390, 900, 1280))])
def test_controls_keep_apart(page: Page, lanes: int, widths: tuple[int, ...]) -> None:
    if lanes == 2:
        choose(page, "Compare two delays")
    expect(page.locator(".lane")).to_have_count(lanes)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(OVERLAPS) == [], width


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the control with this accessible name has the focus."""
    named = page.get_by_label(name, exact=True).or_(page.get_by_role("button", name=name, exact=True)).first
    for _ in range(40):
        page.keyboard.press("Tab")
        if named.evaluate("control => control === document.activeElement"):
            return
    pytest.fail(f"Tab does not reach {name}")


def test_keyboard_alone(page: Page) -> None:
    page.keyboard.type(FIRST)
    tab_to(page, "More")
    page.keyboard.press("Enter")
    tab_to(page, "Compare two delays")
    page.keyboard.press("Enter")
    tab_to(page, "Translation: faster or better")
    page.keyboard.press("ArrowRight")
    tab_to(page, "Your text")
    page.keyboard.type(SECOND)
    wait_for_translation(page, offline([FIRST, 5, SECOND], delay=3), lane=0)
    wait_for_translation(page, offline([FIRST, SECOND], delay=5), lane=1)
    for name in ("Undo the last sentence", "New", "Copy: Translation", "Save: Second translation", "Share"):
        tab_to(page, name)


def test_screen_readers_hear_whole_sentences(page: Page) -> None:
    draft(page).fill(FIRST + SECOND[:20])
    wait_for_translation(page, offline([FIRST, SECOND[:20]]))
    expect(page.locator("[role=log] p")).to_have_text([offline([FIRST])])  # announced after its last word is shown
    assert page.locator(".lane [role=region]").get_attribute("aria-live") is None


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
def test_axe_finds_nothing(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    assert violations_in_both_schemes(page) == []
    choose(page, "Compare two delays")
    choose(page, "Show how it works")
    draft(page).fill(FIRST + "half a")
    wait_for_translation(page, offline([FIRST, "half "], delay=5), lane=1)
    assert violations_in_both_schemes(page) == []
    page.get_by_role("button", name="More").click()
    assert violations_in_both_schemes(page) == []


def test_controls_have_distinct_labels(page: Page) -> None:
    choose(page, "Compare two delays")
    labels = page.evaluate("""[...document.querySelectorAll('button, a, input, select, textarea, [role=region]')]
        .filter(control => control.checkVisibility({visibilityProperty: true}))
        .map(control => control.ariaLabel || control.labels?.[0]?.textContent.trim() || control.innerText.trim())""")
    assert "" not in labels
    assert len(labels) == len({*labels})


def test_source_and_translation_are_both_visible_above_the_keyboard(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 480})
    draft(page).fill(FIRST + SECOND + THIRD[:20])
    wait_for_translation(page, offline([FIRST, SECOND, THIRD[:17]]))
    page.wait_for_timeout(100)
    for selector, parent in ((".ink span", ".sheet"), (".lane .text p:last-child span:last-child", ".translation")):
        box, around = (page.locator(name).bounding_box() for name in (selector, parent))
        assert box is not None
        assert around is not None
        assert around["height"] >= 90  # three lines
        assert around["y"] <= box["y"]
        assert box["y"] + box["height"] <= around["y"] + around["height"] <= 480
    assert page.evaluate("document.documentElement.scrollHeight") <= 480


@pytest.mark.parametrize("state", ["live", "lost"])
def test_the_header_is_one_row(page: Page, state: str) -> None:
    page.evaluate(
        """async state => {
            document.querySelector('option').textContent = 'Portuguese → Indonesian';
            const {Status} = await import('/static/status.js');
            new Status(document.querySelector('.connection')).set(0, state);
        }""",
        state,
    )
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        header = page.locator(".masthead").bounding_box()
        assert header is not None
        assert header["height"] < 70, width
        for control in page.locator(".masthead :is(h1, select:visible, .connection, nav button)").all():
            box = control.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
            assert header["y"] <= box["y"] <= box["y"] + box["height"] <= header["y"] + header["height"], width


def test_text_grows_with_the_screen(page: Page) -> None:
    sizes = []
    for width in (390, 1280, 1920, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        sizes.append(page.evaluate("parseFloat(getComputedStyle(document.querySelector('.translation')).fontSize)"))
    assert sizes == sorted({*sizes})
    assert sizes[0] >= 20


@pytest.mark.parametrize("width", [390, 1280])
def test_controls_keep_their_places(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    places = """() => [...document.querySelectorAll('.masthead nav button, footer > button, footer input[name=delay]')]
        .map(control => ['x', 'y', 'width'].map(side => Math.round(control.getBoundingClientRect()[side])))"""
    empty = page.evaluate(places)
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST]))
    assert page.evaluate(places) == empty
    page.locator("[name=pace]").fill("1", force=True)  # it is still playing when a busy browser is asked
    choose(page, "Play a sample")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    assert page.evaluate(places) == empty
