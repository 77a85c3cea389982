"""The page's own routes: streamed speech for the player, cancel, finished files, static files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.staticfiles import StaticFiles

from engine.audio import ENCODINGS, encode_audio
from engine.errors import ChorusError, EngineFailed, InvalidRequest
from engine.request import SamplingOverrides, SpeechRequest
from ui import wire
from ui.handle import EngineHandle
from ui.references import PREFIX, References

log = logging.getLogger("chorus.page")
STATIC = Path(__file__).parent / "static"
MAX_BODY = 256 * 1024  # bytes of a speak request
MAX_ENCODE = 128 * 2**20  # bytes of PCM16 to put into a file: 45 minutes


class SpeakBody(BaseModel):
    """What the page sends; names as in `SpeechRequest`. `voice`: a stored voice's name, or a reference's token."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str
    voice: str | None = None
    transcript: str | None = None
    speaker: str | None = None
    instruct: str | None = None
    language: str = "auto"
    x_vector_only: bool = False
    non_streaming_text: bool | None = None
    seed: str | None = None  # digits, as they were typed
    sampling: dict[str, bool | int | float] = {}
    chunk_schedule: list[int] | None = None
    max_frames: int | None = None


def router(handle: EngineHandle, references: References) -> APIRouter:
    """`/chorus/...` beside the Gradio page."""
    routes = APIRouter(prefix="/chorus", include_in_schema=False)

    @routes.post("/speak")
    async def speak(request: Request) -> Response:
        try:
            body = _parse(await _body(request, MAX_BODY))
            # Preparing a voice runs two encoders the first time: not on the event loop.
            stream = await run_in_threadpool(lambda: handle.engine.stream(_to_request(body, handle, references)))
        except ChorusError as error:
            return refusal(error)
        return StreamingResponse(
            _records(stream, request, handle),
            media_type=wire.MEDIA_TYPE,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-Id": stream.id},
        )

    @routes.post("/cancel/{request_id}")
    async def cancel(request_id: str) -> dict[str, bool]:
        # A closed connection cancels as well; behind a proxy that may take a while to be seen.
        try:
            return {"cancelled": bool(handle.engine.cancel(request_id))}
        except ChorusError:
            return {"cancelled": False}

    @routes.post("/encode/{container}")
    async def encode(container: Literal["wav", "flac", "mp3"], request: Request) -> Response:
        """PCM16 in, a finished file out: the take lives in the browser, nothing of it stays here."""
        try:
            data = await _body(request, MAX_ENCODE)
            if not data or len(data) % 2:
                raise InvalidRequest("The body is 16-bit PCM at 24 kHz.", field="body")
            pcm = np.frombuffer(data, "<i2").astype(np.float32) / 32767
            file = await run_in_threadpool(encode_audio, pcm, container)
        except ChorusError as error:
            return refusal(error)
        return Response(file, media_type={"mp3": "audio/mpeg"}.get(container, f"audio/{container}"))

    @routes.get("/status")
    async def status() -> dict[str, Any]:
        now = handle.status
        answer: dict[str, Any] = {"state": now.state, "detail": now.detail}
        if now.state == "ready":
            answer["metrics"] = handle.engine.metrics()
        return answer

    return routes


def static_files() -> StaticFiles:
    """Mount at `/chorus/static`."""
    assert set(ENCODINGS) == {"wav", "flac", "mp3"}  # what `encode` and the page's menu offer
    return StaticFiles(directory=STATIC)


async def _body(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise InvalidRequest(f"The request is larger than {limit // 1024} kB.", field="body")
    return bytes(data)


def _parse(data: bytes) -> SpeakBody:
    try:
        return SpeakBody.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        raise InvalidRequest(f"{field}: {fault['msg']}.", field=field) from None


def _to_request(body: SpeakBody, handle: EngineHandle, references: References) -> SpeechRequest:
    unknown = set(body.sampling) - set(SamplingOverrides.__dataclass_fields__)
    if unknown:
        raise InvalidRequest(f"Unknown sampling setting {sorted(unknown)[0]!r}.", field="sampling")
    if body.seed is not None and not (body.seed.isascii() and body.seed.isdigit()):
        raise InvalidRequest("The seed is a whole number; leave it empty for a new one each time.", field="seed")
    voice: Any = body.voice
    if voice is not None and voice.startswith(PREFIX):
        voice = handle.engine.prepare_voice(references.get(voice), transcript=body.transcript)
    elif voice is not None and body.transcript is not None:  # a stored voice with the words corrected
        voice = handle.engine.prepare_voice(handle.engine.voices.audio(voice), transcript=body.transcript)
    return SpeechRequest(
        text=body.text,
        voice=voice,
        speaker=body.speaker,
        instruct=body.instruct,
        language=body.language,
        x_vector_only=body.x_vector_only,
        non_streaming_text=body.non_streaming_text,
        seed=None if body.seed is None else int(body.seed),
        max_frames=body.max_frames,
        sampling=SamplingOverrides(**body.sampling),  # type: ignore[arg-type]
        chunk_schedule=tuple(body.chunk_schedule) if body.chunk_schedule else None,
    )


async def _records(stream: Any, request: Request, handle: EngineHandle) -> AsyncIterator[bytes]:
    """The stream's chunks as records; a listener who leaves ends the request, at whatever moment."""
    loop = asyncio.get_running_loop()
    fresh = asyncio.Event()
    stream.on_item(lambda: loop.call_soon_threadsafe(fresh.set))
    watch = asyncio.create_task(_cancel_when_gone(request, stream))
    try:
        yield wire.event("start", id=stream.id, seed=stream.seed, text=stream.text, parts=stream.parts)
        position = 0
        while True:
            fresh.clear()
            if stream.position != position:
                position = stream.position
                yield wire.event("queue", position=position)
            try:
                chunk = stream.try_next()
            except StopIteration:
                break
            if chunk is None:
                await fresh.wait()
                continue
            about = wire.event("chunk", index=chunk.index, frames=chunk.frames, starts=chunk.starts)
            yield about + wire.audio(chunk.pcm)
        yield wire.event("end", **_ending(stream.result))
    except ChorusError as error:
        handle.note_error(error.message)
        yield wire.event("error", **_fault(error))
    except Exception as error:
        log.exception("the stream of %s broke", stream.id)
        handle.note_error(str(error))
        yield wire.event("error", **_fault(EngineFailed("The engine broke while speaking; try again.")))
    finally:
        watch.cancel()
        stream.cancel()  # nothing if it has ended


async def _cancel_when_gone(request: Request, stream: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def _ending(result: Any) -> dict[str, Any]:
    return {
        "finish_reason": result.finish_reason,
        "detail": result.detail,
        "frames": result.frames,
        "seed": result.seed,
        "ttfa_ms": result.ttfa_ms,
        "wall_s": result.wall_s,
        "audio_s": result.audio_s,
        "x_real_time": result.x_real_time,
        "model": result.model,
        "weights": result.weights,
    }


def _fault(error: ChorusError) -> dict[str, Any]:
    return {"type": error.code, "message": error.message, "field": error.field}


def refusal(error: ChorusError) -> JSONResponse:
    """An error as every answer of the page's routes carries it: `{"error": {type, message, field}}`."""
    headers = {}
    if (retry := getattr(error, "retry_after_s", None)) is not None:
        headers["Retry-After"] = str(max(1, round(retry)))
    return JSONResponse({"error": _fault(error)}, status_code=error.http_status, headers=headers)
