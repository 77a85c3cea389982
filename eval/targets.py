"""What is measured: something that turns one `Ask` into one `Answer`. All times are `time.monotonic()` seconds."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.errors import ChorusError, DeadlineExceeded, EngineBusy, InvalidRequest
from engine.request import SAMPLE_RATE, SpeechRequest
from eval.datasets import Reference

MAX_THREADS = 512
_DESCRIBED = (
    *("model", "checkpoint_id", "task", "weights", "device", "device_name", "dtype", "scheduler_mode"),
    *("config", "config_hash", "versions", "startup_s", "notice"),
)
GRACE_S = 2.0  # past a request's deadline before the client stops waiting for the engine's own ending


@dataclass(frozen=True)
class Ask:
    """One request. `frames` asks for exactly so many (speed runs); else the text decides."""

    id: str
    text: str
    voice: str
    language: str
    seed: int
    deadline_s: float
    frames: int | None = None


@dataclass
class Answer:
    """What came back. `chunks` holds int16 PCM in order of arrival at `times`."""

    dispatched: float
    finished: float = 0.0
    status: str = "ok"
    detail: str = ""
    first_byte: float | None = None
    times: list[float] = field(default_factory=list)
    chunks: list[np.ndarray] = field(default_factory=list)
    sample_rate: int = SAMPLE_RATE
    finish_reason: str = ""
    spoken_text: str = ""
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def heard(self, pcm: np.ndarray, at: float) -> None:
        if pcm.size:
            self.times.append(at)
            self.chunks.append(pcm)

    def end(self, status: str = "ok", detail: str = "") -> Answer:
        self.finished = time.monotonic()
        self.status, self.detail = status, detail[:500]
        if status == "ok" and not self.chunks:
            self.status = "no_audio"
        return self


class Target(Protocol):
    name: str

    def describe(self) -> dict[str, Any]:
        """What was measured, for run.json: model, weights, settings and their hash, versions, device."""
        ...

    async def prepare(self, references: Mapping[str, Reference]) -> None:
        """Make the voices known, before anything is timed."""
        ...

    async def speak(self, ask: Ask) -> Answer: ...

    async def close(self) -> None: ...


def to_int16(pcm: np.ndarray) -> np.ndarray:
    """float32 in [-1, 1] -> int16, rounded and clipped."""
    return np.clip(np.rint(pcm * 32767.0), -32768, 32767).astype(np.int16)


class EngineTarget:
    """An engine in this process, or in its child process (`engine.process`): the same interface.

    Each request is read by a thread of its own, and its times are taken there.
    """

    def __init__(self, engine: Any, *, own: bool = False) -> None:
        self.engine = engine
        self.name = f"engine {engine.info.model}"
        self._own = own
        self._voices: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="listener")

    def describe(self) -> dict[str, Any]:
        info = self.engine.info
        return {"kind": "engine"} | {key: getattr(info, key) for key in _DESCRIBED if hasattr(info, key)}

    async def prepare(self, references: Mapping[str, Reference]) -> None:
        if self.engine.info.task != "Base":
            return
        loop = asyncio.get_running_loop()
        for name, reference in references.items():
            pcm, rate = reference.pcm()
            self._voices[name] = await loop.run_in_executor(
                self._pool, self.engine.prepare_voice, pcm, rate, reference.transcript
            )

    def add_voice(self, name: str, voice: Any) -> None:
        """Make a prepared voice (`engine.voices.VoicePrompt`) known under `name`."""
        self._voices[name] = voice

    async def speak(self, ask: Ask) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._speak, ask)

    def _request(self, ask: Ask) -> SpeechRequest:
        fixed: dict[str, Any] = {} if ask.frames is None else {"min_frames": ask.frames, "max_frames": ask.frames}
        if self.engine.info.task == "Base":
            who: dict[str, Any] = {"voice": self._voices.get(ask.voice, ask.voice)}
        elif self.engine.info.task == "CustomVoice":
            speakers = self.engine.info.speakers
            turn = zlib.crc32(ask.voice.encode()) % len(speakers)  # bundled voices stand for its speakers, one each
            who = {"speaker": ask.voice if ask.voice in speakers else speakers[turn]}
        else:
            who = {"instruct": "A calm voice that speaks clearly."}
        return SpeechRequest(
            ask.text,
            language=ask.language if ask.language in self.engine.info.languages else "auto",
            seed=ask.seed,
            deadline_s=ask.deadline_s,
            id=ask.id,
            **who,
            **fixed,
        )

    def _speak(self, ask: Ask) -> Answer:
        request = self._request(ask)
        answer = Answer(time.monotonic(), seed=ask.seed)
        try:
            stream = self.engine.stream(request)
            for chunk in stream:
                now = time.monotonic()
                if answer.first_byte is None:
                    answer.first_byte = now
                answer.heard(to_int16(chunk.pcm), now)
                if now - answer.dispatched > ask.deadline_s + GRACE_S:
                    stream.cancel()
        except EngineBusy as error:
            return answer.end("busy", error.message)
        except InvalidRequest as error:
            return answer.end("refused", f"{error.field}: {error.message}")
        except DeadlineExceeded as error:
            return answer.end("deadline", error.message)
        except ChorusError as error:
            return answer.end("server_error", f"{error.code}: {error.message}")
        result = stream.result
        answer.finish_reason, answer.spoken_text = result.finish_reason, result.text
        if result.ok or (ask.frames is not None and result.frames == ask.frames):
            return answer.end("ok")
        if result.finish_reason in ("deadline", "cancelled"):
            return answer.end("deadline", result.detail)
        status = "server_error" if result.finish_reason == "error" else "unfinished"
        return answer.end(status, result.detail or result.finish_reason)

    async def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._own:
            self.engine.close()
