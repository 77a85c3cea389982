"""The API on the real engine, in a child process, under clients who err, leave and crowd."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections import Counter

import httpx
import numpy as np
import openai
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from engine.audio import pcm16
from engine.request import SpeechRequest
from engine.server import create_app
from tests.processes import shared_process
from tests.server.serving import serving, wait_until

pytestmark = pytest.mark.slow
URL = "/v1/audio/speech"
REQUESTS, AT_ONCE = 300, 16  # the engine speaks as many at once
FRAME_BYTES = 2 * 1920


@pytest.fixture(scope="module")
def real():
    return shared_process()


@pytest.fixture(scope="module")
def base_url(real):
    with serving(create_app(real)) as url:
        yield url


GAUGES = ("active", "waiting", "talker_slots_free", "talker_kv_blocks_free", "codec_slots_free")


def gauges(real):
    return {name: value for name, value in real.metrics().items() if name in GAUGES}


@pytest.fixture(scope="module")
def at_rest(real):
    """The engine's gauges before the first request of the tests."""
    return gauges(real)


def test_openai_client_hears_what_the_engine_says(real, base_url):
    name = real.voices.list()[0].name
    stream = real.stream(SpeechRequest("Hello there.", voice=name, seed=4, max_frames=15))
    want = pcm16(np.concatenate([chunk.pcm for chunk in stream]))
    extra = {"seed": 4, "max_new_tokens": 15}
    fields = {"model": "tts-1", "voice": name, "input": "Hello there.", "extra_body": extra}
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0) as client:
        whole = client.audio.speech.create(response_format="wav", **fields).read()
        with client.audio.speech.with_streaming_response.create(response_format="pcm", **fields) as response:
            parts = list(response.iter_bytes(chunk_size=None))
    for got in (whole[44:], b"".join(parts)):
        samples = np.frombuffer(got, "<i2")
        assert len(samples) == 15 * 1920 == len(want)
        assert np.abs(samples.astype(int) - want).max() <= 4  # float32 sums in another order
    assert len(parts) >= 3


def test_a_client_that_leaves_frees_the_real_slot(real, base_url, at_rest):
    async def leave():
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            body = {"input": "A longer sentence, for a longer while.", "stream": True, "max_new_tokens": 250}
            async with client.stream("POST", URL, json=body) as response:
                async for _ in response.aiter_raw():
                    return response.headers["x-request-id"]

    before = real.metrics().get("finished_cancelled", 0)
    asyncio.run(leave())
    assert wait_until(lambda: real.metrics().get("finished_cancelled", 0) == before + 1, 5)
    assert wait_until(lambda: gauges(real) == at_rest), gauges(real)


def test_the_schema_finds_no_fault_in_the_real_engine(real):
    """As test_schema.py, with texts, limits and sampling settings that reach the models."""
    operation = schemathesis.openapi.from_asgi("/openapi.json", create_app(real))["/v1/audio/speech"]["POST"]
    answers: Counter = Counter()

    @given(case=operation.as_strategy())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def ask(case):
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # mostly wrong, and then nothing else is tried
            case.body.pop("ref_audio", None)
        status = case.call().status_code
        answers[status] += 1
        # 504 is what a deadline of less than a millisecond asks for.
        assert status < 500 or (status == 504 and "deadline_s" in case.body), status

    ask()
    print(f"\nanswers: {dict(answers)}")
    assert answers[200] >= 3 and answers[400] >= 3
    assert real.state == "ready" and real.restarts == 0


BAD = [
    {"input": ""},
    {"input": "?!"},
    {"input": "Hi.", "voice": "nobody"},
    {"input": "Hi.", "seed": -5},
    {"input": "Hi.", "language": "klingon"},
    {"input": "Hi.", "max_new_tokens": 100_000},
    {"input": "Hi.", "instructions": "sad"},
    {"input": "Hi.", "top_p": 7},
    {"input": "Hi.", "ref_audio": "data:audio/wav;base64,AAAA"},
    {"input": "Hi.", "chunk_schedule": [0]},
    {"input": "Hi.", "nonsense": 1},
]


async def leave_early(url, body, after_s) -> str:
    """Send a whole request and hang up, mostly before anything has come back."""
    data = json.dumps(body).encode()
    head = f"POST {URL} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head.encode() + b"\r\n\r\n" + data)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.close()
    return "left"


async def one(client, chance: random.Random, names, clip) -> str:
    """One caller; says how it ended for them: done, left, refused, failed, or what was wrong with it."""
    kind = chance.choice(["whole", "stream", "stream", "events", "leave", "leave", "leave early", "bad", "clone"])
    if kind == "bad":
        response = await client.post(URL, json=chance.choice(BAD))
        return "refused" if response.status_code in (400, 404) else f"bad input got {response.status_code}"
    frames = chance.randint(2, 24)
    body = {"input": "Word " * chance.randint(1, 12), "max_new_tokens": frames, "voice": chance.choice(names)}
    body["response_format"] = "pcm"
    if kind == "clone":
        body |= {"voice": "default", "ref_audio": clip, "x_vector_only_mode": True}
    if kind in ("whole", "clone"):
        body["stream"] = False
    if kind == "events":
        body["stream_format"] = "sse"
    if kind == "leave early":
        return await leave_early(client.base_url, body, chance.uniform(0.0, 0.2))
    async with client.stream("POST", URL, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return "refused" if response.status_code == 503 else f"failed with {response.status_code}"
        data = b""
        async for part in response.aiter_raw():
            data += part
            if kind == "leave" and chance.random() < 0.5:
                return "left"
    if kind == "events":
        return "done" if b"speech.audio.done" in data else "events without an end"
    sent = len(data) / FRAME_BYTES
    # Random weights may say the end token, so fewer frames are right, but never half of one.
    return "done" if sent == int(sent) and 1 <= sent <= frames else f"{sent} frames of {frames}"


def counted(url) -> Counter:
    text = httpx.get(f"{url}/metrics").text
    prefix = 'chorus_speech_requests_total{outcome="'
    lines = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    return Counter({line.split('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines})


def resident(real) -> float:
    """MiB of the child, which holds the models and every request's state."""
    return psutil.Process(real._child.process.pid).memory_info().rss / 2**20


def test_three_hundred_requests_leave_nothing_behind(real, base_url, at_rest):
    names = [entry.name for entry in real.voices.list()]
    clip = "data:audio/flac;base64," + base64.b64encode(real.voices.audio_bytes(names[0])).decode()
    before, memory = counted(base_url), []
    own = psutil.Process()

    async def run():
        ends: Counter = Counter()
        chance = random.Random(300)
        todo = iter(range(REQUESTS))
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:

            async def caller():
                for number in todo:
                    if number % 50 == 0:
                        memory.append((number, resident(real), own.memory_info().rss / 2**20))
                    ends[await one(client, random.Random(chance.random()), names, clip)] += 1

            await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        return ends

    ends = asyncio.run(run())
    assert wait_until(lambda: gauges(real) == at_rest, 20), (gauges(real), at_rest)
    memory.append((REQUESTS, resident(real), own.memory_info().rss / 2**20))
    assert sum(ends.values()) == REQUESTS
    assert set(ends) <= {"done", "left", "refused"}, ends
    assert wait_until(lambda: sum((counted(base_url) - before).values()) == REQUESTS, 10), counted(base_url) - before
    outcomes = counted(base_url) - before
    # A client may leave after the last byte was sent: the server then says done, the client left.
    assert outcomes["failed"] == 0 and outcomes["refused"] == ends["refused"]
    assert outcomes["done"] >= ends["done"] and outcomes["cancelled"] <= ends["left"]
    assert real.restarts == 0
    print(f"\nends: {dict(ends)}; server: {dict(outcomes)}; MiB (child, server): {memory}")
    for which in (1, 2):
        # Peaks: a single reading moves by 15 MiB with what the allocator happens to have given back.
        early, late = (
            [entry[which] for entry in memory if low <= entry[0] <= high] for low, high in ((50, 150), (200, 300))
        )
        assert max(late) - max(early) < 12, f"memory grows: {memory}"
