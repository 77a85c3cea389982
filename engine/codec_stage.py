"""The codec's side of the engine's thread: which chunks run now, what is under way, what is ready to be heard."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.codec.graphs import CodecRunner, Decoded
from engine.codec.streaming import SlotState
from engine.job import Job
from engine.scheduler import CodecBatch, CodecQueue, SchedulerSettings
from engine.trace import Trace

FIRST_WAIT_STREAMS, FIRST_WAIT_S = 8, 3e-3  # see `run`; with more streams the thread has no time to spare
PRIMED_STATES = 64  # codec states kept after the reference clip of a voice, least recently used dropped


@dataclass(frozen=True)
class _Launch:
    jobs: list[Job]
    counts: list[int]  # frames of each job; of one that ended they may be fewer than the step has
    frames: int
    decoded: Decoded
    at: float


class CodecStage:
    """Between talker and listeners: a queue of frames per stream, and the decoder's slots. One thread."""

    def __init__(self, runner: CodecRunner, settings: SchedulerSettings, trace: Trace) -> None:
        self._runner = runner
        self._queue = CodecQueue(settings)
        self._in_flight = settings.in_flight
        self._trace = trace
        self._jobs: dict[str, Job] = {}
        self._launched: deque[_Launch] = deque()
        self._first: deque[_Launch] = deque()  # first chunks that go ahead
        self._primed: OrderedDict[str, SlotState] = OrderedDict()
        self.batches = 0

    @property
    def free_slots(self) -> int:
        return self._runner.free_slots

    @property
    def stats(self) -> dict[str, int]:
        return {"batches": self.batches, **self._runner.stats}

    def open(self, job: Job) -> None:
        """Take a slot for the job."""
        job.codec_slot = self._runner.open()
        self._queue.add(job.id, schedule=job.chunk_schedule, task=job.task)
        self._jobs[job.id] = job

    def close(self, job: Job) -> None:
        """Free the job's slot; chunks under way are dropped when they come. Does nothing for a job without a slot."""
        self._queue.remove(job.id)
        self._jobs.pop(job.id, None)
        job.codes.clear()
        if job.codec_slot is not None:
            self._runner.close(job.codec_slot)
            job.codec_slot = None

    def produced(self, job: Job, codes: np.ndarray, *, ended: bool) -> None:
        """New frames of a job, int64 [n, G]; `ended`: its last."""
        if len(codes):
            job.codes.append(codes)
        self._queue.produce(job.id, len(codes), time.monotonic(), ended=ended)

    def finished(self, job: Job) -> bool:
        """Whether every frame of an ended job was decoded and handed out."""
        return self._queue.done(job.id) and job.in_flight == 0

    def run(self, *, wait: bool, first_wait: bool = False) -> Iterator[tuple[Job, np.ndarray, int]]:
        """Launch chunks that are due; yields (job, float32 PCM, frames) of what is ready, in launch order.

        On a GPU no more than `in_flight` launches are under way (and first chunks, where they go ahead of all others).
        What is due beyond that waits here, where it is put in order and shares a launch with what comes due meanwhile;
        on the device it would wait in the order in which it came, a launch for every one or two streams.

        `wait` waits for the device, until nothing is due: right when the talker has nothing to do meanwhile.
        `first_wait` waits for a first chunk for up to 3 ms, at few streams: right when the talker's next step will hold
        the thread for longer.
        """
        yield from self._collect()
        while True:
            while self._queue.settings.ahead and (batch := self._queue.take(time.monotonic(), ahead=True)):
                yield from self._launch_all(batch, ahead=True)
            while len(self._launched) < self._in_flight:
                if (batch := self._queue.take(time.monotonic())) is None:
                    break
                yield from self._launch_all(batch)
            if not wait or not (self._launched or self._first):
                break
            yield from self._collect(wait=True)
        if first_wait and self._first_came():
            yield from self._collect()

    def _first_came(self) -> bool:
        """Whether a first chunk under way came within FIRST_WAIT_S."""
        launched = (*self._first, *self._launched)
        firsts = [launch.decoded for launch in launched if any(job.chunks == 0 for job in launch.jobs)]
        if not firsts or len(self._jobs) > FIRST_WAIT_STREAMS:
            return False
        until = time.monotonic() + FIRST_WAIT_S
        while not firsts[0].ready:
            if time.monotonic() >= until:
                return False
            time.sleep(5e-5)
        return True

    def _launch_all(self, batch: CodecBatch, ahead: bool = False) -> Iterator[tuple[Job, np.ndarray, int]]:
        left = list(batch.streams)
        while left:
            # A voice that is heard for the first time costs its whole reference: nobody else waits for that.
            now = [name for name in left if self._primed_already(self._jobs[name])] or left[:1]
            self._launch([self._jobs[name] for name in now], batch.frames, ahead)
            yield from self._collect()
            left = [name for name in left if name not in now and name in self._jobs]  # one may have ended meanwhile

    def _launch(self, jobs: list[Job], frames: int, ahead: bool) -> None:
        for job in jobs:
            if job.reference_codes is not None:
                self._prime(job)
        taken = [job.take(frames) for job in jobs]
        codes = np.zeros((len(jobs), frames, taken[0].shape[1]), np.int64)
        for row, each in zip(codes, taken, strict=True):
            row[: len(each)] = each
        counts = [len(each) for each in taken]
        slots = [job.codec_slot for job in jobs if job.codec_slot is not None]
        decoded = self._runner.launch(slots, torch.from_numpy(codes).transpose(1, 2), ahead)
        (self._first if ahead else self._launched).append(_Launch(jobs, counts, frames, decoded, time.monotonic()))
        self.batches += 1

    def _collect(self, *, wait: bool = False) -> Iterator[tuple[Job, np.ndarray, int]]:
        """What is ready; `wait`: at least the oldest launch."""
        while launched := self._ready() or (wait and (self._first or self._launched)):
            wait = False
            launch = launched.popleft()
            pcm = launch.decoded.wait()
            ms = 1e3 * (time.monotonic() - launch.at)
            streams, graph = len(launch.jobs), launch.decoded.graph
            self._trace.event("codec", ms=ms, streams=streams, frames=launch.frames, graph=graph)
            for job, samples, frames in zip(launch.jobs, pcm, launch.counts, strict=True):
                job.in_flight -= frames
                if self._jobs.get(job.id) is job:
                    yield job, samples[: frames * self._runner.decoder.samples_per_frame], frames

    def _ready(self) -> deque[_Launch] | None:
        """The launches of which the oldest is ready and nobody's chunk before it is still to be collected."""
        rest = bool(self._launched) and self._launched[0].decoded.ready  # asked first: then the first chunks before it
        if self._first and self._first[0].decoded.ready:  # show here, whatever the device does meanwhile
            return self._first
        return self._launched if rest else None

    def _primed_already(self, job: Job) -> bool:
        return job.reference_codes is None or job.reference_key in self._primed

    def _prime(self, job: Job) -> None:
        """Run the reference codes through the decoder once, so that the new speech continues them.

        The state after a reference is kept by the content of the clip: the next request with the voice restores it.
        """
        if job.reference_codes is None or job.codec_slot is None:
            return
        slot, key = job.codec_slot, job.reference_key
        if key is not None and key in self._primed:
            self._runner.restore(slot, self._primed[key])
            self._primed.move_to_end(key)
        else:
            self._runner.prime(slot, torch.from_numpy(np.ascontiguousarray(job.reference_codes.T[None])))
            if key is not None:
                self._primed[key] = self._runner.save(slot)
                while len(self._primed) > PRIMED_STATES:
                    self._primed.popitem(last=False)
        job.reference_codes = None
