"""The Load and the Quality tab: real page, real engine, real browser."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    page.wait_for_selector(f"#{name.lower()}-run", state="visible")


def set_number(page, selector: str, value: int) -> None:
    box = page.locator(f"{selector} input[type=number]").first
    box.fill(str(value))
    box.press("Tab")


def shoot(page, name: str) -> None:
    """For people to look at, in build/."""
    (ROOT / "build").mkdir(exist_ok=True)
    page.screenshot(path=str(ROOT / "build" / f"{name}.png"), full_page=True)


def job(server: str) -> dict:
    return httpx.get(f"{server}/chorus/runs", timeout=30).json()["job"]


def wait_job(server: str, done, seconds: float = 300) -> dict:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        now = job(server)
        if done(now):
            return now
        time.sleep(0.3)
    raise AssertionError(f"the run is still at {now}")


@pytest.fixture(autouse=True)
def tidy(server):
    """Runs of these tests leave no folder behind, and none goes on into the next test."""
    before = set(httpx.get(f"{server}/chorus/runs").json()["runs"])
    yield
    wait_job(server, lambda now: not now["running"])
    import shutil

    for name in set(httpx.get(f"{server}/chorus/runs").json()["runs"]) - before:
        shutil.rmtree(ROOT / "runs" / name)


def test_a_load_run_outlives_its_tab_and_is_found_again(open_page, server):
    page = open_page()
    open_tab(page, "Load")
    set_number(page, "#load-level", 2)
    set_number(page, "#load-requests", 6)
    page.click("#load-run")
    page.wait_for_function("document.querySelector('#load-note').textContent.includes('Started')")
    page.click("#load-run")
    page.wait_for_function("document.querySelector('#load-note').textContent.includes('going on already')")
    page.close()  # nobody looks any more
    wait_job(server, lambda now: now["done"] >= 3)
    page = open_page()
    open_tab(page, "Load")
    page.wait_for_function("document.querySelector('#load-state').textContent.includes('Done')", timeout=240_000)
    state = job(server)
    assert state["kind"] == "load" and not state["error"]
    assert "TTFA: p50" in page.inner_text("#load-charts") and "In flight" in page.inner_text("#load-charts")
    assert page.locator("#load-charts svg polyline").count() >= 4
    shoot(page, "load-tab")
    assert "c2" in page.inner_text("#load-table") and "/6" in page.inner_text("#load-table")
    report = httpx.get(f"{server}/chorus/runs/{state['name']}/report.html")
    assert report.status_code == 200 and "2 at once" in report.text
    rows = httpx.get(f"{server}/chorus/runs/{state['name']}/requests.jsonl").text.splitlines()
    assert sum(not json.loads(row)["warmup"] for row in rows) == 6


def test_stop_ends_a_load_run_and_keeps_what_was_measured(open_page, server):
    page = open_page()
    open_tab(page, "Load")
    set_number(page, "#load-level", 1)  # Stop waits for those that are running
    set_number(page, "#load-requests", 500)
    page.click("#load-run")
    wait_job(server, lambda now: now["running"] and now["done"] >= 3)
    page.click("#load-stop")
    state = wait_job(server, lambda now: not now["running"], 120)
    page.wait_for_function("document.querySelector('#load-state').textContent.includes('Stopped')")
    assert not state["error"]
    summary = httpx.get(f"{server}/chorus/runs/{state['name']}/summary.json").json()
    assert summary["state"] == "stopped" and 2 <= summary["figures"][0]["load"]["requests"] < 500


def test_a_against_b_restarts_the_engine_and_brings_it_back(open_page, server):
    before = httpx.get(f"{server}/chorus/status").json()
    page = open_page()
    open_tab(page, "Load")
    set_number(page, "#load-level", 1)
    set_number(page, "#load-requests", 2)
    page.click("#load-ab button")
    page.check("#load-against input")
    page.fill("#load-other textarea", "stream.chunk_schedul: [4]")
    page.click("#load-run")
    page.wait_for_function("document.querySelector('#load-note').textContent.includes('did you mean')")
    page.fill("#load-other textarea", "stream.chunk_schedule: [8]")
    page.click("#load-run")
    page.wait_for_function("document.querySelector('#load-note').textContent.includes('Started')")
    state = wait_job(server, lambda now: not now["running"], 400)
    assert not state["error"], state
    facts = httpx.get(f"{server}/chorus/runs/{state['name']}/run.json").json()
    assert [s["variant"] for s in facts["sessions"]] == ["A", "B", "B", "A"]
    assert facts["targets"]["A"]["config_hash"] != facts["targets"]["B"]["config_hash"]
    found = httpx.get(f"{server}/chorus/runs/{state['name']}/compare.json").json()["findings"]
    assert any(f["name"].startswith("TTFA") for f in found)
    assert httpx.get(f"{server}/chorus/status").json()["state"] == before["state"] == "ready"


def test_a_quality_run_shows_every_sentence_and_its_report(open_page, server):
    page = open_page(height=1300)
    open_tab(page, "Quality")
    set_number(page, "#quality-size", 2)
    page.click("#quality-run")
    page.wait_for_function("document.querySelector('#quality-note').textContent.includes('Started')")
    page.wait_for_function("document.querySelector('#quality-state').textContent.includes('Done')", timeout=300_000)
    state = job(server)
    assert not state["error"] and state["kind"] == "quality"
    page.wait_for_function("document.querySelectorAll('#quality-table audio').length === 2")
    table = page.inner_text("#quality-table")
    assert "Asked, and heard" in table and "%" in table
    # A clip can be played: the browser decodes it.
    seconds = page.evaluate(
        """async () => { const a = document.querySelector('#quality-table audio'); a.load();
        await new Promise((done, fail) => { a.onloadedmetadata = done; a.onerror = fail; }); return a.duration; }"""
    )
    assert seconds > 0
    page.click("#quality-earlier button")
    page.click("#quality-look")
    page.wait_for_function(f"document.querySelector('#quality-links').textContent.includes('{state['name']}')")
    shoot(page, "quality-tab")
    report = httpx.get(f"{server}/chorus/runs/{state['name']}/report.html").text
    assert "The worst clips" in report and "whisper-tiny.en" in report and "GE2E" in report


def test_names_are_names_and_never_paths(server):
    for name in ("..", "%2e%2e", "a%2f..%2f..", ".git"):
        assert httpx.get(f"{server}/chorus/runs/{name}/run.json").status_code in (400, 404)
    assert httpx.get(f"{server}/chorus/runs/none/audio/..%2f..%2frun.json").status_code == 404
