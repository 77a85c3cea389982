"""`python -m engine serve`, as its operator meets it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import yaml

from tests.conftest import RANDOM_BASE, ROOT, small_engine_config
from tests.processes import gone

pytestmark = pytest.mark.slow


def serve(*arguments, stderr=subprocess.PIPE, **environment):
    command = [sys.executable, "-m", "engine", "serve", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=stderr, text=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "nothing.yaml"], "nothing.yaml"),
        (["--set", "talker.max_num_seq=3"], "max_num_seqs"),
        (["--model", "/nowhere/at-all", "--port", "0"], "/nowhere/at-all"),
    ],
)
def test_what_cannot_start_says_why_and_ends(arguments, said):
    process = serve(*arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_sigterm_while_loading_ends_in_good_order(tmp_path):
    with (tmp_path / "log").open("w") as log:
        process = serve("--port", "0", "--model", str(RANDOM_BASE), stderr=log)
    try:
        while "Uvicorn running" not in (tmp_path / "log").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert all(gone(child.pid, 3) for child in children)
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()


def test_start_ready_speak_and_no_orphan_when_killed(tmp_path):
    settings = small_engine_config(trace=str(tmp_path / "trace.jsonl")).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--config", str(tmp_path / "config.yaml"), "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = serve(*arguments, stderr=log, CHORUS_API_KEY="secret")
    url = f"http://127.0.0.1:{port}"
    try:
        states, started = [], time.monotonic()
        while "ready" not in states:
            assert process.poll() is None and time.monotonic() - started < 250, states
            try:
                response = httpx.get(f"{url}/ready", timeout=5)
            except httpx.ConnectError:
                continue
            states.append(response.json()["status"])
            assert response.status_code == (200 if states[-1] == "ready" else 503)
            if states[-1] == "starting" and states.count("starting") == 1:
                assert httpx.get(f"{url}/health").status_code == 200  # alive, though not ready
                refused = httpx.post(
                    f"{url}/v1/audio/speech", json={"input": "Hi."}, headers={"Authorization": "Bearer secret"}
                )
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_closed"
            time.sleep(0.25)
        assert states[0] == "starting"  # the port was open while the engine loaded
        body = {"input": "Hello.", "max_new_tokens": 6, "response_format": "pcm"}
        assert httpx.post(f"{url}/v1/audio/speech", json=body).status_code == 401
        response = httpx.post(
            f"{url}/v1/audio/speech", json=body, headers={"Authorization": "Bearer secret"}, timeout=60
        )
        assert response.status_code == 200 and len(response.content) in range(3840, 6 * 3840 + 1, 3840)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        time.sleep(2.5)  # a kill may cost the trace its last second
        process.kill()
        assert all(gone(child.pid, 3) for child in children)
    finally:
        process.kill()
        process.wait()
    tables = subprocess.run(
        [sys.executable, "-m", "engine", "trace-tables", str(tmp_path / "trace.jsonl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    row = next(line for line in tables.splitlines() if line.startswith(response.headers["x-request-id"][:12]))
    assert row.split()[-1] in ("stop", "length") and "-" not in row.split()[1:5], row  # enqueue to first byte
