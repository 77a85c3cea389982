"""The page follows the checkpoint: another model is loaded from the Engine tab, and the fields change with its task."""

from __future__ import annotations

import httpx
import pytest

from tests.conftest import GOLDEN, RANDOM_BASE
from tests.page.conftest import START_S
from tests.page.test_clone import speak, wait_status

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


def restart(page, model: str):
    page.get_by_role("tab", name="Engine").click()
    page.fill("#engine-model input, #engine-model textarea", model)
    page.click("#engine-restart")


def load_model(page, model: str, banner: str):
    restart(page, model)
    page.wait_for_function(
        "words => document.querySelector('.ch-banner').textContent.includes(words)", arg=banner, timeout=START_S * 1000
    )


def test_a_model_of_another_task_changes_the_fields(page, server):
    """In one test, since each restart of the engine takes its time; the model of before is back at the end."""
    restart(page, "/no/such/checkpoint")
    page.wait_for_function("document.querySelector('#engine-note').textContent.includes('no such folder')")
    assert httpx.get(f"{server}/ready").status_code == 200  # nothing was given up for it
    try:
        load_model(page, str(GOLDEN / "checkpoints" / "custom_voice"), "custom_voice has never")
        page.get_by_role("tab", name="Speak").click()
        assert page.locator("#speaker").is_visible() and page.locator("#instruct").is_visible()
        assert not page.locator("#source").is_visible() and not page.locator("#ready").is_visible()
        speak(page, "Good morning.")
        wait_status(page, "Done", "Ended early")
        settings = page.evaluate("chorus.current.settings")
        assert settings["speaker"] and "voice" not in settings
        assert httpx.get(f"{server}/v1/models").json()["data"][0]["task"] == "CustomVoice"
    finally:
        load_model(page, str(RANDOM_BASE), "base has never")
    page.get_by_role("tab", name="Clone").click()
    assert page.locator("#ready").is_visible() and not page.locator("#speaker").is_visible()
