"""Small measurements on mono PCM, float32 [samples] in [-1, 1]."""

from __future__ import annotations

import numpy as np

AUDIBLE_DBFS = -45.0
WINDOW_S = 0.020
HOP_S = 0.010


def window_dbfs(pcm: np.ndarray, sample_rate: int) -> np.ndarray:
    """RMS level in dBFS of every 20 ms window, one each 10 ms, float64 [windows]; digital silence is -200.

    A clip shorter than one window counts as one window.
    """
    if pcm.size == 0:
        return np.empty(0)
    window, hop = round(WINDOW_S * sample_rate), round(HOP_S * sample_rate)
    power = np.concatenate(([0.0], np.cumsum(np.square(pcm, dtype=np.float64))))
    starts = np.arange(0, max(pcm.size - window, 0) + 1, hop)
    ends = np.minimum(starts + window, pcm.size)
    mean = np.maximum(power[ends] - power[starts], 0.0) / (ends - starts)
    return 10 * np.log10(np.maximum(mean, 1e-20))


def loudest_dbfs(pcm: np.ndarray, sample_rate: int) -> float:
    """Level of the loudest 20 ms window, dBFS."""
    levels = window_dbfs(pcm, sample_rate)
    return float(levels.max()) if levels.size else -200.0


def audible_onset(pcm: np.ndarray, sample_rate: int, threshold_dbfs: float = AUDIBLE_DBFS) -> int | None:
    """First sample of the first of two consecutive 20 ms windows (10 ms hop) above the threshold; None if none is.

    The definition of nari-labs/benchmarks, so that audible times can be compared with theirs.
    """
    active = window_dbfs(pcm, sample_rate) > threshold_dbfs
    pairs = np.flatnonzero(active[:-1] & active[1:])
    return int(pairs[0]) * round(HOP_S * sample_rate) if pairs.size else None


def resample(pcm: np.ndarray, source: int, target: int) -> np.ndarray:
    """Mono float32 at another rate (soxr, very high quality)."""
    pcm = np.ascontiguousarray(pcm, dtype=np.float32)
    if source == target or pcm.size == 0:
        return pcm
    import soxr

    return soxr.resample(pcm, source, target, quality="VHQ").astype(np.float32)
