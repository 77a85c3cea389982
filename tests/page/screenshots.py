"""Pictures of a running page for docs/screenshots/: `python -m tests.page.screenshots http://127.0.0.1:7860`."""

from __future__ import annotations

import shutil
import sys

from playwright.sync_api import sync_playwright

from tests.conftest import ROOT
from tests.page.conftest import FLAGS

OUT = ROOT / "docs" / "screenshots"
LONG = (
    "The harbor was quiet when we left. By 6:30 the wind had turned, and the boat was flying over the waves. "
    "Nobody spoke for a while; there was too much to look at. "
) * 5
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def main(url: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                page = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
                ).new_page()
                page.goto(url)
                page.wait_for_function("document.querySelector('#preview') && window.chorus !== undefined")
                page.wait_for_timeout(1500)
                page.evaluate("document.activeElement.blur()")
                page.fill("#seed input, #seed textarea", "4")
                page.click("#speak")
                page.wait_for_function("chorus.current?.finished && chorus.current.position > 48000", timeout=120_000)
                page.screenshot(path=OUT / f"clone-{size}-{theme}.png", full_page=True)
                page.click("#stop")
                if size == "desktop" and theme == "light":
                    page.fill("#text textarea", LONG)
                    page.click("#preview-box button")
                    page.wait_for_function("document.querySelectorAll('#parts tr[data-part]').length > 2")
                    page.click("#speak")
                    page.wait_for_function("chorus.current?.position > 72000", timeout=120_000)
                    page.screenshot(path=OUT / f"parts-{size}-{theme}.png", full_page=True)
                    page.click("#stop")
                    for tab in ("Voices", "Engine"):
                        page.get_by_role("tab", name=tab).click()
                        page.wait_for_timeout(2500)
                        page.screenshot(path=OUT / f"{tab.lower()}-{size}-{theme}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
