"""Chunk schedules: how many frames each chunk of a stream has, and how long they keep a listener busy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from engine.errors import InvalidRequest
from engine.request import FRAMES_PER_SECOND

# Frames per chunk; the last size repeats. A small first chunk is heard early, a growing next one keeps the
# listener's buffer ahead of the cost of small chunks (a jump from 1 to 25 stutters: vllm-omni #1583, #4913).
CHUNK_SCHEDULES: dict[str, tuple[int, ...]] = {
    "latency": (1, 2, 4, 8, 12),
    "balanced": (4, 4, 8, 16, 25),
    "throughput": (25,),
}

MAX_CHUNK_FRAMES = 250  # 20 s: longer chunks are no streaming
MAX_SCHEDULE_LENGTH = 64


def check_schedule(schedule: Iterable[int], name: str = "chunk_schedule") -> tuple[int, ...]:
    """The schedule as a tuple. Raises InvalidRequest unless it is 1-64 sizes of 1-250 frames."""
    sizes = tuple(schedule)
    if not 1 <= len(sizes) <= MAX_SCHEDULE_LENGTH:
        raise InvalidRequest(f"{name} has {len(sizes)} sizes; give 1 to {MAX_SCHEDULE_LENGTH}", field=name)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_CHUNK_FRAMES:
            raise InvalidRequest(
                f"{name} holds {size!r}; each size is a whole number of 80 ms frames, 1 to {MAX_CHUNK_FRAMES}",
                field=name,
            )
    return sizes


@lru_cache(maxsize=1 << 16)  # asked for every stream at every step
def next_boundary(decoded: int, schedule: tuple[int, ...]) -> int:
    """The first chunk border after `decoded` frames; the last size of the schedule repeats.

    Example:
        With (1, 2, 4) the borders are 1, 3, 7, 11, 15, ...
    """
    border = 0
    for border in accumulate(schedule):
        if border > decoded:
            return border
    return border + ((decoded - border) // schedule[-1] + 1) * schedule[-1]


def playback_end(plays_until: float | None, emitted_at: float, frames: int) -> float:
    """When a listener without a start buffer has played a chunk emitted at `emitted_at`.

    A listener that ran dry goes on when the chunk comes, so being late once is not owed for ever.
    """
    start = emitted_at if plays_until is None else max(plays_until, emitted_at)
    return start + frames / FRAMES_PER_SECOND
