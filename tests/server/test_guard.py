"""Pages of other sites are kept out of everything that changes something: the API, the page's routes, Gradio's."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient

from engine.api.guard import cross_site
from engine.api.settings import ServerSettings
from engine.server import create_app
from tests.server.serving import serving
from ui import routes
from ui.references import References

STRANGER = {"sec-fetch-site": "cross-site"}
CHANGING = [
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/audio/voices"),
    ("DELETE", "/v1/audio/voices/Emma"),
    ("POST", "/chorus/speak"),
    ("POST", "/chorus/cancel/1234"),
    ("POST", "/chorus/encode/wav"),
    ("POST", "/chorus/routes/yet/to/come"),
    ("PUT", "/chorus/speak"),
]


def page_app(engine, **settings):
    app = create_app(engine, ServerSettings(**settings))
    app.include_router(routes.router(SimpleNamespace(engine=engine), References()))
    return app


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_nothing_can_be_changed_from_another_site(engine, method, path):
    client = TestClient(page_app(engine))
    answer = client.request(method, path, content=b"{}", headers=STRANGER)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "cross_site", answer.text
    assert client.request(method, path, content=b"{}").status_code != 403
    assert client.request(method, path, content=b"{}", headers={"sec-fetch-site": "same-origin"}).status_code != 403


def test_a_speak_of_the_page_is_refused_before_it_speaks(engine):
    client = TestClient(page_app(engine))
    answer = client.post("/chorus/speak", json={"text": "Hello."}, headers=STRANGER)
    assert answer.status_code == 403 and engine.requests == []
    assert client.post("/chorus/speak", json={"text": "Hello."}).status_code == 200
    assert len(engine.requests) == 1


def test_an_api_key_opens_the_api_and_not_the_page(engine):
    """Under /v1 the key proves who asks. The page's routes ask for none, so there a stranger stays one."""
    client = TestClient(page_app(engine, api_key="secret"))
    headers = STRANGER | {"authorization": "Bearer secret"}
    assert client.post("/v1/audio/speech", json={"input": "Hi."}, headers=headers).status_code == 200
    assert client.post("/chorus/speak", json={"text": "Hello."}, headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/docs"])
def test_looking_is_allowed(engine, path):
    assert TestClient(page_app(engine)).get(path, headers=STRANGER).status_code == 200


@pytest.mark.parametrize(
    ("headers", "stranger"),
    [
        ({}, False),  # a program
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://evil.example"}, False),  # the browser knows better
        ({"origin": "http://tts.lan:7860"}, False),
        ({"origin": "http://TTS.lan:7860"}, False),
        ({"origin": "http://tts.lan:7861"}, True),
        ({"origin": "http://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": "http://[bad"}, True),
        ({"origin": ""}, True),
        ({"origin": "https://speech.example", "x-forwarded-host": "speech.example"}, False),
    ],
)
def test_without_fetch_metadata_the_origin_tells(headers, stranger):
    """Over plain http to another machine of the network, browsers send Origin alone."""
    sent = {"host": "tts.lan:7860"} | headers
    assert cross_site({name.encode(): value.encode() for name, value in sent.items()}) is stranger


@pytest.mark.slow
def test_gradio_beside_it_is_guarded_too(engine):
    import gradio as gr

    with gr.Blocks() as blocks:
        box = gr.Textbox()
        box.change(lambda text: text, box, box, api_name="echo")
    app = gr.mount_gradio_app(page_app(engine), blocks, path="/")
    with serving(app) as url:
        path = f"{url}/gradio_api/call/echo"
        for headers in (STRANGER, {"origin": "https://evil.example"}):
            assert httpx.post(path, json={"data": ["x"]}, headers=headers).status_code == 403
        for headers in ({}, {"sec-fetch-site": "same-origin"}, {"origin": url}):
            assert httpx.post(path, json={"data": ["x"]}, headers=headers).status_code == 200
