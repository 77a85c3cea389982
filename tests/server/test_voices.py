"""The voice library over HTTP."""

from __future__ import annotations

import numpy as np
import pytest
from fastapi.testclient import TestClient

from engine.audio import encode_audio
from engine.server import create_app
from tests.server.standin import StandIn

URL = "/v1/audio/voices"
CLIP = encode_audio((0.3 * np.sin(np.arange(48_000) * 0.05 * (1 + np.arange(48_000) / 48_000))).astype(np.float32))


@pytest.fixture
def client(engine):
    return TestClient(create_app(engine), raise_server_exceptions=False)


def save(client, name="Ada", clip=CLIP, **fields):
    fields = {"name": name, "consent": "true", "ref_text": "What it says.", **fields}
    return client.post(URL, data=fields, files={"audio_sample": ("clip.wav", clip, "audio/wav")})


def test_save_list_speak_delete(client, engine):
    response = save(client)
    assert response.status_code == 201, response.text
    voice = response.json()
    assert (voice["id"], voice["kind"], voice["ref_text"]) == ("Ada", "saved", "What it says.")
    assert voice["seconds"] == pytest.approx(2.0, abs=0.1)
    listed = client.get(URL).json()
    assert "Ada" in listed["voices"] and voice in listed["data"]
    assert client.post("/v1/audio/speech", json={"input": "Hi.", "voice": "ada"}).status_code == 200
    assert client.delete(f"{URL}/ADA").json() == {"id": "ADA", "object": "voice", "deleted": True}
    assert "Ada" not in client.get(URL).json()["voices"]
    gone = client.delete(f"{URL}/Ada")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "unknown_voice"


def test_bundled_voices_are_there_and_stay(client, engine):
    [first, *_] = client.get(URL).json()["data"]
    assert first["kind"] == "bundled"
    response = client.delete(f"{URL}/{first['id']}")
    assert response.status_code == 400 and "bundled" in response.json()["error"]["message"]
    assert save(client, name=first["id"]).status_code == 400


def test_a_taken_name_needs_overwrite(client):
    assert save(client).status_code == 201
    assert save(client, name="ADA").json()["error"]["param"] == "name"
    assert save(client, overwrite="true", ref_text="Other words.").json()["ref_text"] == "Other words."


@pytest.mark.parametrize("name", ["", "../evil", "/etc/passwd", "a\x00b", "..", "x" * 65, "a\nb/c"])
def test_names_are_never_paths(client, name, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    response = save(client, name=name)
    assert response.status_code == 400 and response.json()["error"]["param"] == "name", response.text
    assert sorted(tmp_path.rglob("*")) == before
    assert client.delete(f"{URL}/%2e%2e%2fevil").status_code in (400, 404)


@pytest.mark.parametrize(
    ("fields", "clip", "param"),
    [
        ({"consent": "false"}, CLIP, "consent"),
        ({"consent": "maybe"}, CLIP, "consent"),
        ({}, b"", "audio_sample"),
        ({}, b"not audio at all", "audio_sample"),
        ({}, CLIP[:6000], "audio_sample"),
        ({"colour": "blue"}, CLIP, "colour"),
        ({"ref_text": "x" * 3000}, CLIP, "ref_text"),
    ],
)
def test_what_is_refused_names_its_field(client, engine, fields, clip, param):
    response = save(client, clip=clip, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert "Ada" not in client.get(URL).json()["voices"]


def test_consent_is_asked_for(client):
    response = client.post(URL, data={"name": "Ada"}, files={"audio_sample": CLIP})
    assert response.status_code == 400 and response.json()["error"]["param"] == "consent"


def test_a_recording_is_needed_as_a_file(client):
    assert client.post(URL, files={"name": (None, "Ada")}).json()["error"]["param"] == "audio_sample"
    response = client.post(URL, files={"name": (None, "Ada"), "audio_sample": (None, "text")})
    assert response.json()["error"]["param"] == "audio_sample"
    assert client.post(URL, json={"name": "Ada"}).status_code == 415


def test_preset_speakers_are_listed_and_nothing_is_saved(tmp_path):
    client = TestClient(create_app(StandIn(tmp_path, task="CustomVoice")))
    assert client.get(URL).json()["voices"] == ["ryan", "vivian"]
    response = save(client)
    assert response.status_code == 400 and response.json()["error"]["param"] == "audio_sample"
