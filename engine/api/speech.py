"""POST /v1/audio/speech: a body in, audio out, whole or while it is made."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.api.errors import UnknownModel, documented
from engine.api.formats import MEDIA_TYPES, encode_file
from engine.api.listening import Client, ClientGone, Listener
from engine.api.metrics import Call, Metrics
from engine.api.references import reference_bytes
from engine.api.responses import StreamedSpeech, header_text, no_audio, result_headers
from engine.api.schema import SpeechBody, read_body
from engine.api.settings import ServerSettings
from engine.errors import (
    ChorusError,
    EngineBusy,
    EngineClosed,
    InvalidRequest,
    UnknownVoice,
)
from engine.request import SAMPLE_RATE, AudioChunk, SpeechRequest
from engine.stream import SpeechStream
from engine.trace import Trace
from engine.voices import VoicePrompt

LEFT = 499  # what nginx logs for a client that closed the connection; nobody receives it


class SpeechService:
    """Turns bodies into engine requests and streams into responses."""

    def __init__(self, engine: Any, settings: ServerSettings, metrics: Metrics, trace: Trace) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.trace = trace
        # Made on first use: a limiter belongs to an event loop.
        self._preparing: anyio.CapacityLimiter | None = None

    async def speak(self, request: Request) -> Response:
        """The route. Every call ends in exactly one outcome of `Metrics`."""
        call = self.metrics.begin()
        request.state.request_id = request_id = uuid.uuid4().hex
        try:
            if self.metrics.active > self.settings.max_in_flight:
                raise EngineBusy(f"{self.settings.max_in_flight} requests are in flight; try again shortly")
            return await self._speak(request, request_id, call)
        except ChorusError as error:
            if error.field == "name":  # the library's word for the voice
                error.field = "voice"
            refused = error.http_status < 500 or isinstance(error, EngineBusy | EngineClosed)
            call.end("refused" if refused else "failed")
            raise
        except (ClientGone, ClientDisconnect):
            call.end("cancelled")
            return Response(status_code=LEFT)
        except BaseException:
            call.end("failed")
            raise

    async def _speak(self, request: Request, request_id: str, call: Call) -> Response:
        body, upload = await read_body(request)
        client = Client(request.receive)
        try:
            stream = await client.while_here(self._submit(body, upload, request_id))
            try:
                listener = Listener(stream)
                if body.streams:
                    first = await client.while_here(listener.next())
                    if first is None:
                        raise no_audio(listener.result)
                    call.heard()
                    headers = self._headers(stream)
                    return StreamedSpeech(body, listener, first, call, self.trace, headers, client)
                chunks = await client.while_here(_read_all(listener, call))
            except BaseException:
                stream.cancel()
                raise
        except BaseException:
            client.close()
            raise
        client.close()
        result = listener.result
        if result.finish_reason in ("cancelled", "error", "deadline") or not chunks:
            raise no_audio(result)
        data = await anyio.to_thread.run_sync(encode_file, body.response_format, [chunk.pcm for chunk in chunks])
        self.trace.event("first_byte", stream.id)
        call.sent(result.audio_s)
        call.end("done")
        headers = self._headers(stream) | result_headers(result)
        return Response(data, media_type=MEDIA_TYPES[body.response_format], headers=headers)

    async def _submit(self, body: SpeechBody, upload: bytes | None, request_id: str) -> SpeechStream:
        """Check the request against the loaded model and hand it to the engine."""
        info = self.engine.info
        known = (info.model, info.checkpoint_id, *self.settings.model_aliases)
        if body.model is not None and body.model not in known:
            raise UnknownModel(f"no model {body.model!r} here; the loaded one is {info.model}", field="model")
        if body.task_type not in (None, info.task):
            raise InvalidRequest(f"{info.model} is a {info.task} model; leave task_type out", field="task_type")
        prompt = await self._reference(body, upload)
        voice, speaker = self._voice(body, prompt)
        request = SpeechRequest(
            text=body.input,
            voice=voice,
            speaker=speaker,
            instruct=body.instructions or None,
            language=body.language or "auto",
            x_vector_only=body.x_vector_only_mode,
            non_streaming_text=body.non_streaming_mode,
            seed=body.seed,
            max_frames=body.max_new_tokens,
            min_frames=body.min_new_tokens or 2,
            sampling=body.sampling,
            chunk_schedule=tuple(body.chunk_schedule) if body.chunk_schedule else None,
            deadline_s=body.deadline_s,
            id=request_id,
        )
        submit = getattr(self.engine, "submit", None)
        if submit is None or isinstance(request.voice, VoicePrompt):  # in this process, or too much to write at once
            return await self._in_thread(self.engine.stream, request)
        # Without a thread: each waits for its turn at the interpreter twice, and with more callers than the pool has
        # threads, for those of others.
        return await self._whole(asyncio.wrap_future(submit(request)))

    async def _in_thread(self, function, *args) -> Any:
        """Run what costs CPU off the loop."""
        return await self._whole(asyncio.ensure_future(anyio.to_thread.run_sync(function, *args)))

    @staticmethod
    async def _whole(work: asyncio.Future) -> Any:
        """The result of `work`, which ends whatever happens. A client who leaves meanwhile leaves no stream behind."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel_orphan)
            raise

    async def _reference(self, body: SpeechBody, upload: bytes | None) -> VoicePrompt | None:
        if upload is not None and body.ref_audio is not None:
            raise InvalidRequest("ref_audio is given twice, as a file and as text", field="ref_audio")
        if upload is None and body.ref_audio is None:
            if body.ref_text is not None:
                raise InvalidRequest("ref_text says what ref_audio says; give both", field="ref_text")
            return None
        if self.engine.info.task != "Base":
            raise InvalidRequest(f"a {self.engine.info.task} model clones no voice", field="ref_audio")
        if body.voice_name is not None:
            raise InvalidRequest("give a voice or ref_audio, not both (voice may be 'default')", field="voice")
        if self._preparing is None:
            self._preparing = anyio.CapacityLimiter(self.settings.preparing)
        async with self._preparing:
            data = upload if upload is not None else await reference_bytes(body.ref_audio or "", self.settings)
            if len(data) > self.settings.max_reference_bytes:
                limit = self.settings.max_reference_bytes / 2**20
                raise InvalidRequest(f"the clip has more than {limit:.0f} MB", field="ref_audio")
            try:
                return await self._in_thread(self.engine.prepare_voice, data, None, body.ref_text)
            except InvalidRequest as error:
                if error.field in ("voice", "audio"):
                    error.field = "ref_audio"
                raise

    def _voice(self, body: SpeechBody, prompt: VoicePrompt | None) -> tuple[VoicePrompt | str | None, str | None]:
        """(voice, speaker) of the engine's request. The first voice speaks for callers who name none."""
        info, name = self.engine.info, body.voice_name
        if info.task == "Base":
            if prompt is not None or name is not None:
                return prompt or name, None
            voices = self.engine.voices.list()
            if not voices:
                raise InvalidRequest("give voice or ref_audio; no voice is saved", field="voice")
            return voices[0].name, None
        if body.x_vector_only_mode:
            raise InvalidRequest(f"x_vector_only_mode is for Base models, not {info.task}", field="x_vector_only_mode")
        if info.task == "VoiceDesign":
            if name is not None:
                raise UnknownVoice("a VoiceDesign model makes its voice up; describe it in instructions", field="voice")
            return None, None
        return None, name if name is not None else next(iter(info.speakers), None)

    def _headers(self, stream: SpeechStream) -> dict[str, str]:
        info = self.engine.info
        return {
            "x-request-id": stream.id,
            "x-chorus-seed": str(stream.seed),
            "x-chorus-model": header_text(info.model),
            "x-chorus-weights": info.weights,
            "x-chorus-config": info.config_hash,
            "x-chorus-sample-rate": str(SAMPLE_RATE),
            "cache-control": "no-store",
        }


async def _read_all(listener: Listener, call: Call) -> list[AudioChunk]:
    chunks: list[AudioChunk] = []
    while (chunk := await listener.next()) is not None:
        if not chunks:
            call.heard()
        chunks.append(chunk)
    return chunks


def _cancel_orphan(work: asyncio.Future) -> None:
    if not work.cancelled() and work.exception() is None and isinstance(work.result(), SpeechStream):
        work.result().cancel()


def speech_router(service: SpeechService) -> APIRouter:
    router = APIRouter()
    audio: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES.values()}
    # An event, as validators see it: `data` holds the JSON of speech.audio.delta or speech.audio.done.
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    audio["text/event-stream"] = {"schema": event}
    schema = SpeechBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)

    @router.post(
        "/v1/audio/speech",
        response_class=Response,
        responses={
            200: {"description": "Audio; with stream_format sse, events.", "content": audio},
            **documented(400, 401, 403, 404, 413, 415, 429, 500, 503, 504),
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema}, "multipart/form-data": {"schema": schema}},
            }
        },
    )
    async def create_speech(request: Request) -> Response:
        """Speak a text."""
        return await service.speak(request)

    return router
