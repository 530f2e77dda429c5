"""The live page, in a real browser, against a real server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from simulmt.text import split_words

from .page_support import (
    CONTRASTS,
    WATCH,
    WRITTEN,
    Complaints,
    PageServer,
    browsing,
    draft,
    offline,
    open_page,
    serving,
    subtitles,
    wait_for_translation,
)

FIRST = "gul mivan kovan du don Korsar .\n"
SECOND = "felfun nolbos faltin mirgus fisfi kallil .\n"
THIRD = "dis malkor fomin las rolki .\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[PageServer]:  # noqa: ARG001 - no server where there is no browser
    with serving() as server:
        yield server


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.set_default_timeout(10_000)
    yield context
    context.close()


@pytest.fixture
def complaints(context: BrowserContext, server: PageServer) -> Iterator[Complaints]:
    complaints = Complaints(context, server.address)
    yield complaints
    assert complaints.found == []


@pytest.fixture
def page(context: BrowserContext, server: PageServer, complaints: Complaints) -> Page:  # noqa: ARG001
    return open_page(context, server)


def frames_sent(page: Page, kind: str) -> list[str]:
    """Fills, from now on, with the messages of a kind that the page sends."""
    frames: list[str] = []

    def note(payload: str | bytes) -> None:
        if f'"type":"{kind}"' in str(payload):
            frames.append(str(payload))

    page.on("websocket", lambda socket: socket.on("framesent", note))
    return frames


def test_a_typed_word_is_sent_when_it_is_complete(page: Page) -> None:
    draft(page).press_sequentially("gul miva")
    expect(page.locator(".sent .text")).to_have_text("gul")
    expect(draft(page)).to_have_value("miva")
    draft(page).press_sequentially("n kovan du don Korsar .\n")
    expect(page.locator(".sent .text")).to_have_text(FIRST.strip())
    expect(draft(page)).to_have_value("")
    wait_for_translation(page, offline([FIRST]))


def test_the_translation_only_grows(page: Page) -> None:
    page.evaluate(WATCH)
    draft(page).press_sequentially(FIRST + SECOND + THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD]))
    assert page.locator(".lane .text p").count() == 3
    assert page.evaluate("window.violations") == []


def test_the_watch_sees_a_change(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.evaluate(WATCH)
    page.evaluate("document.querySelector('.lane .text span').textContent = 'other'")
    page.wait_for_function("() => window.violations.length > 0")


def test_the_delay_slider_acts_at_once(page: Page) -> None:
    slider = page.get_by_role("slider", name="Delay")
    assert slider.get_attribute("aria-valuetext") == "delay 3"
    draft(page).press_sequentially(FIRST)
    slider.press("End")
    expect(page.locator(".delay .figure")).to_have_text("5")
    draft(page).press_sequentially(SECOND)
    slider.press("Home")
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, 5, SECOND, 1, THIRD]))
    assert offline([FIRST, 5, SECOND, 1, THIRD]) != offline([FIRST, SECOND, THIRD])


def test_pasted_text_is_played_at_the_pace(page: Page) -> None:
    page.get_by_role("slider", name="Speaking pace").fill("1")
    page.evaluate(
        """text => {
        const draft = document.querySelector('textarea');
        draft.value = text;
        draft.dispatchEvent(new InputEvent('input', {inputType: 'insertFromPaste', bubbles: true}));
    }""",
        FIRST + SECOND.strip(),
    )
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator(".sent .text")).to_have_text("gul")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    assert str(draft(page).input_value()).endswith(SECOND.strip())
    page.get_by_role("slider", name="Speaking pace").fill("10")
    page.get_by_role("button", name="Play").click()
    expect(draft(page)).to_have_value("")
    wait_for_translation(page, offline([FIRST, SECOND]))
    expect(page.get_by_role("button", name="Play")).to_be_disabled()


def test_the_sample_can_be_sent_without_waiting(page: Page) -> None:
    page.get_by_role("button", name="Sample").click()
    page.get_by_role("button", name="Send all").click()
    expect(draft(page)).to_have_value("")
    sentences = page.locator(".sent .text p").all_inner_texts()
    assert len(sentences) == 5
    wait_for_translation(page, offline([f"{sentence.strip()}\n" for sentence in sentences]))


def test_a_long_text_goes_out_in_parts(context: BrowserContext, server: PageServer) -> None:
    page = context.new_page()
    frames = frames_sent(page, "source")
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    text = " ".join(FIRST.split() * 700) + " "
    draft(page).fill(text)
    page.wait_for_selector(".lane .text span")
    parts = [json.loads(frame)["text"] for frame in frames]
    assert "".join(parts) == text
    assert all(part.endswith(" ") and len(part) <= 2_000 for part in parts)


def test_the_reader_stays_at_the_end_unless_they_scroll_up(page: Page) -> None:
    distance = """() => {
        const {scrollHeight, scrollTop, clientHeight} = document.querySelector('.translation');
        return scrollHeight - scrollTop - clientHeight;
    }"""
    draft(page).fill(FIRST * 40)
    wait_for_translation(page, offline([FIRST] * 40))
    page.wait_for_function(f"() => ({distance})() < 2")
    page.locator(".translation").hover()
    page.mouse.wheel(0, -500)
    page.wait_for_function(f"() => ({distance})() > 300")
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST] * 41))
    page.wait_for_timeout(100)
    assert page.evaluate(distance) > 300
    page.mouse.wheel(0, 2_000)
    page.wait_for_function(f"() => ({distance})() < 2")
    draft(page).fill(FIRST)
    wait_for_translation(page, offline([FIRST] * 42))
    page.wait_for_function(f"() => ({distance})() < 2")


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
        page.get_by_role("slider", name="Delay").press("Home")
        draft(page).press_sequentially(FIRST + SECOND[:30])
        page.get_by_role("slider", name="Delay").press("End")
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


def test_two_delays_side_by_side(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    page.get_by_role("button", name="Compare").click()
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([FIRST, SECOND], delay=3), lane=0)
    wait_for_translation(page, offline([FIRST, SECOND], delay=5), lane=1)
    assert page.locator(".path").count() == 2
    page.get_by_role("button", name="Compare").click()
    assert page.locator(".lane").count() == 1
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD], delay=3))


def test_the_path_has_every_word_in_its_place(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    assert page.locator(".path .read").all_text_contents() == FIRST.split()
    expect(page.locator(".path .written").last).to_have_text(offline([FIRST]).split()[-1])
    assert page.locator(".path .written").all_text_contents() == offline([FIRST]).split()
    across = page.evaluate(
        "[...document.querySelectorAll('.path .written')].map(word => Number(word.getAttribute('x')))"
    )
    assert across == sorted(across)
    assert across[0] > 0


def test_the_path_puts_pieces_together_and_ideographs_apart(page: Page) -> None:
    rows = page.evaluate(
        """async commits => {
            const {Path} = await import('/static/path.js');
            const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
            document.body.append(svg);
            const path = new Path(svg);
            path.read(['one', 'two', 'three']);
            for (const [text, source_words] of commits) path.write({text, source_words});
            await new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
            return [...svg.querySelectorAll('.written')].map(word => word.textContent);
        }""",
        [["Guten", 1], [" Mor", 2], ["gen , mein", 2], [" 港口", 2], ["Py", 3], ["thon", 3], ["。", 3]],
    )
    assert rows == ["Guten", "Morgen", ",", "mein", "港", "口", "Python", "。"]


def test_the_lag_is_split_by_cause(page: Page) -> None:
    expect(page.locator(".meter .total")).to_have_text("–")
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    for figure in page.locator(".meter .figure").all():
        assert re.fullmatch(r"\d+ ms|\d+\.\d s", figure.inner_text())


def test_downloads(page: Page, tmp_path: Path) -> None:
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    files = {}
    for kind in ("txt", "srt", "vtt"):
        with page.expect_download() as download:
            page.locator(f"[data-download={kind}]").click()
        assert download.value.suggested_filename == f"simulmt-toy.{kind}"
        download.value.save_as(tmp_path / kind)
        files[kind] = (tmp_path / kind).read_text(encoding="utf-8")
    assert files["txt"] == f"{offline([FIRST])}\n{offline([SECOND])}\n"
    stamp = r"\d\d:\d\d:\d\d[,.]\d{3}"
    assert re.match(rf"1\n{stamp} --> {stamp}\n\S.*\n", files["srt"])
    assert re.match(rf"WEBVTT\n\n{stamp} --> {stamp}\n\S.*\n", files["vtt"])
    spoken = " ".join(line for line in files["vtt"].splitlines()[1:] if line and "-->" not in line)
    assert spoken == f"{offline([FIRST])} {offline([SECOND])}"


def test_subtitles_are_those_of_the_command_line(page: Page) -> None:
    draw = random.Random(7)
    vocabulary = [" one", " harbour", "ing", " two", ",", " lighthouse-keeper", "港", "口", "。", " <b>&"]
    for _ in range(20):
        clock = 0.0
        commits = []
        for _ in range(draw.randrange(1, 60)):
            clock += draw.choice([0.0, 0.2, 1.1, 8.0])
            text = draw.choice(vocabulary)
            commits.append({"text": text, "seconds": clock, "endsSentence": draw.random() < 0.1})
        for kind in ("srt", "vtt"):
            made = page.evaluate(
                "async ([kind, commits]) => (await import('/static/subtitles.js'))[kind](commits)", [kind, commits]
            )
            assert made == subtitles(kind, commits)


def test_words_are_those_of_the_server(page: Page) -> None:
    draw = random.Random(11)
    alphabet = "ab é.,!\n\t 港口。ー！" + "\U00020000\u3000\u00a0"
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(300)] + ["x" * 300]
    made = page.evaluate("async texts => texts.map((await import('/static/words.js')).splitWords)", texts)
    assert made == [split_words(text) for text in texts]


def test_a_long_run_without_spaces_is_no_burden(page: Page) -> None:
    length = page.evaluate("async () => (await import('/static/words.js')).completeLength('go ' + 'x'.repeat(200000))")
    assert length == len("go ")


def test_copy(page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == f"{offline([FIRST])}\n"


def test_new_asks_before_it_clears(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.get_by_role("button", name="New").click()
    wait_for_translation(page, offline([FIRST]))
    page.get_by_role("button", name="Clear all?").click()
    wait_for_translation(page, "")
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([SECOND]))
    expect(page.locator(".sent .text")).to_have_text(SECOND.strip())


def test_dark_and_light(page: Page, context: BrowserContext, server: PageServer) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    toggle = page.get_by_role("button", name="Dark theme")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "false")
    assert page.evaluate(background) == light
    again = open_page(context, server)
    again.emulate_media(color_scheme="dark")
    assert again.evaluate(background) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.get_by_role("button", name="Compare").click()
    draft(page).press_sequentially(FIRST + "half a")
    wait_for_translation(page, offline([FIRST, "half "], delay=5), lane=1)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert [text for text, ratio in contrasts if ratio < 4.5] == []


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.get_by_role("button", name="Compare").click()
    draft(page).press_sequentially(FIRST + "l" * 120 + "\n")
    expect(page.locator(".path .read").last).to_have_text("l" * 120)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width


@pytest.mark.parametrize(("width", "lanes"), [(360, 1), (390, 2), (900, 2), (1280, 1), (1280, 2)])
def test_controls_keep_apart(page: Page, width: int, lanes: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    if lanes == 2:
        page.get_by_role("button", name="Compare").click()
    overlaps = page.evaluate("""() => {
        document.querySelector('[data-action=listen]').hidden = false;
        const controls = [...document.querySelectorAll('button, a, input, select, h1, h2, .figure, .connection')]
            .filter(control => control.checkVisibility());
        const boxes = controls.map(control => control.getBoundingClientRect());
        const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
            && one.top < other.bottom - 1 && other.top < one.bottom - 1;
        return controls.flatMap((control, index) => controls.slice(index + 1)
            .filter((_, rest) => meet(boxes[index], boxes[index + 1 + rest]))
            .map(other => `${control.outerHTML} over ${other.outerHTML}`));
    }""")
    assert overlaps == []


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the control of an accessible name has the focus."""
    named = page.get_by_label(name, exact=True).or_(page.get_by_role("button", name=name, exact=True)).first
    for _ in range(40):
        page.keyboard.press("Tab")
        if named.evaluate("control => control === document.activeElement"):
            return
    pytest.fail(f"Tab does not reach {name}")


def test_keyboard_alone(page: Page) -> None:
    tab_to(page, "Compare")
    page.keyboard.press("Enter")
    tab_to(page, "Draft: a word is sent when the next begins, Enter ends the sentence")
    page.keyboard.type(FIRST)
    tab_to(page, "Speaking pace")
    page.keyboard.press("End")
    tab_to(page, "Delay")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".delay .figure").first).to_have_text("5")
    tab_to(page, "Sample")
    page.keyboard.press("Space")
    tab_to(page, "Send all")
    page.keyboard.press("Space")
    sample = [f"{text.strip()}\n" for text in page.locator(".sent .text p").all_inner_texts()[1:]]
    wait_for_translation(page, offline([FIRST, 5, *sample], delay=3), lane=0)
    wait_for_translation(page, offline([FIRST, *sample], delay=5), lane=1)
    for name in ("Copy", "Download as text", "Dark theme"):
        tab_to(page, name)


def test_screen_readers_hear_whole_sentences(page: Page) -> None:
    draft(page).press_sequentially(FIRST + SECOND[:20])
    wait_for_translation(page, offline([FIRST, SECOND[:20]]))
    assert page.locator("[aria-live=polite]").all_inner_texts() == [offline([FIRST])]
    assert page.locator(".lane [role=region]").get_attribute("aria-live") is None
    unnamed = page.evaluate("""[...document.querySelectorAll('button, a, input, select, textarea')].filter(control =>
        !(control.ariaLabel || control.innerText?.trim() || control.labels?.[0]?.textContent.trim())).length""")
    assert unnamed == 0


def test_captions_follow_another_tab(page: Page, context: BrowserContext, server: PageServer) -> None:
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    captions = context.new_page()
    captions.goto(f"{server.address}/captions?size=40&lines=3&color=rgb(255,200,0)")
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST])])
    draft(page).press_sequentially(SECOND)
    expect(captions.locator(".captions p")).to_have_text([offline([FIRST]), offline([SECOND])])
    style = captions.evaluate("""() => {
        const {fontSize, color, height} = getComputedStyle(document.querySelector('.captions'));
        return [fontSize, color, parseFloat(height), getComputedStyle(document.documentElement).backgroundColor];
    }""")
    assert style == ["40px", "rgb(255, 200, 0)", pytest.approx(3 * 1.3 * 40), "rgba(0, 0, 0, 0)"]


def test_bad_caption_parameters_are_ignored(context: BrowserContext, server: PageServer) -> None:
    captions = context.new_page()
    captions.goto(f"{server.address}/captions?size=huge&lines=none&color=url(x)")
    assert captions.evaluate("document.documentElement.getAttribute('style')") in (None, "")


def test_hours_of_text_leave_the_page_light(page: Page) -> None:
    counts = page.evaluate("""async () => {
        const {Transcript} = await import('/static/transcript.js');
        const scroller = document.createElement('div');
        document.body.append(scroller);
        const transcript = new Transcript(scroller);
        for (let sentence = 0; sentence < 2000; sentence += 1) {
            for (const word of ['a', ' b', ` ${sentence}`]) transcript.append(word);
            transcript.endParagraph();
        }
        await new Promise(resolve => setTimeout(resolve, 100));
        const kept = scroller.querySelectorAll('p').length;
        scroller.querySelector('button').click();
        const shown = [...scroller.querySelectorAll('p')].map(line => line.textContent);
        return [kept, shown.length, shown.at(0), shown.at(-1)];
    }""")
    kept, shown, first, last = counts
    assert kept <= 200
    assert shown > kept
    assert (first, last) == (f"a b {2000 - shown}", "a b 1999")


def test_speech_passes_on_final_results_only(context: BrowserContext, server: PageServer) -> None:
    context.add_init_script("""window.SpeechRecognition = class {
        start() { window.recognition = this; }
        stop() { this.onend?.(); }
    };""")
    page = open_page(context, server)
    assert page.get_by_role("button", name="Listen").count() == 0  # nobody speaks the invented language
    said = page.evaluate("""async () => {
        const {Microphone} = await import('/static/microphone.js');
        const [button, interim, said] = [document.createElement('button'), document.createElement('p'), []];
        const microphone = new Microphone(button, interim, text => said.push(text));
        microphone.use('de');
        button.click();
        const result = (isFinal, transcript) => Object.assign([{transcript}], {isFinal});
        recognition.onresult({resultIndex: 0, results: [result(false, 'guten')]});
        const shown = interim.textContent;
        recognition.onresult({resultIndex: 0, results: [result(true, 'Guten Tag'), result(false, 'wie')]});
        button.click();
        return [button.hidden, recognition.lang, shown, said, interim.textContent];
    }""")
    assert said == [False, "de", "guten", ["Guten Tag"], ""]


def test_a_server_with_keys_is_opened_with_one(context: BrowserContext, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n", encoding="utf-8")
    with serving("--api-keys-file", str(keys)) as server:
        page = context.new_page()
        page.goto(server.address)
        for key in ("wrong", "sesame"):
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Enter")
        page.wait_for_selector(".connection[data-state=live]")
        draft(page).press_sequentially(FIRST)
        wait_for_translation(page, offline([FIRST]))
        assert page.evaluate(WRITTEN, 0) == offline([FIRST])
