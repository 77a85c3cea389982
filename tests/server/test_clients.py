"""Real connections: OpenAI's own client, and clients that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import time

import httpx
import numpy as np
import openai
import pytest

from engine.api.settings import ServerSettings
from engine.server import create_app
from engine.trace import Trace
from engine.trace_tables import read_trace
from tests.server.serving import serving, wait_until
from tests.server.standin import StandIn, expected_pcm


@pytest.fixture
def slow(tmp_path):
    """Twenty frames take half a second."""
    return StandIn(tmp_path / "voices", pace_s=0.025)


@contextlib.contextmanager
def openai_client(engine, **settings):
    with serving(create_app(engine, ServerSettings(**settings))) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            yield client


def test_openai_client_whole_file(engine):
    with openai_client(engine, api_key="secret") as client:
        response = client.audio.speech.create(model="tts-1", voice="default", input="Hello.", response_format="wav")
        np.testing.assert_array_equal(np.frombuffer(response.read()[44:], "<i2"), expected_pcm(20))
        assert [model.id for model in client.models.list()] == ["stand-in"]


def test_openai_client_streams_while_speech_is_made(slow):
    with openai_client(slow) as client:
        with client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="default", input="Hello.", response_format="pcm"
        ) as response:
            times, data = [], b""
            for part in response.iter_bytes(chunk_size=None):
                times.append(time.monotonic())
                data += part
    np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_pcm(20))
    assert len(times) >= 5 and times[-1] - times[0] > 0.3  # the first part came long before the last was made


def test_openai_client_extensions_and_events(engine):
    with openai_client(engine) as client:
        extra = {"seed": 11, "chunk_schedule": [10]}
        with client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="default", input="Hi.", stream_format="sse", response_format="pcm", extra_body=extra
        ) as response:
            assert response.headers["x-chorus-seed"] == "11"
            events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]


def test_openai_client_understands_the_errors(engine, tmp_path):
    with openai_client(engine, api_key="secret") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")
        assert (missing.value.param, missing.value.code) == ("voice", "unknown_voice")
        with pytest.raises(openai.BadRequestError) as bad:
            client.audio.speech.create(model="tts-1", voice="default", input="Hello.", speed=2)
        assert bad.value.param == "speed"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    with openai_client(StandIn(tmp_path / "v", slots=0, waiting=0)) as client:
        with pytest.raises(openai.InternalServerError) as busy:
            client.audio.speech.create(model="tts-1", voice="default", input="Hello.")
        assert busy.value.status_code == 503 and busy.value.code == "engine_busy"


def test_a_cut_stream_does_not_look_whole(engine):
    """Audio has no place for an error: the connection is closed before its end."""
    with serving(create_app(engine)) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/v1/audio/speech", json={"input": "[break]", "stream": True})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_a_client_that_leaves_cancels_its_request(tmp_path, stream, after_s):
    engine = StandIn(tmp_path / "voices", pace_s=0.05, slots=1, waiting=0)
    app = create_app(engine)
    with serving(app) as url:
        host = url.removeprefix("http://")
        connection = http.client.HTTPConnection(host)
        body = json.dumps({"input": "Hello.", "stream": stream, "max_new_tokens": 200})
        connection.request("POST", "/v1/audio/speech", body, {"content-type": "application/json"})
        assert wait_until(lambda: engine.requests)
        time.sleep(after_s)
        connection.close()
        assert wait_until(lambda: engine.ends == ["cancelled"], 5), engine.ends  # of 10 s
        assert httpx.post(f"{url}/v1/audio/speech", json={"input": "Next."}).status_code == 200
        text = httpx.get(f"{url}/metrics").text
        assert 'chorus_speech_requests_total{outcome="cancelled"} 1.0' in text
        assert "chorus_speech_in_flight 0.0" in text


def test_a_client_that_leaves_in_the_middle_of_its_body(engine):
    with serving(create_app(engine)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.putrequest("POST", "/v1/audio/speech")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "1000")
        connection.endheaders(b'{"input": "Hel')
        time.sleep(0.1)
        connection.close()
        cancelled = 'chorus_speech_requests_total{outcome="cancelled"} 1.0'
        assert wait_until(lambda: cancelled in httpx.get(f"{url}/metrics").text)
        assert engine.requests == []


def test_first_bytes_are_traced(engine, tmp_path):
    trace = Trace(tmp_path / "t.jsonl")
    with serving(create_app(engine, trace=trace)) as url:
        ids = []
        for stream in (True, False):
            response = httpx.post(f"{url}/v1/audio/speech", json={"input": "Hello.", "stream": stream})
            ids.append(response.headers["x-request-id"])
            trace.event("end", ids[-1], reason="stop")
    trace.close()
    data = read_trace(tmp_path / "t.jsonl")
    assert {r.id for r in data.requests if r.first_byte} == set(ids)


def test_many_streams_at_once_do_not_wait_for_each_other(tmp_path):
    engine = StandIn(tmp_path / "voices", pace_s=0.01, slots=60)

    async def run(url):
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"input": "Hello.", "response_format": "pcm"}
            return await asyncio.gather(*(client.post(f"{url}/v1/audio/speech", json=body) for _ in range(60)))

    import asyncio

    with serving(create_app(engine)) as url:
        responses = asyncio.run(run(url))
    want = expected_pcm(20).astype("<i2").tobytes()
    assert all(response.status_code == 200 and response.content == want for response in responses)
