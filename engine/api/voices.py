"""The voice library over HTTP: list, save, delete. Names are names: the library never makes a path of one."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from engine.api.errors import UnsupportedMediaType, documented
from engine.api.settings import ServerSettings
from engine.audio import load_audio
from engine.errors import InvalidRequest
from engine.voices import VoiceEntry

FIELDS = ("name", "ref_text", "consent", "language", "overwrite")

_UPLOAD_SCHEMA = {
    "type": "object",
    "required": ["name", "audio_sample", "consent"],
    "properties": {
        "name": {"type": "string", "maxLength": 64},
        "audio_sample": {"type": "string", "format": "binary", "description": "1 to 30 s of clear speech"},
        "ref_text": {"type": "string", "description": "what the recording says"},
        "consent": {"type": "boolean", "description": "true: the speaker agreed to have this voice cloned"},
        "language": {"type": "string"},
        "overwrite": {"type": "boolean"},
    },
}


def voice_object(entry: VoiceEntry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "voice",
        "name": entry.name,
        "kind": entry.kind,
        "language": entry.language,
        "seconds": round(entry.seconds, 2),
        "ref_text": entry.transcript,
        "description": entry.description,
        "created": int(entry.created),
    }


def speaker_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "voice", "name": name, "kind": "speaker"}


def voices_router(engine: Any, settings: ServerSettings) -> APIRouter:
    router = APIRouter(prefix="/v1/audio/voices")
    refusals = documented(400, 401, 403, 404, 413, 415, 429, 500, 503)

    @router.get("", responses=refusals)
    async def list_voices() -> JSONResponse:
        """What `voice` may be for the loaded model."""
        info = engine.info
        if info.task == "Base":
            data = [voice_object(entry) for entry in await anyio.to_thread.run_sync(engine.voices.list)]
        else:
            data = [speaker_object(name) for name in info.speakers]
        return JSONResponse({"object": "list", "data": data, "voices": [voice["id"] for voice in data]})

    @router.post(
        "",
        status_code=201,
        responses=refusals,
        openapi_extra={
            "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_SCHEMA}}}
        },
    )
    async def save_voice(request: Request) -> JSONResponse:
        """Keep a recording as a voice."""
        fields, data = await _read_form(request)
        if engine.info.task != "Base":
            raise InvalidRequest(f"a {engine.info.task} model clones no voice", field="audio_sample")
        if len(data) > settings.max_reference_bytes:
            limit = settings.max_reference_bytes / 2**20
            raise InvalidRequest(f"the recording has more than {limit:.0f} MB", field="audio_sample")

        def save() -> VoiceEntry:
            audio = load_audio(data, name="audio_sample")
            entry = engine.voices.save(
                fields["name"],
                audio,
                fields.get("ref_text"),
                consent=_flag(fields, "consent"),
                language=fields.get("language", "auto")[:40],
                overwrite=_flag(fields, "overwrite"),
            )
            engine.voices.get(entry.name)  # encoded now and kept: the first request does not pay
            return entry

        entry = await anyio.to_thread.run_sync(save)
        return JSONResponse(voice_object(entry), 201)

    @router.delete("/{name}", responses=refusals)
    async def delete_voice(name: str) -> JSONResponse:
        """Forget a saved voice."""
        await anyio.to_thread.run_sync(engine.voices.delete, name)
        return JSONResponse({"id": name, "object": "voice", "deleted": True})

    return router


async def _read_form(request: Request) -> tuple[dict[str, str], bytes]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise UnsupportedMediaType("send the recording as multipart/form-data")
    fields: dict[str, str] = {}
    data: bytes | None = None
    async with request.form(max_files=1, max_fields=16) as form:
        for key, value in form.multi_items():
            if key == "audio_sample":
                if not isinstance(value, UploadFile):
                    raise InvalidRequest("audio_sample must be a file", field=key)
                data = await value.read()
            elif key not in FIELDS:
                raise InvalidRequest(f"{key}: there is no such field", field=key[:100])
            elif isinstance(value, UploadFile):
                raise InvalidRequest(f"{key} is text, not a file", field=key)
            else:
                fields[key] = value
    if data is None:
        raise InvalidRequest("audio_sample is missing: send a recording", field="audio_sample")
    if "name" not in fields:
        raise InvalidRequest("name is missing: what should the voice be called?", field="name")
    return fields, data


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "false").strip().lower()
    if value not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise InvalidRequest(f"{name} is true or false", field=name)
    return value in ("true", "1", "yes", "on")
