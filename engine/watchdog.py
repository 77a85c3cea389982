"""Notices a runaway: the model goes on although nothing is said any more.

Public reports of Qwen3-TTS show two kinds: room tone to the frame limit (sglang-omni #1179: 207 of 60,424 requests)
and one code repeated for ever (mlx-audio #921). Either ends the stream with a reason that is not "stop".
"""

from __future__ import annotations

import numpy as np

from engine.config import WatchdogConfig
from engine.request import SAMPLE_RATE, SAMPLES_PER_FRAME


class Watchdog:
    """Watches one stream; feed it codes and PCM in order."""

    def __init__(self, config: WatchdogConfig, enabled: bool) -> None:
        self._config = config
        self._enabled = enabled
        self._last_code = -1
        self._repeats = 0
        self._silent_samples = 0
        self._level = 10 ** (config.silence_dbfs / 20)

    def codes(self, codes: np.ndarray) -> str | None:
        """Code 0 of new frames, int [n] → "loop" when one value has filled `loop_frames` frames in a row."""
        if not self._enabled:
            return None
        for code in codes.tolist():
            self._repeats = self._repeats + 1 if code == self._last_code else 1
            self._last_code = code
            if self._repeats >= self._config.loop_frames:
                return "loop"
        return None

    def pcm(self, pcm: np.ndarray) -> str | None:
        """New PCM, float32 [frames * 1920] → "silence" when the last `silence_s` seconds were below the level."""
        if not self._enabled:
            return None
        for frame in pcm.reshape(-1, SAMPLES_PER_FRAME):
            silent = float(np.sqrt(np.mean(np.square(frame)))) < self._level
            self._silent_samples = self._silent_samples + SAMPLES_PER_FRAME if silent else 0
            if self._silent_samples >= self._config.silence_s * SAMPLE_RATE:
                return "silence"
        return None
