"""What goes into the engine and what comes out of it: plain frozen values."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.voices import VoicePrompt

SAMPLE_RATE = 24_000  # Hz, of every PCM array inside the engine
SAMPLES_PER_FRAME = 1920  # 80 ms; 12.5 frames a second
FRAMES_PER_SECOND = SAMPLE_RATE / SAMPLES_PER_FRAME


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling settings of one request; None keeps the checkpoint's `generation_config.json`.

    The `subtalker_*` fields belong to the code predictor (codes 1..G-1), the others to code 0.
    `top_k` 0 means "no limit"; `top_p` 1.0 likewise.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    subtalker_dosample: bool | None = None
    subtalker_temperature: float | None = None
    subtalker_top_k: int | None = None
    subtalker_top_p: float | None = None

    def given(self) -> dict[str, bool | int | float]:
        """The fields that were set."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class SpeechRequest:
    """One text to speak. See docs/architecture.md for the meaning of each field."""

    text: str
    voice: VoicePrompt | str | None = None
    speaker: str | None = None
    instruct: str | None = None
    language: str = "auto"
    x_vector_only: bool = False
    non_streaming_text: bool | None = None
    seed: int | None = None
    max_frames: int | None = None
    min_frames: int = 2
    sampling: SamplingOverrides = SamplingOverrides()
    chunk_schedule: tuple[int, ...] | None = None
    deadline_s: float | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class AudioChunk:
    """A run of whole frames. `pcm` is float32 [frames * 1920] in [-1, 1] at 24 kHz.

    `starts`: parts of a long text that begin in this chunk, as (index of the part, its first frame in the stream).
    """

    request_id: str
    index: int
    first_frame: int
    frames: int
    pcm: np.ndarray
    emitted_at: float  # time.monotonic(), seconds
    starts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SpeechResult:
    """How a request ended. Times are `time.monotonic()` seconds."""

    request_id: str
    # "stop" is a complete utterance; else "length", "silence", "loop", "cancelled", "deadline" or "error"
    finish_reason: str
    frames: int
    seed: int
    text: str  # as spoken, after cleaning
    submitted_at: float
    first_chunk_at: float | None
    finished_at: float
    model: str
    weights: str  # "trained" | "random"
    config_hash: str = ""  # of the resolved settings
    detail: str = ""  # for people: why it ended early

    @property
    def ok(self) -> bool:
        return self.finish_reason == "stop"

    @property
    def audio_s(self) -> float:
        return self.frames / FRAMES_PER_SECOND

    @property
    def wall_s(self) -> float:
        return self.finished_at - self.submitted_at

    @property
    def ttfa_ms(self) -> float | None:
        return None if self.first_chunk_at is None else 1e3 * (self.first_chunk_at - self.submitted_at)

    @property
    def x_real_time(self) -> float:
        return self.audio_s / self.wall_s if self.wall_s > 0 else 0.0
