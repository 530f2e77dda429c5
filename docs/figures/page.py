"""Take docs/figures/page.png: the page while it translates the sample of the demonstration.

simulmt serve --model en-zh --model de-en & python docs/figures/page.py
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PAGE = "http://127.0.0.1:8000"
COLOURS = 128
HAS_COME_FAR = """() => document.querySelectorAll('.sent p').length >= 4
    && document.querySelector('.ink span').textContent.trim().split(' ').length >= 7"""


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        page.goto(PAGE)
        page.locator(".connection[data-state=live]").wait_for()
        page.locator(".welcome button").click()
        page.wait_for_function(HAS_COME_FAR, timeout=120_000)
        page.wait_for_timeout(250)  # the last words have settled
        picture = page.screenshot()
        browser.close()
    image = (
        Image.open(io.BytesIO(picture))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    image.save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
