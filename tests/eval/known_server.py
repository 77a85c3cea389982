"""A speech server whose every delay is known: it speaks a tone on a timetable, over real HTTP on a real socket.

It is not a stand-in for the engine: it is the ruler that the load driver is held against. The text of a request is its
timetable, e.g. `{"chunks": [[0.05, 0.08], [0.30, 0.2]]}`: chunk of 0.08 s of audio sent 0.05 s after the request came.
A text that is the transcript of a bundled clip is answered with that clip: speech whose words and speaker are known.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Iterator

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

RATE = 24_000


def pcm(seconds: float, silent: bool = False) -> bytes:
    t = np.arange(round(seconds * RATE)) / RATE
    wave = np.zeros_like(t) if silent else 0.3 * np.sin(2 * np.pi * 300 * t)
    return (wave * 32767).astype("<i2").tobytes()


def wav_header() -> bytes:
    """With the sizes of a stream whose length is not known."""
    unknown = (0xFFFFFFFF).to_bytes(4, "little")
    fmt = (1).to_bytes(2, "little") * 2 + RATE.to_bytes(4, "little") + (2 * RATE).to_bytes(4, "little")
    fmt += (2).to_bytes(2, "little") + (16).to_bytes(2, "little")
    return b"RIFF" + unknown + b"WAVEfmt " + (16).to_bytes(4, "little") + fmt + b"data" + unknown


class KnownServer:
    def __init__(self) -> None:
        self.running = 0
        self.peak = 0
        self.bodies: list[dict] = []
        self.callers: set[tuple[str, int]] = set()  # ends of the connections that speech was asked for on
        self.port = 0
        self.clips: dict[str, np.ndarray] = {}  # transcript -> int16 at 24 kHz

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def recital(self, text: str) -> dict | None:
        """The clip that says `text`, in chunks of half a second, one each 50 ms."""
        if text not in self.clips:
            return None
        samples = self.clips[text]
        cuts = range(0, samples.size, RATE // 2)
        return {"chunks": [(0.05 * (i + 1), samples[at : at + RATE // 2].tobytes()) for i, at in enumerate(cuts)]}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "known"}]})

    async def speech(self, request: Request) -> Response:
        arrived = asyncio.get_running_loop().time()
        body = await request.json()
        self.bodies.append(body)
        if request.client is not None:
            self.callers.add(tuple(request.client))
        plan = self.recital(body["input"]) or json.loads(body["input"])
        if "status" in plan:
            return JSONResponse({"error": {"message": "as asked"}}, status_code=plan["status"])
        sse, wav = body["stream_format"] == "sse", body["response_format"] == "wav"

        async def answer():
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                if wav and not sse:
                    yield wav_header()
                for at, sound in plan["chunks"]:
                    await asyncio.sleep(max(0.0, arrived + at - asyncio.get_running_loop().time()))
                    data = sound if isinstance(sound, bytes) else pcm(sound, plan.get("silent", False))
                    yield (
                        _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
                        if sse
                        else data
                    )
                if plan.get("error"):
                    yield _event({"type": "error", "error": {"message": "broke in the middle"}})
                elif sse:
                    yield _event({"type": "speech.audio.done", "finish_reason": plan.get("finish", "stop")})
                await asyncio.sleep(plan.get("tail", 0.0))
            finally:
                self.running -= 1

        return StreamingResponse(answer(), media_type="text/event-stream" if sse else "audio/pcm")


def _event(data: dict) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@contextlib.contextmanager
def serving() -> Iterator[KnownServer]:
    """The server on a free port, in a thread with a loop of its own."""
    known = KnownServer()
    routes = [Route("/v1/models", known.models), Route("/v1/audio/speech", known.speech, methods=["POST"])]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    known.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield known
    finally:
        server.should_exit = True
        thread.join(10)
