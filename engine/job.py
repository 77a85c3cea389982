"""One request inside the engine: what it asked for, how far it is, what it holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from engine.request import AudioChunk, SpeechResult
from engine.stream import SpeechStream
from engine.talker.slots import PromptRows, SlotOptions
from engine.watchdog import Watchdog


@dataclass(frozen=True)
class Part:
    """One utterance of a request: short text is one part, long text several."""

    text: str
    prompt: PromptRows
    options: SlotOptions


@dataclass
class Job:
    """Only the engine's thread writes to it after submission."""

    stream: SpeechStream
    parts: tuple[Part, ...]
    task: str
    watchdog: Watchdog
    model: str
    weights: str
    config_hash: str = ""
    chunk_schedule: tuple[int, ...] | None = None
    deadline: float | None = None  # monotonic seconds
    reference_codes: np.ndarray | None = None  # int64 [frames, G], decoded ahead of the new codes
    reference_key: str | None = None  # content hash of the reference: keys the cached codec state
    submitted_at: float = field(default_factory=time.monotonic)

    part: int = 0
    made: int = 0  # frames of codes so far
    part_starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # (part, first frame), not yet told
    talker_id: str | None = None  # set while the talker has the current part
    codec_slot: int | None = None
    codes: list[np.ndarray] = field(default_factory=list)  # int64 [n, G], produced but not decoded
    in_flight: int = 0  # frames that the codec is working on
    decoded: int = 0  # frames emitted
    chunks: int = 0
    first_chunk_at: float | None = None
    ending: str | None = None  # finish reason, once no more frames will come
    trouble: str | None = None  # finish reason, when it is to end at once
    detail: str = ""

    @property
    def id(self) -> str:
        return self.stream.id

    def take(self, frames: int) -> np.ndarray:
        """The next `frames` frames of codes for the codec, int64 [frames, G]; fewer where there are no more."""
        taken: list[np.ndarray] = []
        while frames and self.codes:
            head = self.codes[0]
            if len(head) <= frames:
                taken.append(self.codes.pop(0))
            else:
                taken.append(head[:frames])
                self.codes[0] = head[frames:]
            frames -= len(taken[-1])
            self.in_flight += len(taken[-1])
        return np.concatenate(taken) if len(taken) > 1 else taken[0]

    def emit(self, pcm: np.ndarray, frames: int) -> AudioChunk:
        """Hand `frames` frames of PCM to the listener."""
        now = time.monotonic()
        if self.first_chunk_at is None:
            self.first_chunk_at = now
        told = self.decoded + frames
        starts = tuple(start for start in self.part_starts if start[1] < told)
        self.part_starts = self.part_starts[len(starts) :]
        chunk = AudioChunk(self.id, self.chunks, self.decoded, frames, pcm, now, starts)
        self.chunks += 1
        self.decoded += frames
        self.stream.put(chunk)
        return chunk

    def result(self, reason: str) -> SpeechResult:
        return SpeechResult(
            request_id=self.id,
            finish_reason=reason,
            frames=self.decoded,
            seed=self.stream.seed,
            text=self.stream.text,
            submitted_at=self.submitted_at,
            first_chunk_at=self.first_chunk_at,
            finished_at=time.monotonic(),
            model=self.model,
            weights=self.weights,
            config_hash=self.config_hash,
            detail=self.detail,
        )
