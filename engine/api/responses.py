"""Answers to a speech request: audio or events sent while they are made, and what headers and errors say of it."""

from __future__ import annotations

import base64
import logging
from typing import Any

import anyio.to_thread
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.api.errors import error_body, in_api_words, json_line
from engine.api.formats import MEDIA_TYPES, AvEncoder, Encoder, stream_encoder
from engine.api.listening import Client, ClientGone, Listener
from engine.api.metrics import Call
from engine.api.schema import SpeechBody
from engine.errors import ChorusError, DeadlineExceeded, EngineClosed, EngineFailed
from engine.request import SAMPLE_RATE, AudioChunk, SpeechResult
from engine.trace import Trace

log = logging.getLogger("chorus.api")


class StreamedSpeech(Response):
    """Sends chunks while they are made, and cancels the request when the client leaves."""

    def __init__(
        self,
        body: SpeechBody,
        listener: Listener,
        first: AudioChunk,
        call: Call,
        trace: Trace,
        headers: dict[str, str],
        client: Client,
    ) -> None:
        """`client`: watched until the end of the response."""
        self._client = client
        self._sse = body.stream_format == "sse"
        kind = "text/event-stream" if self._sse else MEDIA_TYPES[body.response_format]
        super().__init__(media_type=kind, headers={**headers, "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response counted an empty body
        self._encoder = stream_encoder(body.response_format)
        self._listener = listener
        self._first = first
        self._call = call
        self._trace = trace
        self._characters = len(body.input)
        self._limited = body.max_new_tokens is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._client.while_here(self._send(send))
            self._call.end("done")
        except (ClientGone, OSError):
            self._call.end("cancelled")
        except BaseException:
            self._call.end("failed")
            raise  # the server closes the connection, so that a cut stream does not look whole
        finally:
            self._client.close()
            self._listener.stream.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        data = self._encoder.start()
        chunk: AudioChunk | None = self._first
        first = True
        try:
            while chunk is not None:
                data += await _feed(self._encoder, chunk.pcm)
                if data:
                    await self._send_audio(send, data)
                    if first:
                        self._trace.event("first_byte", self._listener.stream.id)
                        first = False
                    data = b""
                self._call.sent(len(chunk.pcm) / SAMPLE_RATE)
                chunk = await self._listener.next()
            result = self._listener.result
            if result.finish_reason in ("cancelled", "error"):
                raise no_audio(result)
        except ChorusError as error:
            if not self._sse:
                raise
            self._call.end("failed")
            await _send_body(send, json_line({"type": "error", **error_body(in_api_words(error))}))
            await _send_body(send, b"", more=False)
            return
        if tail := self._encoder.finish():
            await self._send_audio(send, tail)
        if self._sse:
            await _send_body(send, json_line(self._done(result)))
        elif not result.ok and not (self._limited and result.finish_reason == "length"):  # that was asked for
            log.warning("request %s ended early (%s): %s", result.request_id, result.finish_reason, result.detail)
        await _send_body(send, b"", more=False)

    async def _send_audio(self, send: Send, data: bytes) -> None:
        if self._sse:
            data = json_line({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
        await _send_body(send, data)

    def _done(self, result: SpeechResult) -> dict[str, Any]:
        tokens = self._listener.stream.input_tokens
        return {
            "type": "speech.audio.done",
            # Text tokens in, as the model's tokenizer makes them; a frame is the model's output token.
            "usage": {
                "input_tokens": tokens,
                "output_tokens": result.frames,
                "total_tokens": tokens + result.frames,
            },
            "input_characters": self._characters,
            "finish_reason": result.finish_reason,
            "detail": result.detail,
            "seed": result.seed,
            "config_hash": result.config_hash,
            "audio_seconds": round(result.audio_s, 3),
        }


async def _feed(encoder: Encoder, pcm: np.ndarray) -> bytes:
    """Codecs cost milliseconds, which the loop owes to the other streams."""
    if isinstance(encoder, AvEncoder):
        return await anyio.to_thread.run_sync(encoder.feed, pcm)
    return encoder.feed(pcm)


async def _send_body(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def no_audio(result: SpeechResult) -> ChorusError:
    if result.finish_reason == "cancelled":
        return EngineClosed("the request was cancelled on the server; send it again")
    if result.finish_reason == "deadline":
        return DeadlineExceeded(result.detail or "the deadline passed", field="deadline_s")
    return EngineFailed(result.detail or "no audio was made; send the request again")


def result_headers(result: SpeechResult) -> dict[str, str]:
    headers = {
        "x-chorus-finish-reason": result.finish_reason,
        "x-chorus-frames": str(result.frames),
        "x-chorus-audio-seconds": f"{result.audio_s:.2f}",
        "x-chorus-wall-seconds": f"{result.wall_s:.3f}",
    }
    if result.ttfa_ms is not None:
        headers["x-chorus-ttfa-ms"] = f"{result.ttfa_ms:.1f}"
    if result.detail:
        headers["x-chorus-detail"] = header_text(result.detail)
    return headers


def header_text(text: str) -> str:
    """What a header may hold: one line of ASCII."""
    return " ".join(text.split()).encode("ascii", "replace").decode()
