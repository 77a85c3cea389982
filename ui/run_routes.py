"""Files of runs for the browser: the report, the clips, the rows. Only names of runs, never paths."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, Response

from engine.errors import ChorusError
from ui.run_manager import RunManager

FILES = {
    "report.html": "text/html",
    "summary.json": "application/json",
    "run.json": "application/json",
    "requests.jsonl": "application/x-ndjson",
    "scores.jsonl": "application/x-ndjson",
    "compare.json": "application/json",
}


def router(runs: RunManager) -> APIRouter:
    routes = APIRouter(prefix="/chorus/runs", include_in_schema=False)

    @routes.get("")
    def state() -> JSONResponse:
        return JSONResponse({"job": runs.describe(), "runs": runs.earlier()})

    @routes.get("/{name}/{file}")
    def one(name: str, file: str, download: bool = False) -> Response:
        try:
            folder = runs.open(name)
        except ChorusError as error:
            return JSONResponse({"error": {"message": error.message}}, 404)
        path = folder.path / file
        if file not in FILES or not path.is_file():
            return JSONResponse({"error": {"message": f"this run has no {file}"}}, 404)
        saved = f"{name}-{file}" if download else None
        return FileResponse(path, media_type=FILES[file], filename=saved)

    @routes.get("/{name}/audio/{request}")
    def clip(name: str, request: str) -> Response:
        """The clip of a request id; ids are looked up among the rows, so no other file can be asked for."""
        try:
            folder = runs.open(name)
        except ChorusError as error:
            return JSONResponse({"error": {"message": error.message}}, 404)
        row = next((r for r in folder.rows() if r.id == request and r.audio), None)
        if row is None or not (folder.path / row.audio).is_file():
            return JSONResponse({"error": {"message": "no such clip"}}, 404)
        return FileResponse(folder.path / row.audio, media_type="audio/flac")

    return routes
