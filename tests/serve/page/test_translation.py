"""Typing, playing and translating on the live page, in a real browser, against a real server."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, expect

from simulmt.runtime.demo import SENTENCES
from simulmt.text import split_words

from .support import (
    FIRST,
    SECOND,
    THIRD,
    WATCH,
    PageServer,
    choose,
    draft,
    frames_sent,
    offline,
    subtitles,
    wait_for_translation,
)


def test_a_typed_word_is_sent_when_the_next_one_begins(page: Page) -> None:
    draft(page).press_sequentially("gul ")
    expect(page.locator(".ink span")).to_have_text("")
    draft(page).press_sequentially("miva")
    expect(page.locator(".ink span")).to_have_text("gul")
    expect(draft(page)).to_have_value("gul miva")
    draft(page).press_sequentially("n kovan du don Korsar .\n")
    expect(page.locator(".sent .text")).to_have_text(FIRST.strip())
    expect(draft(page)).to_have_value("")
    wait_for_translation(page, offline([FIRST]))


def test_a_word_is_sent_after_a_moment_of_rest(context: BrowserContext, server: PageServer) -> None:
    page = context.new_page()
    page.clock.install()
    page.goto(server.address)
    page.wait_for_selector(".connection[data-state=live]")
    draft(page).press_sequentially("gul miv")
    draft(page).press_sequentially("an ")
    page.clock.run_for(500)
    expect(page.locator(".ink span")).to_have_text("gul")
    page.clock.run_for(600)
    expect(page.locator(".ink span")).to_have_text("gul mivan")


def test_the_field_has_the_focus_from_the_start(page: Page) -> None:
    expect(draft(page)).to_be_focused()
    page.keyboard.type(FIRST)
    wait_for_translation(page, offline([FIRST]))


def test_the_hint_does_not_come_back(page: Page) -> None:
    hint = "getComputedStyle(document.querySelector('textarea'), '::placeholder').color"
    shown = page.evaluate(hint)
    draft(page).press_sequentially(FIRST)
    expect(draft(page)).to_have_value("")
    assert page.evaluate(hint) == "rgba(0, 0, 0, 0)" != shown


def test_the_translation_only_grows(page: Page) -> None:
    page.evaluate(WATCH)
    draft(page).press_sequentially(FIRST + SECOND + THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD]))
    expect(page.locator(".lane .text p")).to_have_count(3)
    assert page.evaluate("window.violations") == []


def test_the_mutation_watch_detects_a_change(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.evaluate(WATCH)
    page.evaluate("document.querySelector('.lane .text span').textContent = 'other'")
    page.wait_for_function("() => window.violations.length > 0")


def test_the_delay_slider_acts_at_once(page: Page) -> None:
    slider = page.get_by_role("slider", name="Translation: faster or better")
    assert slider.get_attribute("aria-valuetext") == "waits for at least 0.5 s of speech"
    draft(page).press_sequentially(FIRST)
    slider.press("End")
    expect(page.locator(".delay b")).to_have_text("1.0 s")
    draft(page).press_sequentially(SECOND)
    slider.press("Home")
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, 5, SECOND, 1, THIRD]))
    assert offline([FIRST, 5, SECOND, 1, THIRD]) != offline([FIRST, SECOND, THIRD])


def test_pasted_text_is_played_at_the_pace(page: Page) -> None:
    page.locator("[name=pace]").fill("1", force=True)
    page.evaluate(
        """text => {
        const draft = document.querySelector('textarea');
        draft.value = text;
        draft.dispatchEvent(new InputEvent('input', {inputType: 'insertFromPaste', bubbles: true}));
    }""",
        FIRST + SECOND.strip(),
    )
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator(".ink span")).to_have_text("gul")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    assert str(draft(page).input_value()).endswith(SECOND.strip())
    page.get_by_role("slider", name="Speaking pace").fill("10")
    page.get_by_role("button", name="Play", exact=True).click()
    expect(draft(page)).to_have_value("")
    wait_for_translation(page, offline([FIRST, SECOND]))
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_hidden()


def test_the_sample_can_be_sent_without_waiting(page: Page) -> None:
    page.get_by_role("button", name="Play a sample").click()
    page.get_by_role("button", name="Skip to the end").click()
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
    page.wait_for_timeout(1_500)
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


def test_two_delays_side_by_side(page: Page) -> None:
    draft(page).press_sequentially(FIRST)
    choose(page, "Compare two delays")
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([FIRST, SECOND], delay=3), lane=0)
    wait_for_translation(page, offline([FIRST, SECOND], delay=5), lane=1)
    expect(page.locator(".path")).to_have_count(2)
    choose(page, "Compare two delays")
    expect(page.locator(".lane")).to_have_count(1)
    draft(page).press_sequentially(THIRD)
    wait_for_translation(page, offline([FIRST, SECOND, THIRD], delay=3))


def test_the_path_has_every_word_in_its_place(page: Page) -> None:
    choose(page, "Show how it works")
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    expect(page.locator(".path .read")).to_have_text(FIRST.split())
    expect(page.locator(".path .written")).to_have_text(offline([FIRST]).split())
    across = page.evaluate(
        "[...document.querySelectorAll('.path .written')].map(word => Number(word.getAttribute('x')))"
    )
    assert across == sorted(across)
    assert across[0] > 0


def test_the_path_puts_pieces_together_and_ideographs_apart(scripts: Page) -> None:
    rows = scripts.evaluate(
        """async commits => {
            const {Path} = await import('/static/path.js');
            const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
            document.body.append(svg);
            const path = new Path(svg);
            path.read(['one', 'two', 'three']);
            for (const [text, words] of commits) path.write({text, words});
            await new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
            return [...svg.querySelectorAll('.written')].map(word => word.textContent);
        }""",
        [["Guten", 1], [" Mor", 2], ["gen , mein", 2], [" 港口", 2], ["Py", 3], ["thon", 3], ["。", 3]],
    )
    assert rows == ["Guten", "Morgen", ",", "mein", "港", "口", "Python", "。"]


def test_the_lag_is_split_by_cause(page: Page) -> None:
    expect(page.locator(".lag")).to_have_text("")
    choose(page, "Show how it works")
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    expect(page.locator(".lag")).to_have_text(re.compile(r"^\d+\.\d s behind$"))
    expect(page.locator(".meter .figure")).to_have_text([re.compile(r"^(\d+ ms|\d+\.\d s)$")] * 3)


def test_how_it_works_is_shown_on_demand(page: Page) -> None:
    expect(page.locator(".path")).to_be_hidden()
    choose(page, "Show how it works")
    expect(page.locator(".path")).to_be_visible()
    choose(page, "Show how it works")
    expect(page.locator(".path")).to_be_hidden()


def test_downloads(page: Page, tmp_path: Path) -> None:
    draft(page).press_sequentially(FIRST + SECOND)
    wait_for_translation(page, offline([FIRST, SECOND]))
    files = {}
    for kind in ("txt", "srt", "vtt"):
        with page.expect_download() as download:
            page.get_by_role("button", name="Save: Translation").click()
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


def test_subtitles_are_those_of_the_command_line(scripts: Page) -> None:
    draw = random.Random(7)
    vocabulary = [" one", " harbour", "ing", " two", ",", " lighthouse-keeper", "港", "口", "。", " <b>&"]
    vocabulary += ["的", "了解", "，", "《", " (", "12", " 3", " km", "公里"]
    for _ in range(20):
        clock = 0.0
        commits = []
        for _ in range(draw.randrange(1, 60)):
            clock += draw.choice([0.0, 0.2, 1.1, 8.0])
            text = draw.choice(vocabulary)
            commits.append({"text": text, "seconds": clock, "endsSentence": draw.random() < 0.1})
        for kind in ("srt", "vtt"):
            made = scripts.evaluate(
                "async ([kind, commits]) => (await import('/static/subtitles.js'))[kind](commits)", [kind, commits]
            )
            assert made == subtitles(kind, commits)


def test_words_are_those_of_the_server(scripts: Page) -> None:
    draw = random.Random(11)
    alphabet = "ab é.,!\n\t 港口。ー！" + "\U00020000\u3000\u00a0"
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(300)] + ["x" * 300]
    made = scripts.evaluate("async texts => texts.map((await import('/static/words.js')).splitWords)", texts)
    assert made == [split_words(text) for text in texts]


def test_a_long_run_without_spaces_is_no_burden(scripts: Page) -> None:
    length = scripts.evaluate(
        "async () => (await import('/static/words.js')).completeLength('go ' + 'x'.repeat(200000))"
    )
    assert length == len("go ")


def test_copy(page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name in ("Copy: Translation", "Save: Translation"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([FIRST]))
    page.get_by_role("button", name="Copy: Translation").click()
    page.wait_for_selector("[data-action=copy][data-state=done]")
    assert page.evaluate("navigator.clipboard.readText()") == f"{offline([FIRST])}\n"


def test_new_asks_before_it_clears_and_keeps_the_delay(page: Page) -> None:
    expect(page.get_by_role("button", name="New", exact=True)).to_be_disabled()
    page.get_by_role("slider", name="Translation: faster or better").press("End")
    draft(page).press_sequentially(FIRST)
    wait_for_translation(page, offline([5, FIRST]))
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_role("button", name="Keep this text").click()
    wait_for_translation(page, offline([5, FIRST]))
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_role("button", name="Clear it").click()
    wait_for_translation(page, "")
    expect(page.locator(".delay b")).to_have_text("1.0 s")
    expect(draft(page)).to_be_focused()
    draft(page).press_sequentially(SECOND)
    wait_for_translation(page, offline([SECOND], delay=5))
    expect(page.locator(".sent .text")).to_have_text(SECOND.strip())


def test_hours_of_text_leave_the_page_light(scripts: Page) -> None:
    counts = scripts.evaluate("""async () => {
        const {Transcript} = await import('/static/transcript.js');
        const scroller = document.createElement('div');
        document.body.append(scroller);
        const transcript = new Transcript(scroller);
        for (let sentence = 0; sentence < 2000; sentence += 1) {
            for (const word of ['a', ' b', ` ${sentence}`]) transcript.append(word, sentence);
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


def test_the_samples_are_those_of_the_demonstration(scripts: Page) -> None:
    played = scripts.evaluate(
        """async languages => {
        const {sampleFor} = await import('/static/samples.js');
        return Object.fromEntries(languages.map(language => [language, sampleFor(language).split('\\n')]));
    }""",
        [*SENTENCES],
    )
    assert played == {language: [*sentences] for language, sentences in SENTENCES.items()}
