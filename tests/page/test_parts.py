"""Long text on the page: progress by part, a part that fails is said again alone; and the place in the queue."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from functools import cache

import httpx
import numpy as np
import pytest

from tests.page.conftest import active, wait_idle
from tests.page.test_clone import take_samples, wait_status
from ui import wire

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

PARAGRAPH = "The harbor was quiet when we left. By noon the wind had turned, and the boat was flying over the waves. "
TEXT = PARAGRAPH * 7  # three parts
# Random weights come to an end by chance, at this temperature in about half of all cases before the limit.
CHANCE = {"voice": "Heart", "language": "auto", "max_frames": 50, "sampling": {"temperature": 2.0, "top_k": 0}}


@cache
def spoken(server: str, text: str, seed: int) -> tuple[list[str], list[list[int]], str, bytes]:
    """(parts, where they begin, how it ended, float32 PCM) of the request by itself."""
    answer = httpx.post(f"{server}/chorus/speak", json={**CHANCE, "text": text, "seed": str(seed)}, timeout=120)
    records = wire.read(answer.content)
    events = [record for record in records if isinstance(record, dict)]
    pcm = np.concatenate([r for r in records if not isinstance(r, dict)])
    starts = [start for event in events if event["event"] == "chunk" for start in event["starts"]]
    return events[0]["parts"], starts, events[-1]["finish_reason"], pcm.tobytes()


def find_seed(server: str, wanted, likely: int) -> int:
    """The first seed that does what a test needs. `likely` did so where the test was written, and is tried first."""
    return next(seed for seed in (likely, *range(1, 80)) if wanted(seed))


def fails_at(server: str, part: int):
    """Whether a seed's take fails exactly at that part."""

    def check(seed: int) -> bool:
        _, starts, reason, _ = spoken(server, TEXT, seed)
        return reason == "length" and len(starts) == part + 1

    return check


def speak(page, **settings) -> None:
    page.fill("#text textarea", TEXT)
    page.evaluate("settings => { chorus.speak(settings); }", {**CHANCE, "text": TEXT, **settings})


def open_preview(page) -> None:
    page.click("#preview-box button")
    page.wait_for_function("document.querySelectorAll('#parts tr[data-part]').length === 3")


def test_a_part_that_fails_is_said_again_and_the_good_ones_stay(page, server):
    parts = spoken(server, TEXT, 1)[0]
    assert len(parts) == 3
    rest = " ".join(parts[1:])
    first_fails = fails_at(server, 1)
    seed = find_seed(server, lambda s: first_fails(s) and spoken(server, rest, s + 1001)[2] == "stop", 15)
    page.fill("#text textarea", TEXT)
    open_preview(page)
    page.evaluate("window.said = new Set(); new MutationObserver(() => said.add(document.querySelector('#ch-status')"
                  ".textContent)).observe(document.querySelector('#ch-status'), {childList: true, characterData: true,"
                  "subtree: true})")  # fmt: skip
    speak(page, seed=str(seed))
    page.wait_for_function("document.querySelectorAll('#parts tr[aria-current=true]').length === 1")
    assert wait_status(page, "Done", "failed twice") == "Done; part 2 was said again with another seed."
    said = page.evaluate("[...said]")
    assert any(words.startswith("Part 2 of 3 failed") for words in said), said
    assert any("Speaking part 1 of 3" in words for words in said), said

    pcm = take_samples(page)
    starts = page.evaluate("chorus.current.starts.map((start) => start.at)")
    before, (_, begins, _, after) = spoken(server, TEXT, seed), spoken(server, rest, seed + 1001)
    kept = before[1][1][1] * 1920  # where the part that failed began
    assert starts == [0, kept, kept + begins[1][1] * 1920]
    assert np.array_equal(pcm[:kept], np.frombuffer(before[3], np.float32)[:kept])
    assert np.array_equal(pcm[kept:], np.frombuffer(after, np.float32))
    assert page.evaluate("chorus.current.position") == len(pcm)  # heard to the end, what was cut not counted
    states = page.evaluate("[...document.querySelectorAll('#parts tr[data-part]')].map((row) => row.dataset.state)")
    assert states == ["made"] * 3
    settings = json.loads(page.evaluate("import('/chorus/static/takes.js').then((m) => m.settingsJson("
                                        "chorus.takes.list[0]))"))  # fmt: skip
    assert [part["seed"] for part in settings["parts"]] == [seed, seed + 1001, seed + 1002]
    assert page.locator("#ch-takes li").count() == 1

    # The last part alone once more: the others stay as they are.
    for _ in range(12):
        page.click("#ch-parts button[data-part='2']")
        words = wait_status(page, "Done", "part 3", "Part 3 of 3 failed")
        page.wait_for_function("chorus.current.over")
        again = np.array(page.evaluate("Array.from(chorus.takes.list[0].pcm)"), dtype=np.float32)
        if "failed" not in page.inner_text("#ch-status"):
            break
        assert "as it was" in page.inner_text("#ch-status") and np.array_equal(again, pcm), words
    assert np.array_equal(again[: starts[2]], pcm[: starts[2]]) and not np.array_equal(again, pcm)
    assert page.locator("#ch-takes li").count() == 1
    page.reload()
    page.wait_for_selector("#ch-takes li")
    page.click("#ch-takes .ch-play")
    wait_status(page, "Replayed")
    assert np.array_equal(take_samples(page), again) and page.locator("#ch-parts li").count() == 3


def test_what_fails_twice_can_be_gone_on_from(page, server):
    parts = spoken(server, TEXT, 1)[0]
    rest = " ".join(parts[1:])
    first_fails = fails_at(server, 1)
    seed = find_seed(server, lambda s: first_fails(s) and len(spoken(server, rest, s + 1001)[1]) == 1
                     and spoken(server, rest, s + 1001)[2] == "length", 3)  # fmt: skip
    speak(page, seed=str(seed))
    assert wait_status(page, "Part 2 of 3 failed: ").endswith("go on from it below.")
    assert page.locator("#ch-parts li[data-state=failed]").count() == 1
    kept = spoken(server, TEXT, seed)[1][1][1] * 1920
    before = take_samples(page)[:kept]
    assert page.locator("#ch-parts button").all_inner_texts() == ["Say again", "Go on from here"]
    page.click("#ch-parts button[data-action=from]")
    page.wait_for_function("chorus.current.runs.length > 2 && chorus.current.received > chorus.current.offset")
    page.click("#stop")
    assert np.array_equal(take_samples(page)[:kept], before)
    assert page.locator("#ch-takes li").count() == 1


def test_a_text_that_was_stopped_can_be_gone_on_with(page, server):
    seed = find_seed(server, lambda s: len(spoken(server, TEXT, s)[1]) == 3, 18)
    # Pressed by the page itself: on a busy machine Playwright comes when all is made.
    page.evaluate("""() => new MutationObserver((_, watch) => {
      if (!document.querySelector("#ch-status").textContent.startsWith("Speaking part")) return;
      watch.disconnect();
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    }).observe(document.querySelector("#ch-status"), { childList: true, characterData: true, subtree: true })""")
    speak(page, seed=str(seed))
    wait_status(page, "Stopped")
    starts = page.evaluate("chorus.current.record.starts.map((start) => start.at)")
    before = take_samples(page)[: starts[-1]]
    button = page.locator("#ch-parts button[data-action=from]")
    assert int(button.get_attribute("data-part")) == len(starts) - 1
    button.click()
    page.wait_for_function("chorus.current.received > chorus.current.offset")
    page.click("#stop")
    assert np.array_equal(take_samples(page)[: starts[-1]], before)


def test_a_text_file_is_opened_and_its_parts_shown(page, work):
    (work / "story.txt").write_text("\ufeffDr. Smith paid $3.50.\n\n" + TEXT, encoding="utf-8")
    page.click("#preview-box button")
    page.set_input_files("#text-file input[type=file]", work / "story.txt")
    page.wait_for_function("document.querySelectorAll('#parts tr[data-part]').length >= 3")
    assert page.input_value("#text textarea").startswith("Dr. Smith paid")
    assert "parts, spoken as one stream" in page.inner_text("#parts-note")
    (work / "odd.txt").write_bytes(b"\xff\xfe\x00caf\xe9")
    page.locator("#text-file button[aria-label*=emove], #text-file button[aria-label*=lear]").first.click()
    page.set_input_files("#text-file input[type=file]", work / "odd.txt")
    page.get_by_text("not UTF-8").first.wait_for()


def test_what_is_cut_from_the_queue_is_not_heard(page):
    """`truncate` on its own: heard samples cannot be taken back, waiting ones can."""
    result = page.evaluate("""async () => {
      const { PcmQueue } = await import("/chorus/static/pcm_queue.js");
      const ramp = (from, to) => Float32Array.from({ length: to - from }, (_, i) => from + i + 1);
      const all = [];
      for (const [heard, kept] of [[100, 250], [100, 40], [100, 100], [0, 130], [290, 300], [150, 500]]) {
        const queue = new PcmQueue(24000);
        for (let i = 0; i < 3; i++) queue.push(ramp(100 * i, 100 * i + 100));
        const out = new Float32Array(heard);
        if (heard) queue.pull(out);
        queue.truncate(kept);
        queue.push(ramp(1000, 1050));
        queue.end();
        const rest = new Float32Array(400);
        queue.pull(rest);
        all.push({ heard, kept, sound: [...out, ...rest].filter((x) => x), position: queue.played - queue.skipped });
      }
      return all;
    }""")
    for case in result:
        heard, kept = case["heard"], min(case["kept"], 300)
        expected = [*range(1, max(heard, kept) + 1), *range(1001, 1051)]
        assert case["sound"] == expected, case
        assert case["position"] == kept + 50


@pytest.fixture
def crowd(server):
    """`crowd(n)`: n long requests from elsewhere; each entry of the list it gives ends one."""
    open_streams = []

    def gather(count: int):
        for i in range(count):
            leave, ready = threading.Event(), threading.Event()
            body = {**CHANCE, "text": TEXT * 4, "seed": str(i), "max_frames": 250,
                    "sampling": {"temperature": 0.05, "repetition_penalty": 1.0}}  # fmt: skip

            def listen(body=body, leave=leave, ready=ready):
                with contextlib.suppress(httpx.HTTPError), httpx.stream(
                    "POST", f"{server}/chorus/speak", json=body, timeout=120
                ) as answer:  # fmt: skip
                    ready.set()
                    for _ in answer.iter_raw():
                        if leave.is_set():
                            break

            threading.Thread(target=listen, daemon=True).start()
            assert ready.wait(30)
            open_streams.append(leave)
        return open_streams

    yield gather
    for leave in open_streams:
        leave.set()
    assert wait_idle(server, 60)


def test_the_place_in_the_queue_is_shown_and_moves_up(page, server, crowd):
    others = crowd(9)  # eight at a time
    page.evaluate("settings => { chorus.speak(settings); }", {**CHANCE, "text": "Good morning.", "seed": "3"})
    assert "number 2 in the queue" in wait_status(page, "in the queue", "Speaking", "Done")
    assert active(server) == 10
    others[0].set()
    assert "number 1 in the queue" in wait_status(page, "number 1", "Speaking", "Done")
    for leave in others:
        leave.set()
    wait_status(page, "Done", "Ended early")
    started = time.monotonic()
    assert wait_idle(server, 30) and time.monotonic() - started < 30
