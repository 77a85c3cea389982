"""Opened to the network, as a newcomer would: the embedded voice by `app.py --https --password`, under another name."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess

import httpx
import numpy as np
import pytest
import soundfile as sf
import yaml

from tests.conftest import ROOT
from tests.page.conftest import NAME, START_S, serving
from tests.page.test_clone import take_samples, wait_status

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

PASSWORD = "pässword: 1"
SENTENCE = "The ferry leaves at seven."


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """(address, trace file) of an app with a certificate, a password and a trace."""
    folder = tmp_path_factory.mktemp("network")
    trace = folder / "trace.jsonl"
    overlay = {"extends": str(ROOT / "configs" / "embedded.yaml"), "voices_dir": str(folder / "voices"),
               "trace": str(trace), "models": ["assets/embedded"]}  # fmt: skip
    (folder / "settings.yaml").write_text(yaml.safe_dump(overlay))
    with contextlib.ExitStack() as open_page:
        with serving(folder, folder / "settings.yaml", "--https", "--password", PASSWORD) as url:
            yield url, trace
            # A page that stays open, as it shows itself to the server: it must not keep the app from ending.
            client = open_page.enter_context(httpx.Client(base_url=url, verify=False, auth=("me", PASSWORD)))
            answer = open_page.enter_context(client.stream("GET", "/gradio_api/heartbeat/open", timeout=60))
            assert answer.status_code == 200


@pytest.fixture
def page(network, open_page):
    """By a name that is not this machine's: there a browser gives the microphone to https alone."""
    base = network[0].replace("127.0.0.1", NAME)
    return open_page(
        base=base,
        banner="trained for demonstration",
        height=2400,  # the whole of the settings is in sight: the page draws no other lines of them
        ignore_https_errors=True,
        http_credentials={"username": "anyone", "password": PASSWORD},
    )


def test_without_the_password_nothing_is_given_away(network, browser):
    url = network[0]
    with httpx.Client(base_url=url, verify=False) as client:
        for path in ("/", "/config", "/chorus/static/chorus.js", "/chorus/status", "/chorus/trace", "/v1/models"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, auth=("anyone", "password")).status_code == 401, path
        body = {"input": "Hello.", "text": "Hello."}
        for path in ("/v1/audio/speech", "/chorus/speak", "/gradio_api/upload"):
            assert client.post(path, json=body).status_code == 401, path
    context = browser.new_context(ignore_https_errors=True, http_credentials={"username": "a", "password": "wrong"})
    stranger = context.new_page()
    assert stranger.goto(url).status == 401
    assert "password" in stranger.inner_text("body") and stranger.locator("#speak").count() == 0
    context.close()


def test_with_the_password_the_embedded_voice_speaks_over_https(network, page, tmp_path):
    assert page.url.startswith(f"https://{NAME}") and page.evaluate("isSecureContext")
    page.fill("#text textarea", SENTENCE)
    page.fill("#seed input, #seed textarea", "7")
    page.click("#speak")
    wait_status(page, "Done", "Ended early")
    pcm = take_samples(page)
    assert len(pcm) > 24_000 and np.abs(pcm).max() > 0.05
    # The curl command of the take comes in too, once the word is filled in.
    command = page.evaluate("import('/chorus/static/takes.js').then((m) => m.curl(chorus.takes.list[0]))")
    assert PASSWORD not in command
    command = command.replace(f"https://{NAME}", network[0].rpartition(":")[0]).replace("chorus:PASSWORD", '"$WORD"')
    subprocess.run(command, shell=True, cwd=tmp_path, env={**os.environ, "WORD": f"x:{PASSWORD}"}, check=True)
    again = sf.read(tmp_path / "take.wav", dtype="int16")[0]
    assert len(again) == len(pcm) and np.abs(again - np.round(pcm * 32767)).max() <= 1


def test_the_microphone_is_recorded_untouched_and_speaks(page):
    settings = page.evaluate(
        "navigator.mediaDevices.getUserMedia({audio: true}).then((s) => s.getAudioTracks()[0].getSettings())"
    )
    assert (settings["echoCancellation"], settings["noiseSuppression"], settings["autoGainControl"]) == (False,) * 3
    page.get_by_label("Record", exact=True).click()
    assert page.locator(".ch-insecure-note").first.is_hidden()
    page.locator("#record button:has-text('Record')").first.click()
    page.wait_for_timeout(4000)  # of speech from the fake microphone
    page.locator("#record button:has-text('Stop')").first.click()
    page.wait_for_function("document.querySelector('#clip textarea, #clip input').value.startsWith('clip:')")
    page.wait_for_function("document.querySelector('#transcript textarea').value.length > 0")
    assert page.locator("#preview").is_visible()
    page.fill("#text textarea", "Good morning.")
    page.click("#speak")
    wait_status(page, "Speaking", "Done", "Ended early")
    assert page.evaluate("chorus.current.settings.voice").startswith("clip:")
    page.click("#stop")
    assert len(take_samples(page)) > 0


def test_profile_and_scheduler_mode_are_switched_and_speech_goes_on(network, page):
    """What a restart will change is said before; what is in force, and that it speaks, after."""
    url = network[0]
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_function("document.querySelector('#engine-state').textContent.includes('sync scheduling')")
    before = settings_in_force(page)
    page.get_by_label("sync: decide, then run", exact=True).check()
    will(page, "talker.scheduler_mode: auto → sync")
    page.click("#engine-profile input")
    page.get_by_role("option", name="configs/latency.yaml").click()
    will(page, "stream.chunk_schedule: [2, 3, 4, 8, 12] → [1, 2, 4, 8, 12]")
    assert "model:" not in page.inner_text("#engine-will") and "trace" not in page.inner_text("#engine-will")
    page.get_by_label("async: decide", exact=False).check()
    will(page, "talker.scheduler_mode: auto → async")
    page.click("#engine-restart")
    page.wait_for_function("document.querySelector('#engine-note').textContent.includes('is being loaded')")
    # Where this CPU build has no async scheduling, the old settings go on and the reason is shown.
    page.wait_for_function(
        "() => document.querySelector('#engine-state').textContent.includes('async scheduling') || "
        "document.querySelector('#engine-errors').textContent.includes('no async scheduling')",
        timeout=START_S * 1000,
    )
    if "no async scheduling" in page.inner_text("#engine-errors"):
        page.wait_for_function("document.querySelector('#engine-state').textContent.includes('Engine: ready')")
        assert settings_in_force(page) == before
        page.get_by_label("sync: decide, then run", exact=True).check()
        page.click("#engine-restart")
    page.wait_for_function("document.querySelector('#engine-state').textContent.includes('Engine: ready')",
                           timeout=START_S * 1000)  # fmt: skip
    now = settings_in_force(page)
    assert now["stream"]["chunk_schedule"] == [1, 2, 4, 8, 12] and now["talker"]["scheduler_mode"] in ("sync", "async")
    for kept in ("model", "models", "voices_dir", "trace"):  # of this machine, not of the profile
        assert now[kept] == before[kept], kept
    page.get_by_role("tab", name="Clone").click()
    page.fill("#text textarea", SENTENCE)
    page.fill("#seed input, #seed textarea", "7")
    page.click("#speak")
    wait_status(page, "Done", "Ended early")
    assert len(take_samples(page)) > 24_000
    assert httpx.get(f"{url}/ready", verify=False, auth=("me", PASSWORD)).status_code == 200


def settings_in_force(page) -> dict:
    """As the Engine tab shows them."""
    if not page.locator("#engine-settings").is_visible():
        page.get_by_role("button", name="Settings in force").click()
    page.wait_for_selector("#engine-settings .cm-line")
    lines = page.evaluate("[...document.querySelectorAll('#engine-settings .cm-line')].map((line) => line.textContent)")
    return yaml.safe_load("\n".join(lines))


def will(page, words: str) -> None:
    page.wait_for_function("words => document.querySelector('#engine-will').textContent.includes(words)", arg=words)


def test_the_trace_is_downloaded_as_it_is_now(network, page):
    """It holds what was spoken a moment ago: no copy made when the page was opened."""
    page.fill("#text textarea", SENTENCE)
    page.click("#speak")
    wait_status(page, "Done", "Ended early")
    request = page.evaluate("chorus.current.id")
    page.wait_for_function(
        "(id) => fetch('/chorus/trace').then((answer) => answer.text()).then((text) => text.includes(id))", arg=request
    )
    page.get_by_role("tab", name="Engine").click()
    with page.expect_download() as caught:
        page.click("#engine-trace")
    lines = [json.loads(line) for line in caught.value.path().read_text().splitlines()]
    assert lines[0]["event"] == "trace" and re.fullmatch(r"[0-9a-f]{12}", lines[0]["config"])
    events = {line["event"] for line in lines if line.get("request") == request}
    assert len(events) >= 3, events
