"""Any OpenAI-compatible speech server: raw PCM or WAV bodies, or server-sent events. One client for us and for peers.

Request time zero is just before the request is sent; a connection that must be opened first is in the figure, so warm
up with as many requests as run at once. vLLM-Omni, SGLang-Omni, Nari and faster-qwen3-tts differ in the fields they
want beside OpenAI's: give those with `extra`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from eval.datasets import Reference
from eval.errors import EvalError
from eval.targets import Answer, Ask

CONNECT_S = 10.0
FRAME_S = 0.08  # of the 12 Hz family
_RIFF_DATA_SEARCH = 65_536  # bytes in which a WAV's data chunk must begin


@dataclass(frozen=True)
class ServerSettings:
    """How a server is spoken to.

    Attributes:
        url: base, e.g. `http://127.0.0.1:8000/v1`.
        transport: "audio" (bytes as they come) or "sse" (OpenAI's speech.audio.delta events).
        response_format: "pcm" or "wav".
        voices: "name" sends the voice's name, "clip" the reference clip and its transcript, "none" neither.
        extra: fields put into every request body as they are.
    """

    url: str
    model: str = "tts-1"
    transport: str = "audio"
    response_format: str = "pcm"
    voices: str = "clip"
    api_key: str = ""
    sample_rate: int = 24_000
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("transport", ("audio", "sse")),
            ("response_format", ("pcm", "wav")),
            ("voices", ("name", "clip", "none")),
        ):
            if getattr(self, name) not in allowed:
                raise EvalError(f"{name} must be one of {', '.join(allowed)}", field=name)
        if not self.url.startswith(("http://", "https://")):
            raise EvalError(f"'{self.url}' is not an http(s) address", field="url")


class PcmReader:
    """Bytes of a PCM16 or WAV stream, in pieces of any size, to int16 samples. Multi-channel is refused."""

    def __init__(self, sample_rate: int, *, wav: bool) -> None:
        self.sample_rate = sample_rate
        self._pending = b""
        self._in_header = wav

    def feed(self, data: bytes) -> np.ndarray:
        """Samples that are complete now (perhaps none)."""
        self._pending += data
        if self._in_header and not self._skip_header():
            return np.empty(0, np.int16)
        whole = len(self._pending) // 2 * 2
        samples = np.frombuffer(self._pending[:whole], "<i2").astype(np.int16)
        self._pending = self._pending[whole:]
        return samples

    def _skip_header(self) -> bool:
        head = self._pending
        if len(head) >= 4 and head[:4] != b"RIFF":
            self._in_header = False  # raw samples, whatever was asked for
            return True
        at = 12
        while len(head) >= at + 8:
            name, size = head[at : at + 4], int.from_bytes(head[at + 4 : at + 8], "little")
            if name == b"data":
                self._pending, self._in_header = head[at + 8 :], False
                return True
            if name == b"fmt " and len(head) >= at + 24:
                channels = int.from_bytes(head[at + 10 : at + 12], "little")
                bits = int.from_bytes(head[at + 22 : at + 24], "little")
                self.sample_rate = int.from_bytes(head[at + 12 : at + 16], "little")
                if (channels, bits) != (1, 16):
                    raise ValueError(f"a WAV of {channels} channels and {bits} bits; mono 16 bit is expected")
            at += 8 + size + size % 2
            if at > _RIFF_DATA_SEARCH:
                raise ValueError("a WAV header without end")
        return False


class HttpTarget:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.name = f"{settings.url} ({settings.transport}, {settings.response_format})"
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._headers = headers
        self._tls = httpx.create_ssl_context() if settings.url.startswith("https://") else False
        # One client, so one connection, for each request at a time. httpx's pool looks at every idle connection for
        # every request: of 64 that began together, half were not with the server after 0.4 s (measured).
        self._idle: list[httpx.AsyncClient] = [self._open()]
        self._clips: dict[str, dict[str, str]] = {}
        self._models: Any = None
        self._ours = False  # Chorus: has a field for the least length, which other servers may refuse

    def _open(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        return httpx.AsyncClient(headers=self._headers, timeout=timeout, trust_env=False, verify=self._tls)

    def describe(self) -> dict[str, Any]:
        s = self.settings
        fields = ("url", "model", "transport", "response_format", "voices", "extra")
        return {"kind": "http", "server_models": self._models} | {name: getattr(s, name) for name in fields}

    async def prepare(self, references: Mapping[str, Reference]) -> None:
        """Check that the server is there, and make the reference clips ready to be sent.

        Raises:
            EvalError: nothing answers at the address.
        """
        try:
            answer = await self._idle[-1].get(f"{self.settings.url}/models", timeout=CONNECT_S)
            self._models = answer.json() if answer.is_success else f"HTTP {answer.status_code}"
            self._ours = _owner(self._models) == "chorus"
        except httpx.HTTPError as error:
            raise EvalError(f"no speech server at {self.settings.url}: {error!r}", field="url") from error
        except ValueError:
            self._models = "not JSON"
        if self.settings.voices == "clip":
            for name, reference in references.items():
                kind = reference.file.suffix.lstrip(".") or "wav"
                data = base64.b64encode(reference.file.read_bytes()).decode()
                self._clips[name] = {"ref_audio": f"data:audio/{kind};base64,{data}", "ref_text": reference.transcript}

    def _body(self, ask: Ask) -> dict[str, Any]:
        s = self.settings
        body: dict[str, Any] = {"model": s.model, "input": ask.text, "response_format": s.response_format}
        body |= {"stream": True, "stream_format": s.transport, "language": ask.language, "seed": ask.seed}
        if s.voices == "name":
            body["voice"] = ask.voice
        elif s.voices == "clip":
            body |= self._clips[ask.voice]
        if ask.frames is not None:
            body["max_new_tokens"] = ask.frames
            if self._ours:
                body["min_new_tokens"] = ask.frames
        body |= s.extra
        return {key: value for key, value in body.items() if value is not None}  # `extra: {seed: null}` drops a field

    async def speak(self, ask: Ask) -> Answer:
        client = self._idle.pop() if self._idle else self._open()
        request = client.build_request("POST", f"{self.settings.url}/audio/speech", json=self._body(ask))
        answer = Answer(time.monotonic(), sample_rate=self.settings.sample_rate, seed=ask.seed)
        try:
            async with asyncio.timeout(ask.deadline_s):
                return await self._receive(client, request, answer, ask.frames)
        except TimeoutError:
            return answer.end("deadline", f"not complete after {ask.deadline_s} s")
        except httpx.HTTPError as error:
            return answer.end("connection", repr(error))
        except ValueError as error:  # a body that is not what it says
            return answer.end("server_error", str(error))
        finally:
            self._idle.append(client)

    async def _receive(
        self, client: httpx.AsyncClient, request: httpx.Request, answer: Answer, frames: int | None
    ) -> Answer:
        response = await client.send(request, stream=True)
        try:
            if not response.is_success:
                detail = (await response.aread()).decode("utf-8", "replace")
                kind = "busy" if response.status_code in (429, 503) else "refused"
                kind = "server_error" if response.status_code >= 500 and kind != "busy" else kind
                return answer.end(kind, f"HTTP {response.status_code}: {detail}")
            reader = PcmReader(
                int(response.headers.get("x-sample-rate", answer.sample_rate)),
                wav=self.settings.response_format == "wav" and self.settings.transport == "audio",
            )
            answer.extra = {k: v for k, v in response.headers.items() if k.startswith("x-")}
            body = response.aiter_bytes()
            failure = await (_events if self.settings.transport == "sse" else _bytes)(body, reader, answer)
            answer.sample_rate = reader.sample_rate
            return answer.end("server_error", failure) if failure else _judge(answer, frames)
        finally:
            await response.aclose()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def _owner(models: Any) -> str:
    """`owned_by` of the first model in an answer to GET /models, or ""."""
    try:
        return str(models["data"][0]["owned_by"])
    except (KeyError, IndexError, TypeError):
        return ""


def _judge(answer: Answer, frames: int | None) -> Answer:
    """A server that tells how a stream ended (ours: finish_reason in the done event) is believed."""
    if answer.finish_reason in ("", "stop"):
        return answer.end("ok")
    samples = sum(chunk.size for chunk in answer.chunks)
    if answer.finish_reason == "length" and frames is not None and samples == frames * FRAME_S * answer.sample_rate:
        return answer.end("ok")  # exactly what was asked for
    return answer.end("unfinished", answer.finish_reason)


async def _bytes(body: AsyncIterator[bytes], reader: PcmReader, answer: Answer) -> str:
    async for data in body:
        now = time.monotonic()
        if answer.first_byte is None and data:
            answer.first_byte = now
        answer.heard(reader.feed(data), now)
    return ""


async def _events(body: AsyncIterator[bytes], reader: PcmReader, answer: Answer) -> str:
    """Read server-sent events until the done event; the text of an error event, or ""."""
    pending = b""
    async for data in body:
        now = time.monotonic()
        if answer.first_byte is None and data:
            answer.first_byte = now
        pending += data.replace(b"\r\n", b"\n")
        *events, pending = pending.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            payload = b"".join(lines)
            if not payload or payload == b"[DONE]":
                continue
            message = json.loads(payload)
            kind = message.get("type", "")
            if kind == "error" or "error" in message:
                return json.dumps(message)[:500]
            audio = message.get("audio") or message.get("delta")
            if kind.endswith(".done"):
                answer.finish_reason = message.get("finish_reason") or ""
            elif isinstance(audio, str):
                answer.heard(reader.feed(base64.b64decode(audio)), now)
    return ""
