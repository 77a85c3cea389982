"""The real page: app.py with a real engine on random weights, driven by a headless Chromium without the internet."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile as sf
import soxr
import yaml

from tests.conftest import RANDOM_BASE, ROOT, small_engine_config

LOCAL = ("data:", "blob:", "about:")
VOICES = ROOT / "assets" / "voices"
NAME = "chorus.test"  # what the browser takes for this machine's name in a network
START_S = 240  # two busy cores load torch, vLLM and Gradio
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    f"--host-resolver-rules=MAP {NAME} 127.0.0.1",
]


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="session")
def server(work) -> str:
    """The address of a running `app.py`; ended with the session."""
    overlay = small_engine_config(voices_dir=str(work / "voices"), model=str(RANDOM_BASE)).model_dump(mode="json")
    (work / "page.yaml").write_text(yaml.safe_dump(overlay))
    with serving(work, work / "page.yaml") as url:
        yield url


@contextlib.contextmanager
def serving(folder: Path, config: Path, *flags: str) -> Iterator[str]:
    """The address of `app.py` on a free port, once its engine is ready. Its output goes to `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "app.log"
    command = [sys.executable, "app.py", "--port", str(port), "--config", str(config), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        app = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env)
    url = f"{'https' if '--https' in flags else 'http'}://127.0.0.1:{port}"
    word = flags[flags.index("--password") + 1] if "--password" in flags else ""
    try:
        wait_ready(app, url, log, word)
        yield url
    finally:
        app.send_signal(signal.SIGINT)
        try:
            app.wait(30)
        except subprocess.TimeoutExpired:
            app.kill()
            app.wait()
            pytest.fail("the app did not end by itself")


def wait_ready(app: subprocess.Popen, url: str, log: Path, password: str) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        assert app.poll() is None, log.read_text()[-3000:]
        try:
            state = httpx.get(f"{url}/chorus/status", timeout=5, verify=False, auth=("x", password)).json()
        except httpx.HTTPError:
            state = {}
        assert state.get("state") != "failed", state
        if state.get("state") == "ready":
            return
        time.sleep(0.3)
    raise AssertionError(f"the engine was not ready after {START_S} s: {log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def browser(work, microphone_file):
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        flags = [*FLAGS, f"--use-file-for-fake-audio-capture={microphone_file}"]
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Opens the page; afterwards no script may have failed and nothing may have been asked of another host."""
    contexts, faults = [], []

    def opened(
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        base: str = server,
        script: str = "",
        banner: str = "Random weights",
        **options,
    ):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"script: {error}"))
        page.on("request", lambda r: faults.append(f"asked {r.url}") if not r.url.startswith((*LOCAL, base)) else None)
        page.add_init_script(script)
        page.goto(base)
        page.wait_for_selector("#speak")
        page.wait_for_function("window.chorus !== undefined")
        page.wait_for_function("words => document.querySelector('.ch-banner')?.textContent.includes(words)", arg=banner)
        page.wait_for_function("document.querySelector('#ready input')?.value.length > 0")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults, faults


@pytest.fixture
def page(open_page):
    return open_page()


@pytest.fixture(scope="session")
def speech() -> np.ndarray:
    return sf.read(VOICES / "kokoro_bf_emma.flac", dtype="float32")[0]


@pytest.fixture(scope="session")
def stereo_file(work, speech) -> Path:
    wide = soxr.resample(speech, 24_000, 48_000)
    sf.write(work / "stereo.wav", np.stack([wide, 0.5 * wide], axis=1), 48_000)
    return work / "stereo.wav"


@pytest.fixture(scope="session")
def mp4_file(work, speech) -> Path:
    from tests.test_audio import ffmpeg_bytes

    (work / "phone video.mp4").write_bytes(ffmpeg_bytes(soxr.resample(speech, 24_000, 48_000), 48_000, "mp4", "aac"))
    return work / "phone video.mp4"


@pytest.fixture(scope="session")
def microphone_file(work, speech) -> Path:
    """What the fake microphone hears, over and over."""
    sf.write(work / "microphone.wav", soxr.resample(speech, 24_000, 48_000), 48_000, subtype="PCM_16")
    return work / "microphone.wav"


def active(server: str) -> float:
    """Requests that run or wait in the engine."""
    metrics = httpx.get(f"{server}/chorus/status").json()["metrics"]
    return metrics["active"] + metrics["waiting"]


def wait_idle(server: str, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if active(server) == 0:
            return True
        time.sleep(0.05)
    return False
