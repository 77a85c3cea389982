"""Every failure as OpenAI's error object, with our code and the field at fault."""

from __future__ import annotations

import json
import logging
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.errors import ChorusError, EngineBusy, EngineClosed, InvalidRequest

log = logging.getLogger("chorus.api")

# The engine's names of things, as the API calls them.
API_FIELDS = {
    "text": "input",
    "instruct": "instructions",
    "speaker": "voice",
    "max_frames": "max_new_tokens",
    "min_frames": "min_new_tokens",
    "transcript": "ref_text",
    "x_vector_only": "x_vector_only_mode",
    "non_streaming_text": "non_streaming_mode",
}


class Unauthorized(InvalidRequest):
    code = "invalid_api_key"
    http_status = 401


class CrossSite(InvalidRequest):
    code = "cross_site"
    http_status = 403


class UnknownModel(InvalidRequest):
    code = "model_not_found"
    http_status = 404


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    http_status = 413


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


class RateLimited(ChorusError):
    """Too many requests of one client; `retry_after_s` says when the next is taken."""

    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def error_body(error: ChorusError) -> dict[str, Any]:
    """OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def error_response(error: ChorusError, request_id: str | None = None) -> JSONResponse:
    headers = {} if request_id is None else {"x-request-id": request_id}
    wait = getattr(error, "retry_after_s", 1.0 if isinstance(error, EngineBusy | EngineClosed) else None)
    if wait is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.http_status, headers)


def in_api_words(error: ChorusError) -> ChorusError:
    """The same error with the field named as the API names it."""
    error.field = API_FIELDS.get(error.field or "", error.field)
    return error


def from_validation(error: ValidationError) -> InvalidRequest:
    """A body that does not fit its model, told in one sentence per fault."""
    faults = error.errors(include_url=False, include_context=False)
    lines = []
    for fault in faults[:5]:
        name = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if fault["type"] == "extra_forbidden":
            message = "there is no such field"
        lines.append(f"{name}: {message}" if name else message)
    first = str(faults[0]["loc"][0]) if faults and faults[0]["loc"] else None
    return InvalidRequest("; ".join(lines), field=first)


def install(app: FastAPI) -> None:
    """Answer every exception of `app` in this shape."""

    @app.exception_handler(ChorusError)
    async def _known(request: Request, error: ChorusError):
        if error.http_status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error.message)
        return error_response(in_api_words(error), getattr(request.state, "request_id", None))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException):
        known = InvalidRequest(str(error.detail))
        known.http_status = error.status_code
        known.code = HTTPStatus(error.status_code).name.lower()
        response = error_response(known)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(ChorusError("the server failed at this request; its log says why"))


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: these statuses answer with the error object."""
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def json_line(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
