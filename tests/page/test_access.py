"""For everyone: no serious fault by axe-core on any tab, light and dark; every step of a clone by keyboard alone."""

from __future__ import annotations

import pytest

from tests.page.conftest import VOICES
from tests.page.test_clone import FIRST, settled, wait_status

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

AXE = (VOICES.parents[1] / "tests" / "page" / "vendor" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
TABS = ("Clone", "Voices", "Load", "Quality", "Engine")


def faults(page) -> list[str]:
    """Serious and critical ones: rule, how often, the first place."""
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)")
    return [
        f"{fault['id']} ({fault['impact']}) x{len(fault['nodes'])}: {node['target']} {node['html'][:160]} "
        f"{node['failureSummary'][:300]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"][:4]
    ]


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_fault(open_page, dark):
    page = open_page(dark=dark)
    page.evaluate(AXE)
    page.fill("#text textarea", "The harbor was quiet. " * 30)
    page.fill("#seed input, #seed textarea", "9")
    page.click("#preview-box button")
    page.click("#speak")
    wait_status(page, "Speaking")
    page.click("#stop")  # with parts that are made, parts that are not, and the ways to go on
    page.locator("#ch-parts button").first.wait_for()
    assert faults(page) == [], "Clone, after speaking"
    page.get_by_label("Upload a clip").click()
    page.set_input_files("#upload input[type=file]", VOICES / "human_arctic.flac")
    page.wait_for_function("document.querySelector('#transcript textarea').value.length > 0")
    page.click("#save-box button")
    page.locator("#save").wait_for(state="visible")
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        settled(page, f"#{FIRST[tab]}")
        assert faults(page) == [], tab


def focus_on(page, selector: str, limit: int = 80) -> None:
    """Press Tab until the element, or something in it, has the focus."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("s => !!document.activeElement?.closest(s)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached with the Tab key")


def test_a_clone_by_keyboard_alone(page):
    """Choose a voice, type, speak, stop, hear again, download: no mouse."""
    page.evaluate("document.activeElement.blur()")
    focus_on(page, "#text textarea")
    page.keyboard.press("Control+A")
    page.keyboard.type("The harbor was quiet when we left. By noon the wind had turned, and the boat was flying.")
    focus_on(page, "#ready")
    before = page.input_value("#ready input")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("before => document.querySelector('#ready input').value !== before", arg=before)
    focus_on(page, "#seed")
    page.keyboard.type("4")
    focus_on(page, "#speak")
    page.keyboard.press("Enter")
    wait_status(page, "Speaking", "Done", "Ended early")
    chosen = page.evaluate("chorus.current.settings")
    assert chosen["seed"] == "4" and not before.startswith(chosen["voice"])
    focus_on(page, "#stop")
    page.keyboard.press("Enter")
    wait_status(page, "Stopped", "Done", "Ended early")
    focus_on(page, "#ch-takes .ch-play")
    page.keyboard.press("Enter")
    wait_status(page, "Playing", "Replayed")
    focus_on(page, "#ch-takes button[title='Download as flac']")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"  # one sees where one is
    with page.expect_download() as caught:
        page.keyboard.press("Enter")
    assert open(caught.value.path(), "rb").read(4) == b"fLaC"
    page.keyboard.press("Escape")


def test_tabs_and_upload_are_reached_by_keyboard(page):
    page.on("filechooser", lambda _: None)  # now: Playwright does not wait until the browser hands choosers over
    page.evaluate("document.activeElement.blur()")
    for name in ("Voices", "Clone"):
        focus_on(page, f"[role=tab]:nth-child({TABS.index(name) + 1})")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "name => document.querySelector('[role=tab][aria-selected=true]').textContent.includes(name)", arg=name
        )
    focus_on(page, "#source label:has(input[value^=Upload])")
    page.keyboard.press("Space")
    page.locator("#upload").wait_for(state="visible")
    focus_on(page, "#upload button")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(VOICES / "human_arctic.flac")
    page.wait_for_function("document.querySelector('#clip textarea, #clip input').value.startsWith('clip:')")
