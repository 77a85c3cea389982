"""The load driver: sends planned requests at a target and reports each one as it ends.

One asyncio loop sends; nothing is scored, encoded or written to disk in it. How late the loop itself runs is measured
all the while (`Lag`), because a client that cannot keep up measures itself.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from eval.metrics import LAG_LIMIT_MS, distribution
from eval.pcm import audible_onset
from eval.plan import Cell, Planned
from eval.records import RequestRow
from eval.targets import Answer, Ask, Target

HEARTBEAT_S = 0.005


@dataclass(frozen=True)
class LoadSettings:
    language: str = "english"
    deadline_s: float = 120.0
    frames: int | None = None
    session: int = 0
    variant: str = ""


@dataclass
class Lag:
    """How late a 5 ms timer of the client's loop fires, in ms."""

    values: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            self.values.append(1e3 * (time.monotonic() - before - HEARTBEAT_S))

    def to_dict(self) -> dict:
        spread = distribution(self.values, interval=False)
        if spread is None:
            return {"spoilt": False}
        return {
            "mean_ms": spread.mean,
            "p95_ms": spread.p95,
            "max_ms": spread.maximum,
            "spoilt": spread.p95 > LAG_LIMIT_MS,
        }


OnRow = Callable[[RequestRow, np.ndarray], None]  # a finished request and its int16 PCM


async def run_cell(
    target: Target,
    cell: Cell,
    planned: Sequence[Planned],
    settings: LoadSettings,
    *,
    started: float,
    on_row: OnRow,
    stop: Callable[[], bool] = lambda: False,
) -> Lag:
    """Run a cell's requests, warm-up first and apart. Times in rows are seconds after `started` (monotonic).

    `stop` is asked before each request; running ones are left to end. Returns the client's own lag.
    """

    async def one(request: Planned, scheduled: float) -> None:
        answer = await target.speak(
            Ask(
                id=f"{request.id}-s{settings.session}",
                text=request.utterance.text,
                voice=request.utterance.voice,
                language=settings.language,
                seed=request.seed,
                deadline_s=settings.deadline_s,
                frames=settings.frames,
            )
        )
        row, pcm = _row(request, answer, settings, started=started, scheduled=scheduled)
        on_row(row, pcm)

    warm = [p for p in planned if p.warmup]
    measured = [p for p in planned if not p.warmup]
    width = int(cell.level) if cell.kind != "open" else 4
    await _closed(warm, width, one, stop)
    lag = Lag()
    heartbeat = asyncio.create_task(lag.watch())
    try:
        with _short_collections():
            if cell.kind == "closed":
                await _closed(measured, width, one, stop)
            elif cell.kind == "burst":
                for i in range(0, len(measured), width):
                    await _closed(measured[i : i + width], width, one, stop)
            else:
                await _open(measured, one, stop)
    finally:
        heartbeat.cancel()
    return lag


@contextmanager
def _short_collections() -> Iterator[None]:
    """Garbage collection goes over what is made from here on only. Over all that was imported it takes 90 ms, in which
    the client hears nothing: measured, three listeners of a server without fault ran dry."""
    frozen = gc.get_freeze_count()  # the page's process keeps what it was started with frozen (engine/pauses.py)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if frozen:
            gc.collect()
            gc.freeze()


async def _closed(planned: Sequence[Planned], width: int, one, stop: Callable[[], bool]) -> None:
    """`width` workers, each with the next request as soon as its last one ends."""
    waiting = iter(planned)

    async def worker() -> None:
        for request in waiting:
            if stop():
                return
            await one(request, time.monotonic())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(width, len(planned))):
            group.create_task(worker())


async def _open(planned: Sequence[Planned], one, stop: Callable[[], bool]) -> None:
    """Arrivals as planned, whether or not the earlier ones have ended."""
    if not planned:
        return
    start = time.monotonic() - planned[0].at  # a continued cell begins with the first arrival that is left
    async with asyncio.TaskGroup() as group:
        for request in planned:
            due = start + request.at
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if stop():
                return
            group.create_task(one(request, due))


def _row(
    request: Planned, answer: Answer, settings: LoadSettings, *, started: float, scheduled: float
) -> tuple[RequestRow, np.ndarray]:
    pcm = np.concatenate(answer.chunks) if answer.chunks else np.empty(0, np.int16)
    row = RequestRow(
        id=request.id,
        cell=request.cell,
        index=request.index,
        session=settings.session,
        variant=settings.variant,
        utterance=request.utterance.id,
        text=request.utterance.text,
        voice=request.utterance.voice,
        language=settings.language,
        seed=answer.seed,
        warmup=request.warmup,
        scheduled=scheduled - started,
        dispatched=answer.dispatched - started,
        finished=answer.finished - started,
        status=answer.status,
        detail=answer.detail,
        first_byte=None if answer.first_byte is None else answer.first_byte - started,
        chunk_times=tuple(t - started for t in answer.times),
        chunk_samples=tuple(int(c.size) for c in answer.chunks),
        sample_rate=answer.sample_rate,
        finish_reason=answer.finish_reason,
        spoken_text=answer.spoken_text,
        extra=answer.extra,
    )
    return row, pcm


def with_onset(row: RequestRow, pcm: np.ndarray) -> RequestRow:
    """The row with its audible onset filled in; done after the timed part."""
    from dataclasses import replace

    return replace(row, onset=audible_onset(pcm.astype(np.float32) / 32768.0, row.sample_rate))
