"""Closed loops in the engine's own process under several settings of the codec's scheduler, one after the other.

    python3 -m tests.gpu.check_sharing "streams=32" "streams=32,gather=4,lead_s=0.1" "streams=32,fill=0"

Each argument is a run of --seconds: how many streams, fields of SchedulerSettings, fill=0 for ends that are cut into
captured sizes instead of filled up. Requests of 12 to 110 frames, drawn with a fixed seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time
from dataclasses import dataclass, field

from engine.chunks import playback_end
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.request import SpeechRequest
from engine.scheduler import SchedulerSettings
from tests.gpu.check_engine import TEXT, random_voice

COVERING = SchedulerSettings.covering


@dataclass
class Heard:
    """What listeners of a run noticed; times in seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    audio: float = 0.0
    late: list[float] = field(default_factory=list)  # of interrupted streams


class Loop:
    """Streams that follow each other in so many threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        draws = random.Random(0)
        self._lengths = [min(110, max(12, int(draws.lognormvariate(3.8, 0.45)))) for _ in range(8000)]
        base = engine.checkpoint.task == "Base"
        self._voices = [random_voice(engine, i, 100) for i in range(8)] if base else []

    def run(self, streams: int, seconds: float) -> Heard:
        heard, numbers, until = Heard(), enumerate(self._lengths), time.monotonic() + seconds
        threads = [threading.Thread(target=self._follow, args=(heard, numbers, until)) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return heard

    def _follow(self, heard: Heard, numbers: enumerate, until: float) -> None:
        while time.monotonic() < until:
            with self._lock:
                index, frames = next(numbers)
            self._speak(heard, index, frames)

    def _speak(self, heard: Heard, index: int, frames: int) -> None:
        who = {"voice": self._voices[index % len(self._voices)]} if self._voices else {"speaker": "aiden"}
        began, plays_until, late, first = time.monotonic(), None, 0.0, None
        limits = {"min_frames": frames, "max_frames": frames, "seed": index, "language": "english"}
        for chunk in self._engine.stream(SpeechRequest(TEXT[: 40 + index % 20], **limits, **who)):  # type: ignore
            at = chunk.emitted_at
            first = at - began if first is None else first
            late += max(0.0, at - plays_until) if plays_until is not None else 0.0
            plays_until = playback_end(plays_until, at, chunk.frames)
        with self._lock:
            heard.first.append(first or 0.0)
            heard.whole.append(time.monotonic() - began)
            heard.audio += frames * 0.08
            heard.late += [late] if late else []


def watch_steps(steps: list[tuple[float, float]]) -> None:
    """Note the seconds of each talker step, and how many of them the host waited for the device."""
    original = EngineLoop._step_talker

    def timed(loop: EngineLoop) -> None:
        began, waited = time.perf_counter(), loop._talker.waited_s
        original(loop)
        steps.append((time.perf_counter() - began, loop._talker.waited_s - waited))

    EngineLoop._step_talker = timed  # type: ignore[method-assign]


def percentile(values: list[float], share: float) -> float:
    return 1e3 * sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="streams=N[,FIELD=VALUE...]")
    parser.add_argument("--model", default="dummy:1.7b-customvoice")
    parser.add_argument("--config", default="configs/latency.yaml")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    settings = dict(item.split("=", 1) for item in args.set)
    steps: list[tuple[float, float]] = []
    watch_steps(steps)
    engine = Engine.from_config(args.config, model=args.model, **{"talker.max_num_seqs": 64, **settings})
    try:
        stage, loop = engine._loop._codec, Loop(engine)
        base = stage._queue.settings
        loop.run(16, 1.0)  # everything is warm
        for run in args.runs:
            given = dict(pair.split("=") for pair in run.split(","))
            changes = {key: float(value) if "." in value else int(value) for key, value in given.items()}
            streams, fill = int(changes.pop("streams")), changes.pop("fill", 1)
            SchedulerSettings.covering = COVERING if fill else SchedulerSettings.runnable  # type: ignore[method-assign]
            stage._queue.settings = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
            stage._in_flight = stage._queue.settings.in_flight
            steps.clear()
            before, began = stage.batches, time.monotonic()
            heard = loop.run(streams, args.seconds)
            wall = time.monotonic() - began
            step, waited = (1e3 * statistics.mean(each) for each in zip(*steps, strict=True))
            median, most, later = (
                percentile(heard.first, 0.5),
                percentile(heard.first, 0.95),
                percentile(heard.first[streams:] or heard.first, 0.95),
            )
            print(
                f"result {run}: {heard.audio / wall:.0f} x; step {step:.2f} ms, waiting {waited:.2f}; first sound "
                f"p50 {median:.1f}, p95 {most:.1f} ms ({later:.1f} after the first wave), whole "
                f"{1e3 * statistics.mean(heard.whole):.0f} ms; interrupted {len(heard.late)}; "
                f"{(stage.batches - before) / len(steps):.2f} codec steps a talker step",
                flush=True,
            )
    finally:
        engine.close()


if __name__ == "__main__":
    main()
