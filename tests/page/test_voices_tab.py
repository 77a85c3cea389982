"""The Voices tab: a saved voice is renamed, exported, imported again, and deleted while someone speaks with it."""

from __future__ import annotations

import io
import json
import zipfile

import httpx
import numpy as np
import pytest
import soundfile as sf

from tests.page.conftest import VOICES
from tests.page.test_clone import SENTENCE, wait_status
from ui import wire

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = "Author of the danger trail, Philip Steels, etcetera."


@pytest.fixture
def save(server):
    """`save(name)` keeps the same clip under a name; none of the saved voices outlives the test."""
    before = saved(server)

    def keep(name: str) -> None:
        with (VOICES / "human_arctic.flac").open("rb") as clip:
            form = {"name": name, "consent": "true", "ref_text": WORDS}
            answer = httpx.post(f"{server}/v1/audio/voices", data=form, files={"audio_sample": clip}, timeout=60)
        assert answer.status_code == 201, answer.text

    yield keep
    for name in set(saved(server)) - set(before):
        httpx.delete(f"{server}/v1/audio/voices/{name}")


def saved(server: str) -> list[str]:
    return httpx.get(f"{server}/v1/audio/voices").json()["voices"]


def spoken(server: str, voice: str) -> np.ndarray:
    body = {"text": "Good morning.", "voice": voice, "seed": "3", "max_frames": 8}
    records = wire.read(httpx.post(f"{server}/chorus/speak", json=body, timeout=60).content)
    return np.concatenate([record for record in records if not isinstance(record, dict)])


def open_voices(page, *names: str) -> None:
    page.get_by_role("tab", name="Voices").click()
    for name in names:
        page.wait_for_function("name => document.querySelector('#voices').textContent.includes(name)", arg=name)


def pick(page, name: str) -> None:
    page.click("#voices-pick input")
    page.get_by_role("option", name=name, exact=True).click()
    page.wait_for_function("name => document.querySelector('#voices-pick input').value === name", arg=name)


def note(page, words: str) -> None:
    page.wait_for_function("words => document.querySelector('#voices-note').textContent.includes(words)", arg=words)


def press(page, action: str, words: str) -> None:
    page.click(f"#voices-{action}")
    note(page, words)


def test_a_voice_is_renamed_exported_and_imported_again(page, server, save, work):
    save("Guest of 1")
    open_voices(page, "Guest of 1")
    press(page, "export", "Choose a voice first")
    press(page, "rename", "Choose a voice first")

    pick(page, "Heart")  # bundled: to listen to and export, not to change
    page.fill("#voices-name input, #voices-name textarea", "Mine")
    press(page, "rename", "bundled voice and cannot be changed")
    pick(page, "Guest of 1")
    page.wait_for_function("document.querySelector('#voices-sound').textContent.includes('Guest of 1, ')")
    page.fill("#voices-name input, #voices-name textarea", "heart")
    press(page, "rename", "the name of a bundled voice")
    page.fill("#voices-name input, #voices-name textarea", "../Mine")
    press(page, "rename", "starts with a letter")
    page.fill("#voices-name input, #voices-name textarea", " Grüße,   Ann ")
    press(page, "rename", "Renamed to Grüße, Ann.")
    assert "Guest of 1" not in saved(server) and "Grüße, Ann" in saved(server)
    assert page.input_value("#voices-pick input") == "Grüße, Ann"  # still the chosen one
    page.get_by_role("tab", name="Clone").click()
    page.click("#ready input")
    page.get_by_role("option", name="Grüße, Ann").wait_for()
    page.keyboard.press("Escape")

    open_voices(page, "Grüße, Ann")
    with page.expect_download() as caught:  # at the first press
        page.click("#voices-export")
    assert caught.value.suggested_filename == "Grüße, Ann.voice.zip"
    data = caught.value.path().read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        about = json.loads(archive.read("voice.json"))
        sound = sf.read(io.BytesIO(archive.read("audio.flac")), dtype="float32")[0]
    assert about["name"] == "Grüße, Ann" and about["transcript"] == WORDS and about["consent"] is True
    assert abs(len(sound) / 24_000 - about["seconds"]) < 0.01

    page.fill("#voices-name input, #voices-name textarea", "")
    press(page, "import-go", "Choose an exported voice file first")
    (work / "holiday.zip").write_bytes(b"PK\x05\x06" + bytes(18))  # a zip with nothing in it
    page.set_input_files("#voices-import input[type=file]", work / "holiday.zip")
    page.get_by_text("holiday").first.wait_for()
    page.check("#voices-consent input")
    press(page, "import-go", "not a voice exported by Chorus")
    page.locator("#voices-import button[aria-label*=emove], #voices-import button[aria-label*=lear]").first.click()
    (work / "ann.voice.zip").write_bytes(data)
    page.set_input_files("#voices-import input[type=file]", work / "ann.voice.zip")
    page.get_by_text("ann.voice").first.wait_for()
    page.uncheck("#voices-consent input")
    press(page, "import-go", "Confirm that the speaker agreed")
    page.check("#voices-consent input")
    press(page, "import-go", "A voice named Grüße, Ann exists")
    page.fill("#voices-name input, #voices-name textarea", "Ann again")
    press(page, "import-go", "Imported Ann again.")
    assert page.input_value("#voices-pick input") == "Ann again"
    assert np.array_equal(spoken(server, "Ann again"), spoken(server, "Grüße, Ann"))  # the same voice
    assert not np.array_equal(spoken(server, "Ann again"), spoken(server, "Heart"))


def test_a_voice_deleted_while_it_speaks_is_heard_to_the_end(open_page, server, save):
    """One browser speaks, another deletes."""
    save("Passing")
    speaker, other = open_page(), open_page()
    open_voices(other, "Passing")
    pick(other, "Passing")
    press(other, "rename", "A voice needs a name")
    other.once("dialog", lambda dialog: dialog.dismiss())
    other.click("#voices-delete")
    other.wait_for_function("document.querySelector('#voices-note')?.textContent.trim() === ''")
    assert "Passing" in saved(server) and other.input_value("#voices-pick input") == "Passing"
    speaker.click("#ready input")
    speaker.get_by_role("option", name="Passing").click()
    speaker.fill("#text textarea", SENTENCE)
    speaker.fill(
        "#seed input, #seed textarea", "4"
    )  # to the limit: some seconds are still to be made when it is deleted
    speaker.click("#speak")
    wait_status(speaker, "Speaking")
    assert not speaker.evaluate("chorus.current.finished")
    other.once("dialog", lambda dialog: dialog.accept())
    press(other, "delete", "Deleted Passing")
    assert "Passing" not in saved(server)
    assert other.input_value("#voices-pick input") == ""
    wait_status(speaker, "Done", "Ended early")
    kept = speaker.evaluate("[chorus.current.played, chorus.current.received]")
    assert kept[0] == kept[1] > 24_000
    # Who had chosen it speaks with another voice, or is told.
    speaker.wait_for_function("!document.querySelector('#ready input').value.startsWith('Passing')")
    speaker.evaluate("settings => { chorus.speak(settings); }", {"text": SENTENCE, "voice": "Passing"})
    assert "no voice" in wait_status(speaker, "no voice", "Speaking")
