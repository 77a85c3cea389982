"""The Clone tab end to end: real page, real engine, real browser."""

from __future__ import annotations

import io
import json
import time

import httpx
import numpy as np
import pytest
import soundfile as sf

from tests.page.conftest import VOICES, active, wait_idle

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = "The harbor was quiet when we left. By noon the wind had turned, and the boat was flying over the waves. " * 4

SENTENCE = "Good morning! Did you know that this sentence is played while its end is still being made?"

# Seeds with which the random weights end after 1 to 2.5 s of sound; any other would do, and take longer.
SOON = {"Good morning.": "13", "Good morning to all of you.": "22", "One two three.": "22", SENTENCE: "2"}

# Records what leaves the player's node, inside the audio graph and before the sound card.
RECORDER = """async () => {
  await chorus.player.open();
  const code = `registerProcessor("recorder", class extends AudioWorkletProcessor {
    process(inputs) { if (inputs[0][0]) this.port.postMessage(inputs[0][0].slice()); return true; } })`;
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  await chorus.player.context.audioWorklet.addModule(url);
  const recorder = new AudioWorkletNode(chorus.player.context, "recorder");
  window.heard = [];
  recorder.port.onmessage = ({ data }) => window.heard.push(...data);
  chorus.player.node.connect(recorder).connect(chorus.player.context.destination);
}"""


def speak(page, text: str, **fields: str):
    """With a seed of our own: random weights end after two frames otherwise, or never; with SOON after a second or two.

    It is played as fast as people listen, so that every second of sound is a second of the test.
    """
    fields.setdefault("seed", "4" if LONG in text else SOON.get(text, "3"))
    page.fill("#text textarea", text)
    for name, value in fields.items():
        page.fill(f"#{name} input, #{name} textarea", value)
    page.click("#speak")


def wait_status(page, *words: str, timeout: float = 90) -> str:
    """The status line once it has one of the words; what it said instead when the time is up."""
    limit = time.monotonic() + timeout
    said: list[str] = []
    while time.monotonic() < limit:
        now = page.inner_text("#ch-status")
        if any(word in now for word in words):
            return now
        said += [now] if now not in said[-1:] else []
        page.wait_for_timeout(20)
    raise AssertionError(f"the page said {said}, not {words}")


def take_samples(page) -> np.ndarray:
    return np.array(page.evaluate("Array.from(chorus.current.pcm)"), dtype=np.float32)


def download(page, label: str) -> bytes:
    with page.expect_download() as caught:
        page.click(f"#ch-takes li:first-child button:text-is('{label}')")
    return open(caught.value.path(), "rb").read()


def test_it_plays_while_it_is_made(page):
    speak(page, LONG * 2)  # some seconds of work, even for small random weights
    page.wait_for_function("chorus.current.finished", timeout=90_000)
    page.click("#stop")
    take = page.evaluate(
        "({...chorus.current, pcm: null, blocks: chorus.current.blocks.length, record: null, settings: null})"
    )
    assert take["blocks"] > 3
    assert take["firstPlayedAt"] < take["lastReceivedAt"]
    assert take["receivedAtFirstPlay"] < take["received"]
    assert 0 < take["firstPlayedAt"] - take["clickedAt"] < 10_000
    shown = page.inner_text(".ch-stats")
    assert " ms" in shown and "engine" in shown and "× real time" in shown
    assert float(page.inner_text("#ch-speed")) > 0


def test_heard_downloaded_and_made_are_the_same_samples(page, server):
    """What leaves the audio graph, what the download holds and what the engine makes for that seed are equal."""
    page.evaluate(RECORDER)
    speak(page, "Good morning to all of you.", seed="2")
    wait_status(page, "Done", "Ended early")
    pcm = take_samples(page)
    # The recorder reports later than the player: wait for the last sample that is not silent.
    loud = np.flatnonzero(pcm)
    page.wait_for_function(
        "least => window.heard.findLastIndex((x) => x) - window.heard.findIndex((x) => x) >= least",
        arg=int(loud[-1] - loud[0]),
    )
    page.wait_for_function("([at, least]) => window.heard.length >= window.heard.findIndex((x) => x) - at + least",
                           arg=[int(loud[0]), len(pcm)])  # fmt: skip
    assert len(pcm) > 24_000 and len(pcm) % 1920 == 0 and np.abs(pcm).max() > 0

    heard = np.array(page.evaluate("window.heard"), dtype=np.float32)
    start = int(np.flatnonzero(heard)[0]) - int(np.flatnonzero(pcm)[0])
    gaps = page.evaluate("chorus.current.gaps")
    cut, silent = [], 0  # indices in `heard` of the silence that filled gaps
    for gap in gaps:
        cut += range(start + gap["at"] + silent, start + gap["at"] + silent + gap["samples"])
        silent += gap["samples"]
    assert not np.any(heard[cut])  # a gap is silence, and is counted on the page
    assert np.array_equal(np.delete(heard, cut)[start : start + len(pcm)], pcm)

    wav = download(page, "wav")
    assert int.from_bytes(wav[4:8], "little") == len(wav) - 8
    assert int.from_bytes(wav[40:44], "little") == len(wav) - 44 == 2 * len(pcm)
    saved, rate = sf.read(io.BytesIO(wav), dtype="int16")
    assert rate == 24_000 and np.array_equal(saved, np.floor(pcm.astype(np.float64) * 32767 + 0.5).astype(np.int16))

    flac, _ = sf.read(io.BytesIO(download(page, "flac")), dtype="int16")
    assert np.array_equal(flac, saved)
    assert abs(sf.info(io.BytesIO(download(page, "mp3"))).frames - len(pcm)) < 3000

    voice = page.evaluate("chorus.current.settings.voice")
    body = {"input": "Good morning to all of you.", "voice": voice, "seed": 2, "response_format": "wav"}
    answer = httpx.post(f"{server}/v1/audio/speech", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    again = sf.read(io.BytesIO(answer.content), dtype="int16")[0]
    assert len(again) == len(saved) and np.abs(again.astype(int) - saved).max() <= 1


def test_without_an_audio_worklet_the_old_script_node_plays(open_page):
    """As on plain http in a local network, where browsers take the worklet and the microphone away."""
    page = open_page(script="delete BaseAudioContext.prototype.audioWorklet; "
                            "Object.defineProperty(window, 'isSecureContext', {value: false});")  # fmt: skip
    speak(page, "Good morning to all of you.")
    wait_status(page, "Done", "Ended early")
    played, received = page.evaluate("[chorus.current.played, chorus.current.received]")
    assert played == received == len(take_samples(page)) > 0
    page.get_by_label("Record", exact=True).click()
    page.locator(".ch-insecure-note").first.wait_for(state="visible")


def test_stop_stops_and_frees_the_slot(page, server):
    speak(page, LONG * 2)
    wait_status(page, "Speaking")
    assert active(server) == 1
    page.click("#stop")
    assert wait_idle(server, 2.0)
    assert wait_status(page, "Stopped") == "Stopped."
    received = page.evaluate("chorus.current.received")
    page.wait_for_timeout(500)
    assert page.evaluate("chorus.current.received") == received
    assert page.locator("#ch-takes li").count() == 1  # what was heard so far is kept


def test_escape_stops_and_control_enter_speaks(page, server):
    page.fill("#text textarea", LONG * 2)
    page.keyboard.press("Control+Enter")
    wait_status(page, "Speaking")
    page.keyboard.press("Escape")
    wait_status(page, "Stopped")
    assert wait_idle(server, 2.0)


def test_leaving_the_page_frees_the_slot(page, server):
    speak(page, LONG * 2)
    wait_status(page, "Speaking")
    page.reload()
    page.wait_for_selector("#speak")
    assert wait_idle(server, 3.0)


def test_two_browsers_speak_at_once(open_page, server):
    pages = [open_page(), open_page()]
    for seed, page in zip(("2", "23"), pages, strict=True):
        speak(page, SENTENCE, seed=seed)
    for page in pages:
        wait_status(page, "Speaking", "Done", "Ended early")
    for page in pages:
        wait_status(page, "Done", "Ended early")
    first, second = (take_samples(page) for page in pages)
    assert len(first) > 24_000 and len(second) > 24_000 and not np.array_equal(first[:24_000], second[:24_000])
    assert active(server) == 0


def test_nothing_to_say_is_refused_in_words(page, server):
    for text in ("", "   ", "🎉🎉 🙂", "…!?"):
        page.evaluate("document.querySelector('#ch-status').textContent = ''")  # what it said of the one before
        speak(page, text)
        assert "othing to" in wait_status(page, "othing to", "error", "Done"), text
        assert active(server) == 0 and page.locator("#ch-takes li").count() == 0


def test_the_cleaned_text_is_shown(page):
    speak(page, "**Hello** 🙂 and `welcome`.")
    wait_status(page, "Speaking", "Done", "Ended early")
    spoken = page.inner_text("#ch-spoken-text")
    assert "*" not in spoken and "🙂" not in spoken and "Hello" in spoken and "welcome" in spoken


@pytest.mark.parametrize("kind", ["stereo", "mp4"])
def test_uploads_are_checked_transcribed_and_spoken(page, stereo_file, mp4_file, kind):
    page.get_by_label("Upload a clip").click()
    page.set_input_files("#upload input[type=file]", stereo_file if kind == "stereo" else mp4_file)
    page.wait_for_function("document.querySelector('#clip textarea, #clip input').value.startsWith('clip:')")
    page.wait_for_selector("#preview")
    page.wait_for_function("document.querySelector('#transcript textarea').value.length > 0")
    assert "library closes" in page.input_value("#transcript textarea")
    speak(page, "Good morning.")
    wait_status(page, "Done", "Ended early")
    assert page.evaluate("chorus.current.settings.voice").startswith("clip:")
    assert len(take_samples(page)) > 0


def test_unusable_uploads_say_what_to_do(page, work):
    (work / "notes.wav").write_bytes(b"these are notes, not sound " * 50)
    sf.write(work / "short.wav", 0.3 * np.sin(np.arange(4800) / 10), 24_000)
    sf.write(work / "long.wav", 0.3 * np.sin(np.arange(48_000 * 280) / 30), 48_000, subtype="PCM_24")  # 40 MB
    page.get_by_label("Upload a clip").click()
    for name, words in (("notes.wav", "not an audio file"), ("short.wav", "at least 1 s"), ("long.wav", "longer than")):
        page.set_input_files("#upload input[type=file]", work / name)
        page.wait_for_function("w => document.querySelector('#hints')?.textContent.includes(w)", arg=words)
        page.locator("#upload button").first.click()
        page.wait_for_function("!document.querySelector('#hints')")
    page.click("#speak")
    assert "upload or record" in wait_status(page, "upload or record", "Speaking", "Done")


def test_takes_survive_a_reload_and_carry_their_settings(page, server):
    speak(page, "One two three.", seed="22")
    wait_status(page, "Done", "Ended early")
    pcm = take_samples(page)
    page.reload()
    page.wait_for_selector("#ch-takes li")
    assert "seed 22" in page.inner_text("#ch-takes li")
    page.click("#ch-takes .ch-play")
    wait_status(page, "Replayed")
    assert np.array_equal(take_samples(page), pcm)
    settings = json.loads(download(page, "json"))
    assert settings["seed"] == 22 and settings["text"] == "One two three."
    assert settings["result"]["weights"] == "random"
    command = page.evaluate("import('/chorus/static/takes.js').then((m) => m.curl(chorus.takes.list[0]))")
    body = json.loads(command.split(" -d '")[1].split("' -o")[0])
    answer = httpx.post(f"{server}/v1/audio/speech", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    again = sf.read(io.BytesIO(answer.content), dtype="int16")[0]
    assert len(again) == len(pcm) and np.abs(again - np.round(pcm * 32767)).max() <= 1
    page.click("#ch-clear")
    assert page.locator("#ch-takes li").count() == 0


def test_two_takes_are_compared_at_the_same_moment(page):
    for seed in ("4", "5"):
        speak(page, SENTENCE, seed=seed)
        page.wait_for_function("seed => chorus.current.seed === seed && chorus.current.finished", arg=int(seed))
        page.click("#stop")
    page.locator("#ch-takes button:text-is('A/B')").nth(1).click()
    page.locator("#ch-takes button:text-is('A/B')").nth(0).click()
    page.click("#ch-compare button:has-text('seed 4')")
    page.wait_for_function("chorus.current.seed === 4 && chorus.current.position > 24000")
    page.click("#ch-compare button:has-text('seed 5')")
    page.wait_for_function("chorus.current.seed === 5 && chorus.current.played > 0")
    offset, length = page.evaluate("[chorus.current.offset, chorus.current.pcm.length]")
    assert 24_000 < offset <= length
    page.click("#stop")


def test_a_voice_is_saved_with_consent_only(page, server):
    page.get_by_label("Upload a clip").click()
    page.set_input_files("#upload input[type=file]", VOICES / "human_arctic.flac")
    page.wait_for_function("document.querySelector('#clip textarea, #clip input').value.startsWith('clip:')")
    page.wait_for_function("document.querySelector('#transcript textarea').value.length > 0")
    page.click("#save-box button")
    page.fill("#save-name input, #save-name textarea", "My voice")
    page.click("#save")
    page.wait_for_function("document.querySelector('#save-note').textContent.includes('agreed')")
    page.check("#consent input")
    page.click("#save")
    page.wait_for_function("document.querySelector('#save-note').textContent.includes('Saved as My voice')")
    names = httpx.get(f"{server}/v1/audio/voices").json()["voices"]
    assert "My voice" in names

    page.get_by_role("tab", name="Voices").click()
    page.wait_for_function("document.querySelector('#voices').textContent.includes('My voice')")
    page.click("#voices-pick input")
    page.get_by_role("option", name="My voice").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#voices-delete")
    page.wait_for_function("document.querySelector('#voices-note').textContent.includes('Deleted My voice')")
    names = httpx.get(f"{server}/v1/audio/voices").json()["voices"]
    assert "My voice" not in names


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_its_window(open_page, dark):
    page = open_page(width=390, height=844, dark=dark)
    for width in (390, 1280):  # as on a phone, and as when it is turned or the window is pulled wider
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("width => document.documentElement.clientWidth === width", arg=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("Voices", "Load", "Quality", "Engine", "Clone"):
            if not page.get_by_role("tab", name=name).is_visible():  # narrow: the last tabs are in a menu
                page.locator(".overflow-menu > button").click()
                page.locator(".overflow-dropdown button", has_text=name).click()
            else:
                page.get_by_role("tab", name=name).click()
            settled(page, f"#{FIRST[name]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        assert page.locator("#speak").is_visible()


# An element that each tab begins with.
FIRST = {"Clone": "text", "Voices": "voices", "Load": "load-run", "Quality": "quality-run", "Engine": "engine-state"}


def settled(page, selector: str) -> None:
    """The element is there, and the page has been drawn twice without changing its size or any running transition."""
    page.wait_for_selector(selector, state="visible")
    page.evaluate("""async () => {
      const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const state = () => [document.body.scrollHeight, document.body.scrollWidth, document.getAnimations().filter(
        (a) => a.playState === "running" && a.effect.getComputedTiming().iterations !== Infinity).length].join();
      for (let same = 0, last = "", i = 0; same < 3 && i < 120; i++) {
        await frame();
        same = state() === last && state().endsWith(",0") ? same + 1 : 0;
        last = state();
      }
    }""")


def test_bad_requests_are_refused_before_they_cost_anything(server):
    answer = httpx.post(f"{server}/chorus/speak", json={"text": "Hello", "voice": "Heart", "sed": 1})
    assert answer.status_code == 400 and answer.json()["error"]["field"] == "sed"
    started = time.monotonic()
    for body, status in (({"text": "Hello", "voice": "Nobody"}, 404), ({"text": "Hello", "voice": "clip:abc"}, 404),
                         ({"text": "Hello", "voice": "Heart", "seed": "x"}, 400), ({"voice": "Heart"}, 400),
                         ({"text": "Hello", "voice": "../../etc/passwd"}, 400),
                         ({"text": "Hello", "voice": "Heart", "sampling": {"temperature": -1}}, 400)):  # fmt: skip
        answer = httpx.post(f"{server}/chorus/speak", json=body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["error"]["message"]
    assert time.monotonic() - started < 5 and active(server) == 0
