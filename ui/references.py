"""Uploaded and recorded references between the upload and the request: kept by content hash, never by a path.

The page holds only the hash; whoever does not know it cannot use the recording.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from engine.audio import Audio
from engine.errors import UnknownVoice

PREFIX = "clip:"


class References:
    """The newest `capacity` recordings (at most 2.9 MB each)."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._clips: OrderedDict[str, Audio] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, audio: Audio) -> str:
        """Keep a recording; returns the token that stands for it."""
        with self._lock:
            self._clips[audio.hash] = audio
            self._clips.move_to_end(audio.hash)
            while len(self._clips) > self._capacity:
                self._clips.popitem(last=False)
        return PREFIX + audio.hash

    def get(self, token: str) -> Audio:
        """Raises `UnknownVoice` when it was dropped, or never was here."""
        with self._lock:
            audio = self._clips.get(token.removeprefix(PREFIX))
            if audio is None:
                raise UnknownVoice("The recording is no longer here: upload or record it again.", field="voice")
            self._clips.move_to_end(audio.hash)
            return audio
