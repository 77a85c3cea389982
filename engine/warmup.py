"""One real request before the engine calls itself ready: the first caller pays for no first time."""

from __future__ import annotations

import time
from typing import Any

from engine.errors import EngineFailed
from engine.request import SpeechRequest

FRAMES = 8


def warm_up(engine: Any) -> float:
    """Speak a few frames and throw them away; seconds it took.

    Raises:
        EngineFailed: the request did not end as it should, so none will.
    """
    started = time.monotonic()
    info = engine.info
    voice = None
    if info.task == "Base":
        voices = engine.voices.list()
        if not voices:
            return 0.0  # nothing to clone yet
        voice = voices[0].name
    request = SpeechRequest(
        text="Ready.",
        voice=voice,
        speaker=info.speakers[0] if info.speakers else None,
        instruct="A calm voice." if info.task == "VoiceDesign" else None,
        seed=0,
        max_frames=FRAMES,
    )
    with engine.stream(request) as stream:
        chunks = list(stream)
    if not chunks:
        raise EngineFailed(f"the first request made no sound: {stream.result.detail or stream.result.finish_reason}")
    return time.monotonic() - started
