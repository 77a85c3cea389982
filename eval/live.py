"""A run while it goes on: a few figures and small charts of the rows so far, cheap enough to draw every second.

The charts are polylines written by hand, because a plotting library would take the processor from what is measured.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval import metrics
from eval.records import RequestRow

WIDTH, HEIGHT, PAD = 320, 110, 26  # of a chart, in its own units
_INKS = ("currentColor", "var(--color-accent)")
_DASHES = ("", "5 3")


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]


def chart(title: str, series: Sequence[Series], unit: str) -> str:
    """An inline SVG with one line for each series, told apart by dashes; its last values are in the caption."""
    points = [p for s in series for p in s.points]
    if not points:
        return f"<figure><figcaption>{html.escape(title)}: nothing yet</figcaption></figure>"
    x = [p[0] for p in points]
    low_x, span_x = min(x), max(max(x) - min(x), 1e-9)
    top = max(1e-9, *(p[1] for p in points))
    lines = []
    for i, s in enumerate(series):
        at = " ".join(
            f"{PAD + (a - low_x) / span_x * (WIDTH - PAD - 4):.1f},{HEIGHT - 14 - b / top * (HEIGHT - 24):.1f}"
            for a, b in s.points
        )
        lines.append(
            f'<polyline points="{at}" fill="none" stroke="{_INKS[i % 2]}" stroke-width="1.6" '
            f'stroke-dasharray="{_DASHES[i % 2]}"/>'
        )
    said = ", ".join(f"{s.label} {s.points[-1][1]:.3g}".strip() for s in series if s.points)
    caption = html.escape(f"{title}: {said} {unit}".strip())
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{caption}">'
        f'<text x="2" y="12" font-size="9" fill="currentColor">{top:.3g}</text>'
        f'<text x="2" y="{HEIGHT - 12}" font-size="9" fill="currentColor">0</text>'
        f'<line x1="{PAD}" y1="{HEIGHT - 14}" x2="{WIDTH - 4}" y2="{HEIGHT - 14}" stroke="currentColor" '
        f'stroke-width="0.5"/>{"".join(lines)}</svg><figcaption>{caption}</figcaption></figure>'
    )


def charts(rows: Sequence[RequestRow]) -> str:
    """TTFA, × real time, in flight and underruns over the time of the stretch that runs now."""
    rows = [r for r in rows if not r.warmup]
    rows = [r for r in rows if r.session == rows[-1].session] if rows else []
    good = sorted((r for r in rows if r.ok and r.chunk_times), key=lambda r: r.finished)
    heard = [(r.finished, metrics.ttfa_ms(r) or 0.0) for r in good]
    running = [
        Series(name, [(at, float(np.percentile([v for _, v in heard[: i + 1]], q))) for i, (at, _) in enumerate(heard)])
        for name, q in (("p50", 50), ("p95", 95))
    ]
    waits = [1e3 * metrics.row_playback(r).waited for r in good]
    return "".join(
        (
            chart("TTFA", running, "ms"),
            chart("Audio made", [Series("", _speed(rows))], "× real time"),
            chart("In flight", [Series("", _in_flight(rows))], "requests"),
            chart(
                "Underruns so far", [Series("", [(r.finished, sum(waits[: i + 1])) for i, r in enumerate(good)])], "ms"
            ),
        )
    )


def _speed(rows: Sequence[RequestRow]) -> list[tuple[float, float]]:
    """Audio seconds of all requests ended so far over the time since the first left, as `metrics.cell_metrics`."""
    if not rows:
        return []
    ended = sorted(rows, key=lambda r: r.finished)
    start = min(r.dispatched for r in rows)
    audio = np.cumsum([r.audio_s for r in ended])
    return [(r.finished, float(a / max(r.finished - start, 1e-9))) for r, a in zip(ended, audio, strict=True)]


def _in_flight(rows: Sequence[RequestRow]) -> list[tuple[float, float]]:
    events = sorted([(r.dispatched, 1) for r in rows] + [(r.finished, -1) for r in rows])
    level, out = 0, []
    for at, step in events:
        out.append((at, float(level)))
        level += step
        out.append((at, float(level)))
    return out


def table(rows: Sequence[RequestRow]) -> list[list[str]]:
    """One line for each variant and load setting: name, ok/requests, TTFA p50 and p95, × real time, underruns."""
    out = []
    for key in dict.fromkeys((r.variant, r.cell) for r in rows if not r.warmup):
        m = metrics.cell_metrics([r for r in rows if (r.variant, r.cell) == key])
        ttfa = ("–", "–") if m.ttfa_ms is None else (f"{m.ttfa_ms.p50:.0f}", f"{m.ttfa_ms.p95:.0f}")
        wait = "–" if m.underrun_ms is None else f"{m.underrun_ms.mean:.0f}"
        failed = ", ".join(f"{n} {kind}" for kind, n in m.failures.items())
        out.append([" ".join(key).strip(), f"{m.ok}/{m.requests}", *ttfa, f"{m.x_real_time:.2f}", wait, failed])
    return out


TABLE_HEAD = ["Load", "ok", "TTFA p50, ms", "TTFA p95, ms", "× real time", "underrun mean, ms", "failed"]
