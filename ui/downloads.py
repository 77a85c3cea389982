"""Files the page hands out whole: a saved voice, the trace. Asked for by name; nothing is copied to a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from engine.errors import ChorusError, InvalidRequest
from ui.handle import EngineHandle
from ui.routes import refusal

BLOCK = 2**20  # bytes


def router(handle: EngineHandle) -> APIRouter:
    routes = APIRouter(prefix="/chorus", include_in_schema=False)

    @routes.get("/voices/{name}")
    def voice(name: str) -> Response:
        """The file that the Voices tab imports."""
        try:
            return Response(handle.engine.voices.export(name), media_type="application/zip")
        except ChorusError as error:
            return refusal(error)

    @routes.get("/trace")
    def trace() -> Response:
        """The trace as far as it is written: it grows with every request, hence no stated length."""
        path = Path(handle.config.trace or "")
        if not path.is_file():
            return refusal(InvalidRequest("No trace is written: set `trace: FILE` in the settings.", field="trace"))
        return StreamingResponse(_written(path), media_type="application/x-ndjson")

    return routes


def _written(path: Path) -> Iterator[bytes]:
    """What the file holds now: its writer goes on meanwhile, and would be followed for ever."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(BLOCK, left))):
            left -= len(block)
            yield block
