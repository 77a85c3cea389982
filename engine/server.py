"""OpenAI-compatible speech endpoints on an engine.

    python -m engine serve --config configs/balanced.yaml --port 8000

`create_app` takes an `Engine` or an `EngineProcess`; the Gradio page is mounted beside it by `app.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import SecretStr

from engine import pauses
from engine.api import errors
from engine.api.guard import Guard
from engine.api.metrics import Metrics
from engine.api.schema import VoiceId
from engine.api.settings import ServerSettings
from engine.api.speech import SpeechService, speech_router
from engine.api.voices import voices_router
from engine.errors import ChorusError
from engine.trace import Trace


def engine_state(engine: Any) -> str:
    """starting | ready | restarting | failed. An in-process engine is ready until its thread breaks."""
    state = getattr(engine, "state", None)
    if state is not None:
        return str(state)
    return "failed" if getattr(engine, "failure", None) else "ready"


def create_app(engine: Any, settings: ServerSettings | None = None, trace: Trace | None = None) -> FastAPI:
    """The API as an ASGI app.

    Args:
        engine: an `Engine` or `EngineProcess`; whoever made it closes it.
        settings: key, limits; by default open and local.
        trace: where to note first bytes; may be the engine's file.
    """
    settings = settings or ServerSettings()
    app = FastAPI(title="Chorus", description="Speech by Qwen3-TTS, spoken while it is made.", version="1")
    metrics = Metrics(engine.metrics, ready=lambda: engine_state(engine) == "ready")
    service = SpeechService(engine, settings, metrics, trace or Trace(None))
    errors.install(app)
    app.include_router(speech_router(service))
    app.include_router(voices_router(engine, settings))
    app.add_middleware(Guard, settings=settings)
    started = int(time.time())

    @app.get("/v1/models", responses=errors.documented(401, 503))
    async def models() -> JSONResponse:
        """The one loaded model."""
        info = engine.info
        model = {
            "id": info.model,
            "object": "model",
            "created": started,
            "owned_by": "chorus",
            "task": info.task,
            "weights": info.weights,
            "languages": list(info.languages),
            "config_hash": info.config_hash,
        }
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/health", responses={503: {"description": "The engine has failed for good."}})
    async def health() -> JSONResponse:
        """Alive: 200 unless the engine has failed for good."""
        state = engine_state(engine)
        return JSONResponse({"status": state}, 503 if state == "failed" else 200)

    @app.get("/ready", responses={503: {"description": "Not yet, or not any more."}})
    async def ready() -> JSONResponse:
        """200 once requests are served."""
        state = engine_state(engine)
        if state == "ready":
            return JSONResponse({"status": state, "model": engine.info.model})
        why = getattr(engine, "last_error", None) or getattr(engine, "failure", None)
        return JSONResponse({"status": state, "error": str(why) if why else None}, 503, {"Retry-After": "2"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics() -> Response:
        """For Prometheus."""
        return Response(await anyio.to_thread.run_sync(metrics.render), media_type=CONTENT_TYPE_LATEST)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {})["VoiceId"] = VoiceId.model_json_schema()
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


# --- command ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine serve", description="OpenAI-compatible speech API")
    parser.add_argument("--config", default="configs/embedded.yaml", help="settings (YAML); default: %(default)s")
    parser.add_argument("--model", help="checkpoint folder, hub id, or dummy:1.7b-base")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting of the engine")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--in-process", action="store_true", help="run the engine in this process, not in a child")
    parser.add_argument("--requests-per-minute", type=int, default=0, help="limit of one client; 0: none")
    parser.add_argument("--allow-remote-audio", action="store_true", help="fetch ref_audio from public http(s) URLs")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    parser.epilog = "The environment variable CHORUS_API_KEY, when set, is the key that clients must send."
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; returns the exit status: 0, 1 if the engine failed, 2 for bad settings."""
    import uvicorn

    from engine.__main__ import load_config
    from engine.process import EngineProcess

    args = _parser().parse_args(argv)
    try:
        config = load_config(args)
        key = os.environ.get("CHORUS_API_KEY")
        settings = ServerSettings(
            api_key=SecretStr(key) if key else None,
            requests_per_minute=args.requests_per_minute,
            allow_remote_audio=args.allow_remote_audio,
        )
        trace = Trace(config.trace)
        engine: Any
        if args.in_process:
            from engine.engine import Engine
            from engine.warmup import warm_up

            engine = Engine.from_config(config)
            warm_up(engine)
        else:
            engine = EngineProcess(config, wait=False)
    except ChorusError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if args.host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
        print(f"warning: anyone who reaches {args.host} may speak; set CHORUS_API_KEY", file=sys.stderr)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, settings, trace),
            host=args.host,
            port=args.port,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            timeout_graceful_shutdown=5,
            log_level="info",
        )
    )
    failed: list[ChorusError] = []

    def watch_start() -> None:
        try:
            engine.wait_ready()
            pauses.keep_short()
        except ChorusError as error:
            failed.append(error)
            server.should_exit = True

    if not args.in_process:
        threading.Thread(target=watch_start, name="chorus-start", daemon=True).start()
    # uvicorn raises the signal that ended it once more; the engine is to be closed first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()
        trace.close()
    if failed:
        print(f"error: {failed[0].message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
