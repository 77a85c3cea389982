"""Reference audio from URLs: only where allowed, never from this network."""

from __future__ import annotations

import asyncio
import base64
import socket

import anyio
import pytest

from engine.api import references
from engine.api.guard import RateLimiter
from engine.api.references import from_data_url, public_address, reference_bytes
from engine.api.settings import ServerSettings
from engine.errors import InvalidAudio

OPEN = ServerSettings(allow_remote_audio=True, remote_timeout_s=2)


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:audio/wav;base64,AAEC", b"\0\1\2"),
        ("data:;base64,AAEC", b"\0\1\2"),
        ("data:audio/wav;codecs=1;base64,AAEC", b"\0\1\2"),
        ("data:,abc%20d", b"abc d"),
        ("data:audio/wav;base64,AAE%3D", b"\0\1"),
    ],
)
def test_data_urls(url, data):
    assert from_data_url(url, 100) == data


@pytest.mark.parametrize(
    "url", ["data:audio/wav;base64", "data:audio/wav;base64,AA!A", "data:;base64,AAA", "data:;base64,ä"]
)
def test_bad_data_urls(url):
    with pytest.raises(InvalidAudio) as caught:
        from_data_url(url, 100)
    assert caught.value.field == "ref_audio"


def test_large_data_urls_are_refused_before_they_are_decoded():
    with pytest.raises(InvalidAudio, match="more than"):
        from_data_url("data:;base64," + "A" * 2000, 1000)
    with pytest.raises(InvalidAudio, match="more than"):
        from_data_url("data:;base64," + base64.b64encode(b"x" * 1001).decode(), 1000)


def test_urls_are_off_by_default():
    with pytest.raises(InvalidAudio, match="not fetched from URLs"):
        asyncio.run(reference_bytes("https://example.org/a.wav", ServerSettings()))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.wav",
        "http://localhost:8000/a.wav",
        "http://10.0.0.1/a.wav",
        "http://192.168.1.1/a.wav",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/a.wav",
        "http://[::ffff:127.0.0.1]/a.wav",
        "http://[fd00::1]/a.wav",
        "http://[2002:7f00:1::]/a.wav",
        "http://0.0.0.0/a.wav",
        "http://2130706433/a.wav",
        "http://0x7f.1/a.wav",
        "http://224.0.0.1/a.wav",
        "https://user:pass@8.8.8.8/a.wav",
        "http://:80/a.wav",
        "http://8.8.8.8:99999/a.wav",
        "ftp://8.8.8.8/a.wav",
        "gopher://8.8.8.8",
    ],
)
def test_private_addresses_and_odd_urls_are_never_reached(url, monkeypatch):
    async def unreachable(*args):
        raise AssertionError("a connection was about to be made")

    monkeypatch.setattr(references, "_download", unreachable)
    with pytest.raises(InvalidAudio) as caught:
        asyncio.run(reference_bytes(url, OPEN))
    assert caught.value.field == "ref_audio"


def test_one_private_address_among_public_ones_refuses_the_host(monkeypatch):
    async def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(anyio, "getaddrinfo", resolve)
    with pytest.raises(InvalidAudio, match="not a public address"):
        asyncio.run(public_address("two.example", 80))


class Peer:
    """A web server on this machine that answers once and keeps what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked = b""

    async def __aenter__(self):
        async def serve(reader, writer):
            self.asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._answer)
            await writer.drain()
            writer.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self._server.close()


def fetch(monkeypatch, answer, settings=OPEN):
    """Fetch http://clips.example/a.wav, which the checked address says is this machine."""

    async def checked(host, port):
        assert host == "clips.example"
        return "127.0.0.1"

    async def run():
        async with Peer(answer) as peer:
            monkeypatch.setattr(references, "public_address", checked)
            data = await reference_bytes(f"http://clips.example:{peer.port}/a.wav", settings)
            return data, peer.asked

    return asyncio.run(run())


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    data, asked = fetch(monkeypatch, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
    assert data == b"abc"
    assert b"GET /a.wav" in asked and b"host: clips.example:" in asked.lower()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
        b"nonsense\r\n\r\n",
    ],
)
def test_redirects_and_broken_answers_are_refused(monkeypatch, answer):
    with pytest.raises(InvalidAudio):
        fetch(monkeypatch, answer)


def test_a_remote_file_beyond_the_limit_is_cut_off(monkeypatch):
    settings = ServerSettings(allow_remote_audio=True, max_reference_bytes=1024)
    with pytest.raises(InvalidAudio, match="more than"):
        fetch(monkeypatch, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, settings)


def test_the_rate_limiter_refills_evenly_and_forgets_old_clients():
    now = [0.0]
    limiter = RateLimiter(60, clock=lambda: now[0])
    assert [limiter.wait_s("a") for _ in range(60)] == [0.0] * 60
    assert limiter.wait_s("a") == pytest.approx(1.0)
    assert limiter.wait_s("b") == 0.0
    now[0] = 0.5
    assert limiter.wait_s("a") == pytest.approx(0.5)
    now[0] = 1.0
    assert limiter.wait_s("a") == 0.0
    limiter.MAX_CLIENTS = 10
    for i in range(100):
        limiter.wait_s(str(i))
    assert len(limiter._buckets) == 10
