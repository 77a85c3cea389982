"""The real engine in a child process: the same speech, and what happens when the child is killed or replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from engine import process_child
from engine.errors import (
    CheckpointError,
    ChorusError,
    ConfigError,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    InvalidText,
    UnknownVoice,
)
from engine.process import EngineProcess
from engine.request import SpeechRequest
from tests.conftest import ROOT, small_engine_config
from tests.processes import gone

pytestmark = pytest.mark.slow
TEXT = "Some words to speak for a while."


@pytest.fixture(scope="module")
def process():
    with EngineProcess(small_engine_config()) as engine:
        yield engine


@pytest.fixture(scope="module")
def name(process):
    return process.voices.list()[0].name


def pcm_of(stream):
    return np.concatenate([chunk.pcm for chunk in stream])


def pid_of(process) -> int:
    return process._child.process.pid


def test_the_child_speaks_like_the_engine_in_this_process(process, engine, name):
    assert process.state == "ready" and process.failure is None
    assert process.info.checkpoint_id == engine.info.checkpoint_id
    assert pid_of(process) != os.getpid()
    request = {"voice": name, "seed": 5, "max_frames": 12}
    here = engine.stream(SpeechRequest(TEXT, **request))
    there = process.stream(SpeechRequest(TEXT, **request))
    assert there.text == here.text and there.seed == 5
    assert there.input_tokens == here.input_tokens > 7  # words and stops: at least one token each
    np.testing.assert_allclose(pcm_of(there), pcm_of(here), atol=1e-4)
    assert there.result.frames == 12 and there.result.finish_reason == here.result.finish_reason


def test_the_child_tells_every_library_how_many_threads_it_may_have(monkeypatch):
    """torch and vLLM bring an OpenMP each: only the environment reaches both, and only before they are loaded."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process_child._limit_threads({"threads": 1})
    assert "OMP_NUM_THREADS" not in os.environ  # torch is here already
    monkeypatch.delitem(sys.modules, "torch")
    process_child._limit_threads({"threads": 0})
    assert "OMP_NUM_THREADS" not in os.environ
    process_child._limit_threads({"threads": 1})
    assert os.environ["OMP_NUM_THREADS"] == "1"
    process_child._limit_threads({"threads": 2})  # set by now, as by a user
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_clip_is_prepared_across_the_border(process, engine, name):
    data = process.voices.audio_bytes(name)
    there = process.prepare_voice(data, transcript="What it says.")
    here = engine.prepare_voice(data, transcript="What it says.")
    np.testing.assert_allclose(there.speaker_embedding, here.speaker_embedding, atol=1e-5)
    np.testing.assert_array_equal(there.codes, here.codes)
    assert there.audio_hash == here.audio_hash
    stream = process.stream(SpeechRequest(TEXT, voice=there, seed=1, max_frames=4))
    assert len(pcm_of(stream)) == 4 * 1920


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"text": "..."}, InvalidText, "text"),
        ({"voice": "nobody"}, UnknownVoice, "voice"),
        ({"max_frames": 100_000}, InvalidRequest, "max_frames"),
        ({"language": "klingon"}, InvalidRequest, "language"),
    ],
)
def test_refusals_keep_their_type_and_field(process, name, fields, kind, field):
    with pytest.raises(kind) as caught:
        process.stream(SpeechRequest(**({"text": TEXT, "voice": name} | fields)))
    assert type(caught.value) is kind and caught.value.field == field


def test_what_is_no_request_harms_nobody(process, name):
    child = pid_of(process)
    for fields in ({"text": None}, {"voice": 5}, {"voice": b"x"}):
        with pytest.raises(ChorusError):
            process.stream(SpeechRequest(**({"text": TEXT, "voice": name} | fields)))
    assert len(pcm_of(process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=4)))) == 4 * 1920
    assert pid_of(process) == child and process.restarts == 0


def test_a_caller_that_must_not_wait_gets_a_future(process, name):
    futures = [process.submit(SpeechRequest(TEXT, voice=name, seed=i, max_frames=4)) for i in range(3)]
    assert [len(pcm_of(future.result(10))) for future in futures] == [4 * 1920] * 3
    refused = process.submit(SpeechRequest(TEXT, voice="nobody"))
    with pytest.raises(UnknownVoice):
        refused.result(10)


def test_an_id_in_use_leaves_its_owner_alone(process, name):
    first = process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=40, id="same"))
    with pytest.raises(Exception, match="in use"):
        process.stream(SpeechRequest(TEXT, voice=name, max_frames=4, id="same"))
    assert len(pcm_of(first)) == 40 * 1920


def test_a_deadline_is_the_same_error_here(process, name):
    with pytest.raises(Exception) as caught:
        pcm_of(process.stream(SpeechRequest(TEXT, voice=name, max_frames=200, deadline_s=1e-6)))
    assert caught.value.code == "deadline_exceeded"


def test_cancel_frees_the_place(process, name):
    stream = process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=200))
    next(stream)
    assert stream.cancel()
    list(stream)
    assert stream.result.finish_reason == "cancelled" and stream.result.frames < 200
    assert not stream.cancel()
    numbers = process.metrics()
    assert numbers["active"] == 0 and numbers["restarts"] == 0


def test_a_killed_child_fails_its_requests_and_comes_back(process, name):
    """SIGKILL while four streams are spoken: a typed error within a second, the next request within thirty."""
    streams = [process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=250)) for _ in range(4)]
    for stream in streams:
        next(stream)
    os.kill(pid_of(process), signal.SIGKILL)
    killed = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineFailed, match="signal 9"):
            for _ in stream:
                pass
    assert time.monotonic() - killed < 1
    assert process.state == "restarting" and "signal 9" in process.last_error
    with pytest.raises(EngineClosed, match="restarting"):
        process.stream(SpeechRequest(TEXT, voice=name))
    assert process.metrics() == {"restarts": 1.0}
    limit = 30 * max(1.0, os.getloadavg()[0] / os.cpu_count())  # a crowded machine gives us a part of its time
    process.wait_ready(timeout_s=limit)
    assert len(pcm_of(process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=4)))) == 4 * 1920
    print(f"speaking again {time.monotonic() - killed:.1f} s after the kill, limit {limit:.0f} s")
    assert time.monotonic() - killed < limit


def test_other_settings_are_a_restart(process, name):
    """Callers are served while the new process imports its libraries, and refused only while it loads."""
    old, asked = pid_of(process), time.monotonic()
    served, refused = [], []

    def keep_calling():
        while process.state != "ready" or pid_of(process) == old:
            try:
                stream = process.stream(SpeechRequest(TEXT, voice=name, max_frames=40))
                ended = (
                    "length" if list(stream) and stream.result.finish_reason == "stop" else stream.result.finish_reason
                )
                (served if ended == "length" else refused).append((time.monotonic(), f"restarting: {ended}"))
            except EngineClosed as error:  # refused, or stopped in the middle
                refused.append((time.monotonic(), error.message))
                time.sleep(0.02)

    caller = threading.Thread(target=keep_calling)
    caller.start()
    process.restart(small_engine_config(**{"talker.max_num_seqs": 2}))
    ready = time.monotonic()
    caller.join()
    assert process.info.config["talker"]["max_num_seqs"] == 2 and process.config.talker.max_num_seqs == 2
    assert gone(old, 1) and process.state == "ready"
    assert process.restarts == 1  # of the crash before; this one was asked for
    assert served and {message for _, message in refused} <= {
        "restarting: cancelled",
        "the engine is restarting; try again when it is ready",
        "the engine is restarting with other settings; send the request again shortly",
    }
    away = ready - refused[0][0]
    print(f"restart {ready - asked:.1f} s, of which away {away:.1f} s; {len(served)} requests served meanwhile")
    assert away < 0.9 * (ready - asked)
    assert len(pcm_of(process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=4)))) == 4 * 1920


@pytest.mark.parametrize("fields", [{"model": "/nowhere/at-all"}, {"device": "cuda"}])
def test_settings_that_cannot_work_disturb_nobody(process, name, fields):
    before = pid_of(process)
    running = process.stream(SpeechRequest(TEXT, voice=name, max_frames=60))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        process.restart(small_engine_config(**fields))
    assert caught.value.field == next(iter(fields))
    assert process.state == "ready" and pid_of(process) == before
    assert len(pcm_of(running)) == running.result.frames * 1920
    assert running.result.finish_reason in ("stop", "length")


def test_settings_that_fail_late_give_way_to_the_old_ones(process, name):
    """Too little memory for one request is found only while the model loads."""
    kept = process.config.hash
    with pytest.raises(ChorusError):
        process.restart(small_engine_config(**{"talker.kv_cache_gib": 1e-6}))
    assert process.state == "restarting"
    process.wait_ready(timeout_s=120)
    assert process.config.hash == kept
    assert len(pcm_of(process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=4)))) == 4 * 1920


def test_closing_ends_everything(process, name):
    stream = process.stream(SpeechRequest(TEXT, voice=name, seed=1, max_frames=250))
    next(stream)
    pid = pid_of(process)
    process.close()
    assert process.state == "closed" and gone(pid, 1)
    with pytest.raises(EngineClosed):
        list(stream)
        raise EngineClosed("ended as " + stream.result.finish_reason)
    with pytest.raises(EngineClosed, match="closed"):
        process.stream(SpeechRequest(TEXT, voice=name))
    process.close()


def test_a_start_that_cannot_work_says_why(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        EngineProcess(small_engine_config(model=str(tmp_path / "nothing")))
    assert caught.value.field == "model"
    with pytest.raises(ConfigError):
        EngineProcess(None, no_such_setting=1)


SCRIPT = """
import time
from engine import process_child
from engine.process import EngineProcess
from tests.conftest import small_engine_config
engine = EngineProcess(small_engine_config(), wait=False)
while engine._child is None: time.sleep(0.01)
print(engine._child.process.pid, flush=True)
time.sleep(600)
"""


def test_a_child_that_loads_dies_with_its_parent():
    """No orphans, even when the parent has no time to say goodbye. (tests/server/test_serve.py: one that serves.)"""
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        time.sleep(1.0)  # in the middle of its imports
    finally:
        parent.kill()
        parent.wait()
    assert gone(pid, 3)
