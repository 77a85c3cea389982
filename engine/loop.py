"""The thread that drives the models: admit, step the talker, run the codec, hand out PCM, end.

Everything that touches a model's state happens on this thread. Other threads leave commands in an inbox, so a
cancel or a bad request never disturbs another stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from engine.codec_stage import CodecStage
from engine.errors import ChorusError, EngineBusy, EngineClosed
from engine.job import Job
from engine.stream import failed
from engine.talker.talker import Talker, TalkerFrames
from engine.trace import Trace


@contextlib.contextmanager
def _own_threads() -> Iterator[None]:
    """A number of threads that another thread sets for itself is also torch's for every thread to come: put back."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class EngineLoop:
    """Owns the talker, the codec runner and every job. One instance, one thread."""

    def __init__(
        self,
        talker: Talker,
        codec: CodecStage,
        *,
        max_active: int,
        max_waiting: int,
        trace: Trace,
        threads: int = 0,
    ) -> None:
        """threads: CPU threads of torch for what runs on the engine's thread; 0 leaves them alone."""
        self._talker = talker
        self._codec = codec
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._trace = trace
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._active: dict[str, Job] = {}
        self._by_talker: dict[str, Job] = {}
        self._counts: Counter[str] = Counter()
        self._known: set[str] = set()  # ids submitted and not ended; guarded by _wake
        self._queue_moved = False
        self._prefills = 0  # prompts added since the last step
        self._begun = threading.Event()
        self._closing = False
        self._failure: str | None = None
        talker.serve_while_waiting(self._serve)
        self._thread = threading.Thread(target=self._run, args=(threads,), name="chorus-engine", daemon=True)
        with _own_threads():
            self._thread.start()
            self._begun.wait()

    # ---- from any thread ---------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineBusy: `max_waiting` jobs wait already.
            EngineClosed: closed, or the thread has failed.
        """
        with self._wake:
            if self._closing or self._failure:
                raise EngineClosed(self._failure or "the engine is closed; start it again")
            if job.id in self._known:
                raise ChorusError(f"request id {job.id} is in use; give each request its own", field="id")
            if len(self._known) >= self._max_active + self._max_waiting:
                raise EngineBusy(
                    f"{self._max_active} requests are being spoken and {self._max_waiting} wait; try again shortly",
                    retry_after_s=1.0,
                )
            self._known.add(job.id)
            self._inbox.append(("submit", job))
            self._wake.notify()
        self._trace.event("enqueue", job.id, task=job.task, chars=len(job.stream.text))

    def cancel(self, request_id: str) -> bool:
        """Ask for an end; False when no such request is running or waiting."""
        with self._wake:
            if request_id not in self._known:
                return False
            self._inbox.append(("cancel", request_id))
            self._wake.notify()
            return True

    def close(self) -> None:
        """End every request as cancelled and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=60)

    @property
    def failure(self) -> str | None:
        return self._failure

    def metrics(self) -> dict[str, float]:
        """Counters since start and gauges of now."""
        counts = dict(self._counts)
        return {
            "active": len(self._active),
            "waiting": len(self._waiting) + sum(kind == "submit" for kind, _ in list(self._inbox)),
            "talker_slots_free": self._talker.free_slots,
            "talker_kv_blocks_free": self._talker.free_kv_blocks,
            "codec_slots_free": self._codec.free_slots,
            **{f"codec_{name}": value for name, value in self._codec.stats.items()},
            **{f"predictor_{name}": value for name, value in self._talker.placement_stats.items()},
            **counts,
        }

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self, threads: int) -> None:
        if threads:
            torch.get_num_threads()  # a thread takes over the process's number at its first call: that is done now
            torch.set_num_threads(threads)
        self._begun.set()
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._take_commands()
                    self._admit()
                    self._check_deadlines()
                    self._step_talker()
                    self._run_codec()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end_all("cancelled")

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._inbox or self._active or self._waiting or self._closing):
                self._wake.wait()
            return not self._closing

    def _take_commands(self, submitted_only: bool = False) -> None:
        while True:
            with self._wake:
                if not self._inbox or (submitted_only and self._inbox[0][0] != "submit"):
                    return
                kind, item = self._inbox.popleft()
            if kind == "submit":
                self._waiting[item.id] = item
                self._queue_moved = True
            else:
                job = self._active.get(item) or self._waiting.get(item)
                if job is not None:
                    self._end(job, "cancelled")

    def _admit(self) -> None:
        """No more than a step can prefill: the rest would only hold that step up, a millisecond each."""
        room = self._talker.settings.max_num_batched_tokens
        while self._waiting and room > 0 and len(self._active) < self._max_active and self._talker.free_slots:
            _, job = self._waiting.popitem(last=False)
            room -= job.parts[job.part].prompt.length
            self._active[job.id] = job
            self._queue_moved = True
            if job.stream.position:
                job.stream.moved(0)
            self._codec.open(job)
            self._start_part(job)
        full = len(self._active) >= self._max_active or not self._talker.free_slots
        if self._queue_moved and full:  # else the next turn takes them in: not worth a word
            self._queue_moved = False
            for position, job in enumerate(self._waiting.values(), 1):
                if job.stream.position != position:
                    job.stream.moved(position)

    def _start_part(self, job: Job) -> None:
        part = job.parts[job.part]
        job.talker_id = f"{job.id}#{job.part}"
        self._by_talker[job.talker_id] = job
        self._talker.add(job.talker_id, part.prompt, part.options, checked=True)  # when it was submitted
        self._prefills += 1
        self._trace.event("prefill", job.id, part=job.part, rows=part.prompt.length)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        late = [j for j in (*self._waiting.values(), *self._active.values()) if j.deadline and now > j.deadline]
        for job in late:
            job.detail = "it waited too long for a free place" if job.chunks == 0 else "it was cut at its deadline"
            self._end(job, "deadline")

    def _step_talker(self) -> None:
        if not self._talker.busy:
            return
        started, waited, streams = time.monotonic(), self._talker.waited_s, len(self._by_talker)
        self._prefills, prefills = 0, self._prefills
        produced = self._talker.step()
        self._counts["talker_steps"] += 1
        ms, waited_ms = 1e3 * (time.monotonic() - started), 1e3 * (self._talker.waited_s - waited)
        self._trace.event("step", ms=ms, waited_ms=waited_ms, streams=streams, prefills=prefills)
        for frames in produced:
            self._take_frames(frames)

    def _take_frames(self, frames: TalkerFrames) -> None:
        job = self._by_talker.get(frames.id)
        if job is None:
            return
        codes = np.asarray(frames.codes, dtype=np.int64)
        job.made += len(codes)
        trouble = job.watchdog.codes(codes[:, 0]) if len(codes) else None
        if frames.finish:
            del self._by_talker[frames.id]
            job.talker_id = None
        if trouble:
            self._stop_talker(job, trouble, "one code repeated itself: the model had lost the text")
        elif frames.finish == "length":
            job.ending = "length"
            job.detail = f"part {job.part + 1} of {len(job.parts)} reached its limit of frames without an end"
        elif frames.finish == "stop" and job.part + 1 < len(job.parts):
            job.part += 1
            job.part_starts.append((job.part, job.made))
            self._start_part(job)
        elif frames.finish:
            job.ending = frames.finish
        self._codec.produced(job, codes, ended=job.ending is not None)

    def _stop_talker(self, job: Job, reason: str, detail: str) -> None:
        if job.talker_id is not None:
            self._talker.abort(job.talker_id)
            self._by_talker.pop(job.talker_id, None)
            job.talker_id = None
        job.ending, job.detail = reason, detail

    def _run_codec(self) -> None:
        # A step that ran ahead serves while the host waits for it (`_serve`); without one nobody would.
        first_wait = self._talker.settings.scheduler_mode == "sync"
        self._hand_out_chunks(wait=not self._talker.busy, first_wait=first_wait)
        for job in list(self._active.values()):
            if job.trouble is not None:
                self._end(job, job.trouble)
            elif job.ending is not None and job.talker_id is None and self._codec.finished(job):
                self._end(job, job.ending)

    def _hand_out_chunks(self, wait: bool, first_wait: bool) -> None:
        for job, samples, frames in self._codec.run(wait=wait, first_wait=first_wait):
            chunk = job.emit(samples, frames)
            self._counts["frames"] += frames
            self._trace.event("chunk", job.id, index=chunk.index, frames=frames)
            trouble = job.watchdog.pcm(samples)
            if trouble and job.ending is None:
                job.trouble, job.detail = trouble, "it went silent without an end"

    def _serve(self) -> None:
        """What is done while the talker waits for the device: requests are taken in, chunks handed out as they come.
        Nothing that ends a request: vLLM is in the middle of a step that may be about it."""
        self._take_commands(submitted_only=True)
        self._admit()
        self._hand_out_chunks(wait=False, first_wait=False)

    # ---- endings -----------------------------------------------------------------------------------------------

    def _end(self, job: Job, reason: str) -> None:
        self._release(job)
        self._counts[f"finished_{reason}"] += 1
        self._trace.event("end", job.id, reason=reason, frames=job.decoded)
        job.stream.put(job.result(reason))

    def _release(self, job: Job) -> None:
        self._queue_moved |= self._waiting.pop(job.id, None) is not None
        self._active.pop(job.id, None)
        if job.talker_id is not None:
            self._by_talker.pop(job.talker_id, None)
            self._talker.abort(job.talker_id)
            job.talker_id = None
        self._codec.close(job)
        with self._wake:
            self._known.discard(job.id)

    def _end_all(self, reason: str) -> None:
        self._take_commands()
        for job in (*self._active.values(), *self._waiting.values()):
            self._end(job, reason)

    def _fail(self, error: BaseException) -> None:
        """A broken model takes every running request with it: each gets a typed error, none waits for ever."""
        import traceback

        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        with self._wake:
            self._failure = f"the engine failed ({reason}); restart it"
            jobs = [item for kind, item in self._inbox if kind == "submit"]
            self._inbox.clear()
        jobs += [*self._active.values(), *self._waiting.values()]
        self._active.clear()
        self._waiting.clear()
        self._counts["finished_error"] += len(jobs)
        for job in jobs:
            self._known.discard(job.id)
            job.stream.put(failed(reason))
