"""A stand-in engine for tests of the HTTP side: the real streams, voice library and checks, but sines for speech.

What the text asks for happens: "[break]" fails after two chunks, "[late]" ends at its deadline, "[empty]" makes no
sound. The acceptance tests in test_real_engine.py use the real engine.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np

from engine import text
from engine.audio import load_audio
from engine.chunks import check_schedule, next_boundary
from engine.errors import EngineBusy, EngineClosed
from engine.request import SAMPLES_PER_FRAME, AudioChunk, SpeechRequest, SpeechResult
from engine.sampling import resolve_seed
from engine.stream import SpeechStream, failed
from engine.voices import VoiceLibrary


class StandIn:
    def __init__(self, folder, *, task="Base", pace_s=0.0, slots=4, waiting=2) -> None:
        self.info = SimpleNamespace(
            model="stand-in",
            checkpoint_id="stand-in-1",
            task=task,
            weights="random",
            languages=("english", "german"),
            speakers=("ryan", "vivian") if task == "CustomVoice" else (),
            config_hash="0" * 12,
        )
        self.voices = VoiceLibrary(folder, encode=lambda audio: (np.ones(8, np.float32), np.zeros((5, 4), np.int64)))
        self.pace_s = pace_s
        self.requests: list[SpeechRequest] = []
        self.ends: list[str] = []
        self._limit = slots + waiting
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.closed = False

    def prepare_voice(self, audio, sample_rate=None, transcript=None):
        return self.voices.prepare(load_audio(audio, sample_rate, name="voice"), transcript)

    def stream(self, request: SpeechRequest) -> SpeechStream:
        cleaned = text.prepare(request.text.replace("[", "").replace("]", ""), max_chars=20_000, split_chars=280)
        seed = resolve_seed(request.seed)
        if isinstance(request.voice, str):
            self.voices.entry(request.voice)
        if request.chunk_schedule:
            check_schedule(request.chunk_schedule)
        stream = SpeechStream(request, cleaned.text, seed, self.cancel, input_tokens=len(cleaned.text.split()))
        with self._lock:
            if self.closed:
                raise EngineClosed("the engine is restarting; try again shortly")
            if len(self._running) >= self._limit:
                raise EngineBusy("all places are taken; try again shortly", retry_after_s=2.5)
            self._running[request.id] = threading.Event()
        self.requests.append(request)
        threading.Thread(target=self._speak, args=(stream, request, self._running[request.id]), daemon=True).start()
        return stream

    def _speak(self, stream: SpeechStream, request: SpeechRequest, stop: threading.Event) -> None:
        started, first, done, index = time.monotonic(), None, 0, 0
        total = request.max_frames or 20
        reason = "length" if request.max_frames else "stop"
        schedule = request.chunk_schedule or (1, 2, 4, 8, 12)
        if "[empty]" in request.text:
            total, reason = 0, "silence"
        if "[late]" in request.text:
            total, reason = 0, "deadline"
        while done < total:
            frames = min(total, next_boundary(done, schedule)) - done
            if stop.wait(self.pace_s * frames):
                reason = "cancelled"
                break
            if "[break]" in request.text and index == 2:
                reason = "error"
                break
            at = np.arange(done * SAMPLES_PER_FRAME, (done + frames) * SAMPLES_PER_FRAME)
            pcm = (0.3 * np.sin(2 * np.pi * 440 * at / 24_000)).astype(np.float32)
            first = first or time.monotonic()
            stream.put(AudioChunk(stream.id, index, done, frames, pcm, time.monotonic()))
            done, index = done + frames, index + 1
        with self._lock:
            del self._running[stream.id]
            self.ends.append(reason)
        if reason == "error":
            stream.put(failed("a test asked for it"))
            return
        stream.put(
            SpeechResult(
                request_id=stream.id,
                finish_reason=reason,
                frames=done,
                seed=stream.seed,
                text=stream.text,
                submitted_at=started,
                first_chunk_at=first,
                finished_at=time.monotonic(),
                model="stand-in",
                weights="random",
                detail="" if reason == "stop" else f"it ended as {reason}",
            )
        )

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            event = self._running.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    def metrics(self) -> dict[str, float]:
        return {"active": len(self._running), "finished-stop": self.ends.count("stop")}


def expected_pcm(frames: int) -> np.ndarray:
    """int16 samples of a stand-in's speech."""
    at = np.arange(frames * SAMPLES_PER_FRAME)
    pcm = (0.3 * np.sin(2 * np.pi * 440 * at / 24_000)).astype(np.float32)
    return np.floor(pcm.astype(np.float64) * 32767 + 0.5).astype(np.int16)
