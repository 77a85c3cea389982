"""The timeline of a trace as a picture: one line per request, and what talker and codec did below it."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from engine.trace_tables import TraceData, Work

_WAITING, _SPEAKING, _CHUNK, _DRY = "#d4d4d4", "#8fb8de", "#1f4e79", "#c0392b"
_ENDED_WELL = ("stop", "length", "unfinished")


def plot_timeline(data: TraceData, path: str | Path) -> None:
    """Write a PNG (or what the ending of `path` says).

    Raises:
        ConfigError: the folder is missing or the ending is no picture format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = min(24.0, 3.2 + 0.16 * len(data.requests))
    figure = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(1.0, height - 2.4), 1.6])
    _requests(above, data)
    _stages(below, data)
    below.set_xlabel("seconds after the first event")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}", field="plot") from error


def _requests(axes, data: TraceData) -> None:
    for row, r in enumerate(data.requests):
        start, stop = r.start - data.start, r.stop - data.start
        first = r.chunks[0][0] - data.start if r.chunks else stop
        axes.barh(row, first - start, left=start, height=0.7, color=_WAITING)
        axes.barh(row, stop - first, left=first, height=0.7, color=_SPEAKING)
        until = None
        for at, frames in r.chunks:
            here = at - data.start
            if until is not None and here > until:
                axes.barh(row, here - until, left=until, height=0.25, color=_DRY)
            until = max(until or here, here) + frames / 12.5
        axes.vlines([at - data.start for at, _ in r.chunks], row - 0.35, row + 0.35, color=_CHUNK, linewidth=0.8)
        if r.reason not in _ENDED_WELL:
            axes.text(stop, row, f" {r.reason}", va="center", fontsize=7, color=_DRY)
    axes.set_ylim(len(data.requests) - 0.4, -0.6)  # the first request on top
    axes.set_yticks(range(len(data.requests)), [r.id[:8] for r in data.requests], fontsize=6)
    axes.set_title(
        "Requests: grey waits for its first chunk, blue speaks, a mark is a chunk, red is a listener run dry",
        loc="left",
        fontsize=10,
    )
    axes.grid(axis="x", alpha=0.3)


def _stages(axes, data: TraceData) -> None:
    def draw(work: Work, color: str, label: str) -> None:
        if work.runs:
            ends = [t - data.start for t, _, _, _ in work.runs]
            widths = [ms / 1e3 for _, ms, _, _ in work.runs]
            lefts = [end - width for end, width in zip(ends, widths, strict=True)]
            heights = [streams for _, _, streams, _ in work.runs]
            busy = 100 * work.busy(data.span_s)
            axes.bar(lefts, heights, widths, align="edge", color=color, label=f"{label}, busy {busy:.0f} %", alpha=0.7)

    draw(data.talker, "#b7a57a", "talker step")
    draw(data.codec, "#1f4e79", "codec step")
    axes.set_ylabel("streams in the step", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    if data.talker.runs or data.codec.runs:
        axes.legend(loc="upper right", fontsize=8)
