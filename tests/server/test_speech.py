"""POST /v1/audio/speech: what comes back, what is refused, and in which words."""

from __future__ import annotations

import base64
import io
import json
import struct
import wave

import numpy as np
import pytest
from fastapi.testclient import TestClient

from engine.api.settings import ServerSettings
from engine.audio import encode_audio
from engine.server import create_app
from engine.voices import VoicePrompt
from tests.server.standin import StandIn, expected_pcm

URL = "/v1/audio/speech"
CLIP = encode_audio((0.3 * np.sin(np.arange(48_000) * 0.05 * (1 + np.arange(48_000) / 48_000))).astype(np.float32))


@pytest.fixture
def client(engine):
    return TestClient(create_app(engine), raise_server_exceptions=False)


def refusal(response, status, code, param):
    """Checks OpenAI's error shape; returns the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    return error["message"]


# --- what comes back ------------------------------------------------------------------------------------------


def test_a_wav_file_with_true_sizes_and_how_it_was_made(client):
    response = client.post(URL, json={"input": "Hello there.", "seed": 7})
    assert response.status_code == 200 and response.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    np.testing.assert_array_equal(samples, expected_pcm(20))
    headers = response.headers
    assert headers["x-chorus-seed"] == "7" and headers["x-chorus-finish-reason"] == "stop"
    assert headers["x-chorus-frames"] == "20" and headers["x-chorus-audio-seconds"] == "1.60"
    assert headers["x-chorus-weights"] == "random" and len(headers["x-request-id"]) == 32
    assert float(headers["x-chorus-ttfa-ms"]) >= 0


def test_a_drawn_seed_is_told(client, engine):
    response = client.post(URL, json={"input": "Hello."})
    again = client.post(URL, json={"input": "Hello."})
    assert response.headers["x-chorus-seed"] != again.headers["x-chorus-seed"]


@pytest.mark.parametrize("name", ["wav", "pcm", "flac", "mp3", "opus"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_format_whole_and_streamed(client, name, stream):
    import av

    response = client.post(URL, json={"input": "Hello.", "response_format": name, "stream": stream})
    assert response.status_code == 200
    assert ("content-length" in response.headers) is not stream
    if name == "pcm":
        np.testing.assert_array_equal(np.frombuffer(response.content, "<i2"), expected_pcm(20))
        return
    with av.open(io.BytesIO(response.content)) as file:
        seconds = sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))
    assert abs(seconds - 1.6) < 0.15


def test_a_streamed_wav_has_open_sizes(client):
    data = client.post(URL, json={"input": "Hello.", "stream": True}).content
    assert struct.unpack_from("<I", data, 40)[0] == 0xFFFFFFFF
    np.testing.assert_array_equal(np.frombuffer(data[44:], "<i2"), expected_pcm(20))


@pytest.mark.parametrize(
    ("body", "streams"),
    [
        ({}, False),
        ({"response_format": "pcm"}, True),
        ({"stream_format": "audio"}, True),
        ({"stream": False, "response_format": "pcm"}, False),
    ],
)
def test_what_streams_when_stream_is_left_out(client, body, streams):
    response = client.post(URL, json={"input": "Hello.", **body})
    assert ("content-length" not in response.headers) is streams


def events_of(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_events_as_openai_sends_them(client):
    body = {"input": "Hello.", "stream_format": "sse", "response_format": "pcm", "seed": 3}
    *deltas, done = events_of(client.post(URL, json=body))
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(deltas) == 5  # 1 2 4 8 5 frames
    audio = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    np.testing.assert_array_equal(np.frombuffer(audio, "<i2"), expected_pcm(20))
    assert done["type"] == "speech.audio.done"
    assert "config_hash" in done
    assert done["usage"] == {"input_tokens": 1, "output_tokens": 20, "total_tokens": 21}
    assert (done["finish_reason"], done["seed"], done["audio_seconds"]) == ("stop", 3, 1.6)


def test_every_extension_reaches_the_engine(client, engine):
    body = {
        "input": "Hello.",
        "model": "tts-1",
        "voice": {"id": engine.voices.list()[0].name},
        "task_type": "Base",
        "language": "german",
        "x_vector_only_mode": True,
        "seed": 2**52,
        "max_new_tokens": 9,
        "non_streaming_mode": True,
        "chunk_schedule": [3, 6],
        "deadline_s": 30,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 1,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "subtalker_dosample": False,
        "subtalker_temperature": 0.25,
        "subtalker_top_k": 3,
        "subtalker_top_p": 0.5,
    }
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-chorus-finish-reason"] == "length"
    got = engine.requests[-1]
    assert (got.voice, got.language, got.x_vector_only) == (engine.voices.list()[0].name, "german", True)
    assert (got.seed, got.max_frames, got.non_streaming_text) == (2**52, 9, True)
    assert (got.chunk_schedule, got.deadline_s) == ((3, 6), 30)
    assert got.sampling.given() == {name: body[name] for name in body if name in got.sampling.__dataclass_fields__}


# --- voices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("voice", [None, "default", {"id": "default"}])
def test_the_first_voice_speaks_for_who_names_none(client, engine, voice):
    body = {"input": "Hello."} | ({} if voice is None else {"voice": voice})
    assert client.post(URL, json=body).status_code == 200
    assert engine.requests[-1].voice == engine.voices.list()[0].name


def test_a_clip_as_data_url(client, engine):
    url = "data:audio/wav;base64," + base64.b64encode(CLIP).decode()
    body = {"input": "Hello.", "voice": "default", "ref_audio": url, "ref_text": "Tone."}
    assert client.post(URL, json=body).status_code == 200
    prompt = engine.requests[-1].voice
    assert isinstance(prompt, VoicePrompt) and prompt.transcript == "Tone."


def test_a_clip_as_file_with_form_fields(client, engine):
    fields = {"input": "123", "seed": "5", "chunk_schedule": "[2, 4]", "stream": "true", "temperature": "0.7"}
    response = client.post(URL, data=fields, files={"ref_audio": ("../../x.wav", CLIP, "audio/wav")})
    assert response.status_code == 200, response.text
    got = engine.requests[-1]
    assert (got.text, got.seed, got.chunk_schedule, got.sampling.temperature) == ("123", 5, (2, 4), 0.7)
    assert isinstance(got.voice, VoicePrompt)


def test_speakers_of_a_custom_voice_model(tmp_path):
    engine = StandIn(tmp_path, task="CustomVoice")
    client = TestClient(create_app(engine))
    assert client.post(URL, json={"input": "Hi.", "voice": "vivian", "instructions": "sad"}).status_code == 200
    assert (engine.requests[-1].speaker, engine.requests[-1].instruct) == ("vivian", "sad")
    assert client.post(URL, json={"input": "Hi."}).status_code == 200
    assert engine.requests[-1].speaker == "ryan"
    url = "data:audio/wav;base64," + base64.b64encode(CLIP).decode()
    refusal(client.post(URL, json={"input": "Hi.", "ref_audio": url}), 400, "invalid_request", "ref_audio")
    refusal(
        client.post(URL, json={"input": "Hi.", "x_vector_only_mode": True}),
        400,
        "invalid_request",
        "x_vector_only_mode",
    )


def test_voice_design_takes_no_voice(tmp_path):
    engine = StandIn(tmp_path, task="VoiceDesign")
    client = TestClient(create_app(engine))
    assert client.post(URL, json={"input": "Hi.", "voice": "default", "instructions": "old"}).status_code == 200
    refusal(client.post(URL, json={"input": "Hi.", "voice": "alloy"}), 404, "unknown_voice", "voice")


# --- refusals -------------------------------------------------------------------------------------------------

DATA_URL = "data:audio/wav;base64,"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", "input"),
        ({"input": ""}, 400, "invalid_request", "input"),
        ({"input": " ... \n"}, 400, "invalid_text", "input"),
        ({"input": "😀🎉"}, 400, "invalid_text", "input"),
        ({"input": 5}, 400, "invalid_request", "input"),
        ({"input": "x" * 20_001}, 400, "invalid_text", "input"),
        ({"input": "Hi.", "response_format": "aac"}, 400, "invalid_request", "response_format"),
        ({"input": "Hi.", "speed": 1.5}, 400, "invalid_request", "speed"),
        ({"input": "Hi.", "sped": 1.0}, 400, "invalid_request", "sped"),
        ({"input": "Hi.", "seed": -1}, 400, "invalid_request", "seed"),
        ({"input": "Hi.", "seed": 2**53}, 400, "invalid_request", "seed"),
        ({"input": "Hi.", "seed": "7"}, 400, "invalid_request", "seed"),
        ({"input": "Hi.", "seed": True}, 400, "invalid_request", "seed"),
        ({"input": "Hi.", "stream_format": "ws"}, 400, "invalid_request", "stream_format"),
        ({"input": "Hi.", "chunk_schedule": []}, 400, "invalid_request", "chunk_schedule"),
        ({"input": "Hi.", "chunk_schedule": [0]}, 400, "invalid_request", "chunk_schedule"),
        ({"input": "Hi.", "deadline_s": 0}, 400, "invalid_request", "deadline_s"),
        ({"input": "Hi.", "model": "whisper-1"}, 404, "model_not_found", "model"),
        ({"input": "Hi.", "task_type": "VoiceDesign"}, 400, "invalid_request", "task_type"),
        ({"input": "Hi.", "task_type": "Clone"}, 400, "invalid_request", "task_type"),
        ({"input": "Hi.", "voice": "nobody"}, 404, "unknown_voice", "voice"),
        ({"input": "Hi.", "voice": "../../etc/passwd"}, 400, "invalid_request", "voice"),
        ({"input": "Hi.", "ref_text": "what"}, 400, "invalid_request", "ref_text"),
        ({"input": "Hi.", "ref_audio": "/etc/passwd"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": "file:///etc/passwd"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": "http://127.0.0.1/x.wav"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": "data:audio/wav"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": DATA_URL + "####"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": DATA_URL + "AAAA"}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "ref_audio": DATA_URL}, 400, "invalid_audio", "ref_audio"),
        ({"input": "Hi.", "voice": "nobody", "ref_audio": DATA_URL}, 400, "invalid_request", "voice"),
        ([], 400, "invalid_request", None),
    ],
)
def test_bad_bodies_name_their_field_and_cost_nothing(client, engine, body, status, code, param):
    assert refusal(client.post(URL, json=body), status, code, param)
    assert engine.requests == []


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b'{"input": "\\ud800"}', b'{"input":"Hi.","top_p":NaN}', b"null"]
)
def test_bodies_that_are_no_json_object(client, data):
    response = client.post(URL, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"


def test_other_media_types_are_refused(client):
    response = client.post(URL, content=b"input=Hi", headers={"content-type": "application/x-www-form-urlencoded"})
    refusal(response, 415, "unsupported_media_type", None)


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"input": "Hi.", "seed": "seven"}, {"ref_audio": CLIP}, "seed"),
        ({"input": "Hi.", "ref_audio": "data:,"}, {"ref_audio": CLIP}, "ref_audio"),
        ({"input": "Hi."}, {"voice": CLIP}, "voice"),
        ({"input": ["Hi.", "Ho."]}, {"ref_audio": CLIP}, "input"),
    ],
)
def test_bad_forms_name_their_field(client, fields, files, param):
    refusal(client.post(URL, data=fields, files=files), 400, "invalid_request", param)


def test_a_full_engine_says_when_to_come_back(tmp_path):
    engine = StandIn(tmp_path, slots=0, waiting=0)
    response = TestClient(create_app(engine)).post(URL, json={"input": "Hi."})
    refusal(response, 503, "engine_busy", None)
    assert response.headers["retry-after"] == "3"


def test_a_restarting_engine_refuses(client, engine):
    engine.closed = True
    response = client.post(URL, json={"input": "Hi."})
    assert "restarting" in refusal(response, 503, "engine_closed", None)
    assert "retry-after" in response.headers


# --- failures -------------------------------------------------------------------------------------------------


def test_a_failure_is_a_typed_error_in_a_whole_file(client):
    refusal(client.post(URL, json={"input": "[break] it"}), 500, "engine_failed", None)


def test_a_failure_is_an_event_in_a_stream_of_events(client):
    body = {"input": "[break] it", "stream_format": "sse", "response_format": "pcm"}
    *deltas, error = events_of(client.post(URL, json=body))
    assert len(deltas) == 2 and error["type"] == "error" and error["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_no_sound_is_no_success(client, stream):
    response = client.post(URL, json={"input": "[empty] it", "stream": stream})
    assert "silence" in refusal(response, 500, "engine_failed", None)
    refusal(client.post(URL, json={"input": "[late]", "stream": stream}), 504, "deadline_exceeded", "deadline_s")


def test_outcomes_are_counted_once_each(client, engine):
    for body in ({"input": "Hi."}, {"input": "Hi.", "stream": True}, {"input": ""}, {"input": "[break]"}):
        client.post(URL, json=body)
    client.post(URL, json={"input": "[break]", "stream_format": "sse"})
    text = client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    counts = {o: float(lines[f'chorus_speech_requests_total{{outcome="{o}"}}']) for o in ("done", "refused", "failed")}
    assert counts == {"done": 2, "refused": 1, "failed": 2}
    assert float(lines["chorus_speech_in_flight"]) == 0 == float(lines["chorus_engine_active"])
    assert float(lines["chorus_engine_finished_stop"]) == 2


# --- key and limits -------------------------------------------------------------------------------------------


def test_a_key_guards_the_api_and_nothing_else(engine):
    client = TestClient(create_app(engine, ServerSettings(api_key="secret")))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"authorization": "secret"},
    ):
        response = client.post(URL, json={"input": "Hi."}, headers=headers)
        refusal(response, 401, "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.post(URL, json={"input": "Hi."}, headers={"authorization": "bearer secret"}).status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200


def test_other_sites_pages_are_kept_out_where_no_key_does_it(engine):
    """A form of any page in the user's browser reaches 127.0.0.1; browsers say where it comes from."""
    form = {"data": {"input": "Hi."}, "files": {"ref_audio": CLIP}}
    client = TestClient(create_app(engine))
    refusal(client.post(URL, **form, headers={"sec-fetch-site": "cross-site"}), 403, "cross_site", None)
    assert engine.requests == []
    for site in ("same-origin", "none"):
        assert client.post(URL, **form, headers={"sec-fetch-site": site}).status_code == 200
    client = TestClient(create_app(engine, ServerSettings(api_key="secret")))
    headers = {"sec-fetch-site": "cross-site", "authorization": "Bearer secret"}
    assert client.post(URL, **form, headers=headers).status_code == 200


def test_large_bodies_are_refused_whether_or_not_they_say_so(engine):
    client = TestClient(create_app(engine, ServerSettings(max_body_bytes=2000)), raise_server_exceptions=False)
    body = json.dumps({"input": "x" * 3000}).encode()
    refusal(client.post(URL, content=body, headers={"content-type": "application/json"}), 413, "body_too_large", None)
    pieces = (body[i : i + 500] for i in range(0, len(body), 500))
    refusal(client.post(URL, content=pieces, headers={"content-type": "application/json"}), 413, "body_too_large", None)
    form = {"data": {"input": "Hi."}, "files": {"ref_audio": CLIP}}
    refusal(client.post(URL, **form), 413, "body_too_large", None)


def test_a_clip_beyond_its_limit_is_refused(engine):
    client = TestClient(create_app(engine, ServerSettings(max_reference_bytes=1024)))
    url = "data:audio/wav;base64," + base64.b64encode(CLIP).decode()
    refusal(client.post(URL, json={"input": "Hi.", "ref_audio": url}), 400, "invalid_audio", "ref_audio")
    response = client.post(URL, data={"input": "Hi."}, files={"ref_audio": CLIP})
    refusal(response, 400, "invalid_request", "ref_audio")


def test_too_many_requests_of_one_client(engine):
    client = TestClient(create_app(engine, ServerSettings(requests_per_minute=2)))
    codes = [client.post(URL, json={"input": "Hi."}).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    response = client.post(URL, json={"input": "Hi."})
    refusal(response, 429, "rate_limit_exceeded", None)
    assert 20 <= int(response.headers["retry-after"]) <= 31
    assert client.get("/v1/models").status_code == 200


# --- the rest of the API --------------------------------------------------------------------------------------


def test_models_health_ready(client, engine):
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["task"]) == ("stand-in", "model", "Base")
    assert client.get("/health").json() == {"status": "ready"}
    assert client.get("/ready").json()["status"] == "ready"
    engine.state, engine.last_error = "restarting", "it crashed"
    assert client.get("/health").status_code == 200
    response = client.get("/ready")
    assert response.status_code == 503 and response.json() == {"status": "restarting", "error": "it crashed"}
    engine.state = "failed"
    assert client.get("/health").status_code == 503


def test_unknown_paths_and_methods_answer_in_the_same_shape(client):
    refusal(client.get("/v1/nothing"), 404, "not_found", None)
    response = client.get(URL)
    refusal(response, 405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"


def test_an_unforeseen_fault_tells_nothing_of_the_inside(client, engine):
    engine.stream = lambda request: 1 / 0
    message = refusal(client.post(URL, json={"input": "Hi."}), 500, "error", None)
    assert "division" not in message
