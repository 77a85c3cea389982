"""Where the engine's time goes on a CUDA machine: each part of the engine's thread, and of submitting, per cell.

    python3 -m tests.gpu.check_loop [--model dummy:1.7b-base] [--streams 1,16,32,64] [--profile 32] [--timeline 1,64]

Times are exclusive: what a part calls is counted there. `talker.step` holds the wait for the GPU; `idle` is the
thread with nothing to do. The cell named by --profile runs once more under cProfile, engine thread only; those of
--timeline once more with every kernel recorded (timeline.py).
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import pstats
import statistics
import threading
import time
from collections import defaultdict
from typing import Any

from engine.codec.graphs import CodecRunner, Decoded
from engine.codec_stage import CodecStage
from engine.engine import Engine
from engine.job import Job
from engine.loop import EngineLoop
from engine.prompt import PromptBuilder
from engine.talker.talker import Talker
from engine.watchdog import Watchdog
from tests.gpu import timeline
from tests.gpu.check_engine import cell, random_voice

PARTS: tuple[tuple[type, str, str], ...] = (
    (EngineLoop, "_wait_for_work", "idle"),
    (EngineLoop, "_take_commands", "take commands"),
    (EngineLoop, "_admit", "admit"),
    (Talker, "add", "talker.add"),
    (EngineLoop, "_check_deadlines", "deadlines"),
    (Talker, "step", "talker.step"),
    (Talker, "_hand_out", "talker hand out"),
    (EngineLoop, "_take_frames", "take frames"),
    (Watchdog, "codes", "watchdog"),
    (Watchdog, "pcm", "watchdog"),
    (EngineLoop, "_run_codec", "codec loop"),
    (CodecStage, "_launch", "codec gather"),
    (CodecStage, "_prime", "codec prime"),
    (CodecRunner, "launch", "codec launch"),
    (Decoded, "wait", "codec wait"),
    (Job, "emit", "emit"),
    (EngineLoop, "_end", "end"),
    (Engine, "stream", "submit"),
    (PromptBuilder, "build", "build prompt"),
)
CALLERS = ("submit", "build prompt")  # in the caller's threads, beside the engine's


class Clock:
    """Exclusive time and calls by part, over all threads."""

    def __init__(self) -> None:
        self._stack = threading.local()
        self.reset()

    def reset(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.each: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._stack.__dict__.setdefault("children", [])
            stack.append(0.0)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                own = took - stack.pop()
                if stack:
                    stack[-1] += took
                self.spent[name] += own
                self.calls[name] += 1
                self.each[name].append(took)

        setattr(owner, method, timed)


class ThreadProfile:
    """cProfile of the engine's thread, switched from outside: enabling works only in the thread itself."""

    def __init__(self) -> None:
        self.profile, self.wanted, self._on = cProfile.Profile(), False, False
        original = EngineLoop._check_deadlines  # once a turn

        def switched(loop: EngineLoop) -> None:
            if self.wanted != self._on:
                self._on = self.wanted
                self.profile.enable() if self._on else self.profile.disable()
            original(loop)

        EngineLoop._check_deadlines = switched  # type: ignore[method-assign]


def report(clock: Clock, figures: dict, wall: float) -> None:
    steps = clock.calls["talker.step"]
    print(f"result cell {figures}, wall {1e3 * wall:.0f} ms, {steps} talker steps")
    each = sorted(clock.each["talker.step"])
    if each:
        middle, slow = statistics.median(each), each[int(0.95 * (len(each) - 1))]
        print(f"result   talker.step p50 {1e3 * middle:.2f} ms, p95 {1e3 * slow:.2f}, longest {1e3 * each[-1]:.2f}")
    for name in sorted(clock.spent, key=lambda name: -clock.spent[name]):
        spent, calls = 1e3 * clock.spent[name], clock.calls[name]
        share = "callers" if name in CALLERS else f"{spent / wall / 10:5.1f} %"
        longest = 1e3 * max(clock.each[name])
        print(
            f"result   {name:16s} {spent:8.1f} ms {share:>8s}, {calls:6d} calls, {1e3 * spent / calls:8.1f} us each, "
            f"longest {longest:7.2f} ms, {spent / max(1, steps):6.3f} ms a step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:1.7b-base")
    parser.add_argument("--config", default="configs/balanced.yaml")
    parser.add_argument("--streams", default="1,16,32,64")
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--profile", type=int, default=32, help="streams of the profiled cell; 0: none")
    parser.add_argument("--timeline", default="", help="streams of the cells whose kernels are recorded, e.g. 1,64")
    parser.add_argument("--trace", help="also write the engine's trace here")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    import yaml

    counts = [int(n) for n in args.streams.split(",")]
    settings = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in args.set)}
    if args.trace:
        settings["trace"] = args.trace
    recorded = [int(n) for n in args.timeline.split(",") if n]
    settings.setdefault("talker.max_num_seqs", max(*counts, args.profile, *recorded))
    clock = Clock()
    for owner, method, name in PARTS:
        clock.wrap(owner, method, name)
    switch = ThreadProfile()
    began = time.monotonic()
    engine = Engine.from_config(args.config, model=args.model, **settings)
    print(
        f"result start {time.monotonic() - began:.1f} s on {engine.info.device_name}, settings {settings}", flush=True
    )
    try:
        voices = [random_voice(engine, i, 100) for i in range(8)]
        cell(engine, voices, min(8, max(counts)), 10)  # kernels compile, voices are primed
        for streams in counts:
            for _ in range(2):
                clock.reset()
                before = time.perf_counter()
                figures = cell(engine, voices, streams, args.frames)
                wall = time.perf_counter() - before
            report(clock, figures, wall)  # the second: everything is warm
        for streams in recorded:
            before = engine.metrics()["talker_steps"]
            kernels = timeline.record(functools.partial(cell, engine, voices, streams, args.frames))
            print(f"result timeline of {streams} streams")
            for line in timeline.report(kernels, int(engine.metrics()["talker_steps"] - before)):
                print("result  ", line, flush=True)
        if args.profile:
            switch.wanted = True
            figures = cell(engine, voices, args.profile, args.frames)
            switch.wanted = False
            cell(engine, voices, 1, 2)  # wakes the thread, which then stops profiling
            text = io.StringIO()
            pstats.Stats(switch.profile, stream=text).sort_stats("tottime").print_stats(25)
            print("result profile of", figures)
            print("\n".join(f"result   {line}" for line in text.getvalue().splitlines() if line.strip()))
        print("result metrics", engine.metrics())
    finally:
        engine.close()


if __name__ == "__main__":
    main()
