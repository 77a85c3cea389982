"""A trace file turned into what latency arguments are about: intervals, busy ratios, batch sizes, a timeline.

python -m engine trace-tables run.jsonl --plot run.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.chunks import playback_end
from engine.errors import ChorusError, ConfigError
from engine.request import FRAMES_PER_SECOND


@dataclass
class Request:
    """What a trace says about one request. Times are seconds of the trace's clock."""

    id: str
    enqueued: float | None = None
    prefilled: float | None = None
    first_byte: float | None = None
    ended: float | None = None
    reason: str = "unfinished"
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (emitted at, frames)

    @property
    def start(self) -> float:
        times = (self.enqueued, self.prefilled, self.chunks[0][0] if self.chunks else None, self.ended)
        return next(t for t in times if t is not None)

    @property
    def stop(self) -> float:
        return self.ended if self.ended is not None else (self.chunks[-1][0] if self.chunks else self.start)

    @property
    def audio_s(self) -> float:
        return sum(frames for _, frames in self.chunks) / FRAMES_PER_SECOND

    @property
    def ttfa_ms(self) -> float | None:
        return 1e3 * (self.chunks[0][0] - self.start) if self.chunks else None

    @property
    def underrun_ms(self) -> float:
        """Silence a listener without a start buffer hears inside the utterance."""
        late, until = 0.0, None
        for at, frames in self.chunks:
            late += max(0.0, at - until) if until is not None else 0.0
            until = playback_end(until, at, frames)
        return 1e3 * late


@dataclass
class Work:
    """The runs of one stage. Rows are (end s, milliseconds, streams, frames)."""

    runs: list[tuple[float, float, int, int]] = field(default_factory=list)
    eager: int = 0

    def busy(self, span_s: float) -> float:
        """Share of the span in which the stage ran; runs that overlap count once."""
        total, reached = 0.0, float("-inf")
        for start, end in sorted((t - ms / 1e3, t) for t, ms, _, _ in self.runs):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total / span_s if span_s > 0 else 0.0


@dataclass
class TraceData:
    """A read trace. `skipped` counts lines that are no events, such as the cut last line of a killed process."""

    requests: list[Request]
    codec: Work
    talker: Work
    start: float
    end: float
    skipped: int = 0

    @property
    def span_s(self) -> float:
        return self.end - self.start


def read_trace(path: str | Path) -> TraceData:
    """Read a file that `Trace` wrote.

    Raises:
        ConfigError: the file is missing or holds no event.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}", field="trace") from error
    requests: dict[str, Request] = {}
    codec, talker, times, skipped = Work(), Work(), [], 0
    for line in text.splitlines():
        try:
            event = json.loads(line)
            time, name = float(event["t"]), event["event"]
            if name in ("codec", "step"):
                stage = codec if name == "codec" else talker
                stage.runs.append((time, float(event["ms"]), int(event["streams"]), int(event.get("frames", 1))))
                stage.eager += event.get("graph") is False
            elif "request" in event:
                _note(requests.setdefault(event["request"], Request(event["request"])), name, time, event)
        except (ValueError, KeyError, TypeError):
            skipped += 1
            continue
        if name != "trace":
            times.append(time)
    if not times:
        raise ConfigError(f"{path} holds no trace events; switch the trace on with `trace: FILE`", field="trace")
    for request in requests.values():
        request.chunks.sort()  # two writers append their blocks in any order
    whole = [r for r in requests.values() if r.enqueued or r.prefilled or r.chunks or r.ended]
    return TraceData(sorted(whole, key=lambda r: r.start), codec, talker, min(times), max(times), skipped)


def _note(request: Request, name: str, time: float, event: dict[str, Any]) -> None:
    if name == "enqueue":
        request.enqueued = time
    elif name == "prefill":
        request.prefilled = request.prefilled or time
    elif name == "chunk":
        request.chunks.append((time, int(event["frames"])))
    elif name == "first_byte":
        request.first_byte = request.first_byte or time
    elif name == "end":
        request.ended, request.reason = time, str(event.get("reason", "?"))


# --- tables -----------------------------------------------------------------------------------------------------


def render(data: TraceData) -> str:
    """All tables as text."""
    audio = sum(r.audio_s for r in data.requests)
    head = f"{len(data.requests)} requests, {data.span_s:.2f} s, {audio:.1f} s of audio"
    if data.span_s > 0:
        head += f" ({audio / data.span_s:.2f} × real time)"
    if data.skipped:
        head += f"; {data.skipped} lines were no events and are left out"
    parts = [
        head,
        _intervals(data),
        _stage("codec", data.codec, data.span_s),
        _stage("talker", data.talker, data.span_s),
    ]
    return "\n\n".join([*parts, _requests(data)])


def _intervals(data: TraceData) -> str:
    """Chunk-emit intervals: all, and by place in the stream, where ramps and staircases show."""
    by_place: dict[str, list[float]] = defaultdict(list)
    ttfa = [r.ttfa_ms for r in data.requests if r.ttfa_ms is not None]
    for request in data.requests:
        for place, ((before, _), (after, _)) in enumerate(pairwise(request.chunks), 1):
            by_place["all"].append(1e3 * (after - before))
            by_place[f"{place}→{place + 1}" if place < 4 else "later"].append(1e3 * (after - before))
    rows = [("first chunk", *_percentiles(ttfa))]
    rows += [(f"interval {name}", *_percentiles(values)) for name, values in sorted(by_place.items())]
    return "Milliseconds to and between chunks\n" + _table(("", "n", "mean", "p50", "p95", "p99", "max"), rows)


def _stage(name: str, work: Work, span_s: float) -> str:
    if not work.runs:
        return f"{name}: no runs in the trace"
    runs = np.array([(ms, streams, frames) for _, ms, streams, frames in work.runs])
    line = (
        f"{name}: {len(runs)} runs, busy {100 * work.busy(span_s):.1f} % of the time, mean {runs[:, 0].mean():.2f} ms"
    )
    line += f", mean batch {runs[:, 1].mean():.2f}"
    if name == "codec":
        line += f", {work.eager} eager"
    sizes = Counter(int(s) for s in runs[:, 1])
    most = max(sizes.values())
    bars = [(str(size), str(n), "█" * max(1, round(40 * n / most))) for size, n in sorted(sizes.items())]
    return line + "\n" + _table(("batch", "runs", ""), bars)


def _requests(data: TraceData) -> str:
    rows = [
        (
            r.id[:12],
            f"{r.start - data.start:.3f}",
            _ms(r.prefilled - r.start if r.prefilled else None),
            "-" if r.ttfa_ms is None else f"{r.ttfa_ms:.0f}",
            _ms(r.first_byte - r.start if r.first_byte else None),
            str(len(r.chunks)),
            f"{r.audio_s:.2f}",
            f"{r.stop - r.start:.2f}",
            f"{r.underrun_ms:.0f}",
            r.reason,
        )
        for r in data.requests
    ]
    names = ("request", "at s", "prefill ms", "chunk ms", "byte ms", "chunks", "audio s", "wall s", "dry ms", "end")
    return "Requests (times after the request came; dry: silence heard inside the utterance)\n" + _table(names, rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _percentiles(values: Sequence[float]) -> tuple[str, ...]:
    if not values:
        return ("0", *"-----")
    array = np.asarray(values)
    return (str(len(array)), *(f"{v:.1f}" for v in (array.mean(), *np.percentile(array, (50, 95, 99)), array.max())))


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(names), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


# --- command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """`trace-tables FILE [--plot OUT.png]`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine trace-tables", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="trace written by the engine (setting `trace`)")
    parser.add_argument("--plot", metavar="PNG", help="write the timeline as a picture")
    args = parser.parse_args(argv)
    try:
        data = read_trace(args.file)
        print(render(data))
        if args.plot:
            from engine.trace_plot import plot_timeline

            plot_timeline(data, args.plot)
            print(f"\ntimeline: {args.plot}")
    except ChorusError as error:
        print(f"trace-tables: {error.message}", file=sys.stderr)
        return 2
    return 0
