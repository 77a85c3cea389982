"""The web application around the page: password, certificate, the stream's wire format, references."""

from __future__ import annotations

import ssl
import stat

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from engine.audio import load_audio
from engine.errors import UnknownVoice
from tests.page.conftest import VOICES
from ui import serve, wire
from ui.references import PREFIX, References


def guarded(password: str) -> TestClient:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("in"))])
    return TestClient(serve.BasicPassword(app, password))


def test_the_password_opens_and_nothing_else_does():
    client = guarded("pässword: 1")
    assert client.get("/").status_code == 401
    assert client.get("/").headers["www-authenticate"].startswith("Basic")
    for wrong in ("", "pässword", "Pässword: 1"):
        assert client.get("/", headers=basic("me", wrong)).status_code == 401
    for header in ("Basic", "Basic !!!", "Bearer abc", "Basic " + "A" * 5):
        assert client.get("/", headers={"Authorization": header}).status_code == 401
    assert client.get("/", headers=basic("anyone", "pässword: 1")).text == "in"


def test_an_empty_password_is_no_password_and_is_refused(capsys):
    """As `--password "$WORD"` gives it where WORD is not set."""
    import app

    with pytest.raises(SystemExit) as ended:
        app.main(["--password", ""])
    assert ended.value.code == 2 and "--password is empty" in capsys.readouterr().err


def basic(user: str, word: str) -> dict[str, str]:
    import base64

    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{word}".encode()).decode()}


def test_the_certificate_fits_its_key_and_the_key_is_private():
    certificate, key = serve.self_signed("192.168.0.7")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    from cryptography import x509

    names = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "192.168.0.7" in str(names.get_values_for_type(x509.IPAddress))
    assert "localhost" in names.get_values_for_type(x509.DNSName)


def test_records_come_back_as_they_were_sent():
    pcm = np.linspace(-1, 1, 1920, dtype=np.float32)
    data = (
        wire.event("start", id="x", text="Grüße") + wire.audio(pcm) + wire.audio(pcm[:0]) + wire.event("end", frames=1)
    )
    start, sound, nothing, end = wire.read(data)
    assert start == {"event": "start", "id": "x", "text": "Grüße"} and end == {"event": "end", "frames": 1}
    assert np.array_equal(sound, pcm) and len(nothing) == 0


def test_references_are_found_by_their_hash_alone_and_drop_the_oldest():
    kept = References(capacity=2)
    clips = [load_audio(VOICES / f"kokoro_{name}.flac") for name in ("af_heart", "bf_emma", "am_puck")]
    tokens = [kept.add(clip) for clip in clips]
    assert all(token.startswith(PREFIX) and len(token) == len(PREFIX) + 64 for token in tokens)
    assert kept.get(tokens[2]) is clips[2]
    for token in (tokens[0], PREFIX, PREFIX + "../x", "kokoro_af_heart.flac"):
        with pytest.raises(UnknownVoice, match="upload or record"):
            kept.get(token)
