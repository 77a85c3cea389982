"""What a listener notices, as numbers. Pure functions on rows and plain values; no clock, no files.

Definitions (docs/architecture.md, design of the peers' benchmarks named where followed):

    first byte      first body byte minus dispatch; a WAV header counts here and nowhere else
    first playable  first PCM sample minus dispatch: the TTFA
    audible TTFA    arrival of the chunk that holds the first audible sample minus dispatch (nari-labs/benchmarks)
    x real time     audio seconds per wall second (more is better), per request and over the measured window
    underrun        playback starts with the first sample, no start buffer; every wait for the next chunk counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import numpy as np

from eval.records import RequestRow

CONTINUITY_MS = (50, 100, 200)  # share of streams whose longest single wait stays within (sglang-omni's C50/C100/C200)
RESAMPLES = 1000
CONFIDENCE = 0.95
LAG_LIMIT_MS = 10.0  # client lag (p95) beyond which first-audio figures say more about the client than the server


# ---- distributions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """Of `count` values. `ci` holds the 95 % bootstrap interval of each statistic; empty with fewer than 2 values."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    minimum: float
    maximum: float
    ci: dict[str, tuple[float, float]]


def distribution(values: Sequence[float], *, interval: bool = True, seed: int = 0) -> Distribution | None:
    """Mean and percentiles (linear interpolation) with bootstrap confidence intervals; None of nothing."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return None
    p50, p95, p99 = (float(v) for v in np.percentile(x, (50, 95, 99)))
    return Distribution(
        count=x.size,
        mean=float(x.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        minimum=float(x.min()),
        maximum=float(x.max()),
        ci=_bootstrap(x, seed) if interval and x.size > 1 else {},
    )


def _bootstrap(x: np.ndarray, seed: int) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap. Seed and order are fixed: the same values always print the same interval."""
    x = np.sort(x)
    draws = x[np.random.default_rng(seed).integers(0, x.size, (RESAMPLES, x.size))]
    quantiles = np.percentile(draws, (50, 95, 99), axis=1)
    tails = (100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2)
    statistics = {"mean": draws.mean(axis=1), "p50": quantiles[0], "p95": quantiles[1], "p99": quantiles[2]}
    return {
        name: (float(low), float(high))
        for name, values in statistics.items()
        for low, high in [np.percentile(values, tails)]
    }


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the mean; None with fewer than 2 values."""
    x = np.asarray(values, dtype=np.float64)
    return _bootstrap(x, seed)["mean"] if x.size > 1 else None


# ---- one request -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Playback:
    """A listener without a start buffer. Seconds."""

    waited: float  # in all
    longest: float
    events: int


def playback(arrivals: Sequence[float], durations: Sequence[float]) -> Playback:
    """Play chunks of `durations` that arrive at `arrivals` (seconds, ascending) from the first one on."""
    waits = []
    end = None
    for arrival, duration in zip(arrivals, durations, strict=True):
        if end is not None and arrival > end:
            waits.append(arrival - end)
        end = duration + (arrival if end is None else max(arrival, end))
    return Playback(sum(waits), max(waits, default=0.0), len(waits))


def row_playback(row: RequestRow) -> Playback:
    return playback(row.chunk_times, [n / row.sample_rate for n in row.chunk_samples])


def ttfa_ms(row: RequestRow) -> float | None:
    return 1e3 * (row.chunk_times[0] - row.dispatched) if row.chunk_times else None


def audible_ttfa_ms(row: RequestRow) -> float | None:
    if row.onset is None:
        return None
    for arrival, have in zip(row.chunk_times, accumulate(row.chunk_samples), strict=True):
        if have > row.onset:
            return 1e3 * (arrival - row.dispatched)
    return None


def row_x_real_time(row: RequestRow) -> float:
    wall = row.finished - row.dispatched
    return row.audio_s / wall if wall > 0 else 0.0


def gaps_ms(row: RequestRow) -> list[float]:
    return [1e3 * (b - a) for a, b in zip(row.chunk_times, row.chunk_times[1:], strict=False)]


def peak_in_flight(rows: Sequence[RequestRow]) -> int:
    """Most requests between dispatch and finish at one moment (of one session's rows)."""
    events = sorted([(r.dispatched, 1) for r in rows] + [(r.finished, -1) for r in rows])  # an end before a start
    return max(accumulate(step for _, step in events), default=0)


# ---- a cell ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellMetrics:
    """All figures of one load setting. Latencies over requests that ended well; failures are counted beside them.

    Units: `*_ms` milliseconds, `*_s` seconds. `x_real_time` is the audio received over the measured window,
    `x_real_time_request` per request. `mean_audio_s` stands beside requests/s because the rate alone says nothing.
    """

    requests: int
    ok: int
    failures: dict[str, int]
    window_s: float
    peak_in_flight: int
    requests_per_s: float
    x_real_time: float
    audio_s: float
    mean_audio_s: float | None
    characters_per_s: float | None
    first_byte_ms: Distribution | None
    ttfa_ms: Distribution | None
    audible_ttfa_ms: Distribution | None
    leading_silence_ms: Distribution | None
    e2e_ms: Distribution | None
    x_real_time_request: Distribution | None
    gap_ms: Distribution | None
    underrun_ms: Distribution | None
    underrun_events: int
    continuity: dict[str, float]
    lag_ms: Distribution | None

    def to_dict(self) -> dict:
        return asdict(self)


def cell_metrics(rows: Sequence[RequestRow]) -> CellMetrics:
    """Figures of one cell's rows; warm-up rows are left out here."""
    rows = [r for r in rows if not r.warmup]
    good = [r for r in rows if r.ok]
    plays = [row_playback(r) for r in good]
    sessions = [[r for r in rows if r.session == s] for s in sorted({r.session for r in rows})]
    window = sum(max(r.finished for r in s) - min(r.dispatched for r in s) for s in sessions)
    audio = sum(r.audio_s for r in rows)
    characters = [len(r.text) / r.audio_s for r in good if r.audio_s]
    return CellMetrics(
        requests=len(rows),
        ok=len(good),
        failures=dict(Counter(r.status for r in rows if not r.ok)),
        window_s=window,
        peak_in_flight=max((peak_in_flight(s) for s in sessions), default=0),
        requests_per_s=len(good) / window if window else 0.0,
        x_real_time=audio / window if window else 0.0,
        audio_s=audio,
        mean_audio_s=float(np.mean([r.audio_s for r in good])) if good else None,
        characters_per_s=float(np.mean(characters)) if characters else None,
        first_byte_ms=distribution([1e3 * (r.first_byte - r.dispatched) for r in good if r.first_byte is not None]),
        ttfa_ms=_of(good, ttfa_ms),
        audible_ttfa_ms=_of(good, audible_ttfa_ms),
        leading_silence_ms=distribution([1e3 * r.onset / r.sample_rate for r in good if r.onset is not None]),
        e2e_ms=distribution([1e3 * (r.finished - r.dispatched) for r in good]),
        x_real_time_request=_of(good, row_x_real_time),
        gap_ms=distribution(
            [gap for r in good for gap in gaps_ms(r)], interval=False
        ),  # gaps of a stream hang together
        underrun_ms=distribution([1e3 * p.waited for p in plays]),
        underrun_events=sum(p.events for p in plays),
        continuity={
            f"<= {limit} ms": sum(1e3 * p.longest <= limit for p in plays) / len(plays) for limit in CONTINUITY_MS
        }
        if plays
        else {},
        lag_ms=distribution([1e3 * (r.dispatched - r.scheduled) for r in rows]),
    )


def _of(rows: Sequence[RequestRow], measure) -> Distribution | None:
    return distribution([value for r in rows if (value := measure(r)) is not None])
