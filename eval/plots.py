"""Plots of a report as inline SVG. Told apart by line style, marker and hatch, so that they survive a grey printer."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval import metrics
from eval.records import RequestRow

_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INKS = ("#000000", "#0b5fa5", "#c2500a", "#3a7d34", "#7a3b8f", "#8a6d00")
_TIMELINE_ROWS = 60
_LOG_FROM = 8  # largest over smallest value from which an axis is logarithmic

plt.rcParams.update(
    {
        "svg.fonttype": "path",  # no font of the reader's machine is needed
        "svg.hashsalt": "chorus",  # the same figures give the same file
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.35,
        "grid.linewidth": 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


def svg(figure: Figure, describe: str) -> str:
    """The figure as one <svg> element with an accessible name; the figure is closed."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # Ids must be unique in the page, where several figures stand: prefix them with a hash of the description.
    mark = f"f{zlib.crc32(describe.encode()):08x}-"
    text = re.sub(r'id="', f'id="{mark}', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{mark}", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{describe}" ', 1)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": _INKS[i % len(_INKS)],
        "linestyle": _STYLES[i % len(_STYLES)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "markersize": 4.5,
    }


def _series(figures: Sequence[dict]) -> dict[tuple[str, str], list[dict]]:
    """Figures of one variant and one kind of load, by level; only where there is a curve to draw."""
    out: dict[tuple[str, str], list[dict]] = {}
    for f in figures:
        kind = re.sub(r"[\d.]+$", "", f["cell"])
        out.setdefault((f["variant"], kind), []).append(f)
    return {key: sorted(v, key=lambda f: f["level"]) for key, v in out.items() if len(v) > 1}


_KINDS = {"c": "closed loop", "poisson": "Poisson", "constant": "constant rate", "burst": "bursts"}


def _name(variant: str, kind: str) -> str:
    return f"{variant} {_KINDS[kind]}".strip()


def _levels(axis, figures: Sequence[dict]) -> None:
    levels = sorted({f["level"] for f in figures})
    if len(levels) > 1 and levels[-1] / levels[0] >= _LOG_FROM:
        axis.set_xscale("log", base=2)
    axis.set_xticks(levels, [f"{level:g}" for level in levels])
    axis.minorticks_off()


def against_load(figures: Sequence[dict]) -> str:
    """TTFA (p50 filled, p95 open marks) and throughput against the load, a curve for every setting; "" without one."""
    series = _series(figures)
    if not series:
        return ""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    for i, ((variant, kind), mine) in enumerate(series.items()):
        cells = [f for f in mine if f["load"]["ttfa_ms"]]
        x = [f["level"] for f in cells]
        style = _style(i)
        name = _name(variant, kind)
        for statistic, face in (("p50", style["color"]), ("p95", "white")):
            y = [f["load"]["ttfa_ms"][statistic] for f in cells]
            left.plot(x, y, label=f"{name}, {statistic}", markerfacecolor=face, **style)
            bounds = [f["load"]["ttfa_ms"]["ci"].get(statistic, (v, v)) for f, v in zip(cells, y, strict=True)]
            left.fill_between(x, [b[0] for b in bounds], [b[1] for b in bounds], color=style["color"], alpha=0.12, lw=0)
        right.plot(x, [f["load"]["x_real_time"] for f in cells], label=name, **style)
    left.set(ylabel="TTFA, ms", xlabel="requests at once, or a second", title="First audio")
    shown = [f["load"]["ttfa_ms"] for cells in series.values() for f in cells if f["load"]["ttfa_ms"]]
    if shown and max(d["p95"] for d in shown) > _LOG_FROM * min(d["p50"] for d in shown):
        left.set_yscale("log")
        left.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    else:
        left.set_ylim(bottom=0)
    right.set(ylabel="× real time", xlabel="requests at once, or a second", title="Audio made")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        _levels(axis, [f for cells in series.values() for f in cells])
        axis.legend(fontsize=7.5, loc="best")
    return svg(figure, "Time to first audio and throughput against load")


def distributions(rows: Sequence[RequestRow]) -> str:
    """Share of requests below a TTFA, and the spread of whole requests, for each setting."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    groups: dict[str, list[RequestRow]] = {}
    for r in rows:
        if r.ok and not r.warmup:
            groups.setdefault(f"{r.variant} {r.cell}".strip(), []).append(r)
    for i, (name, mine) in enumerate(groups.items()):
        x = np.sort([v for r in mine if (v := metrics.ttfa_ms(r)) is not None])
        if x.size:
            style = _style(i) | {"marker": "", "linewidth": 1.5 - 0.1 * (i % 4)}
            left.step(np.r_[x[0], x], np.r_[0, np.arange(1, x.size + 1) / x.size], where="post", label=name, **style)
    left.set(xlabel="TTFA, ms", ylabel="share of requests", title="First audio within", ylim=(0, 1.02))
    if groups:
        left.legend(fontsize=7.5)
        right.boxplot(
            [[r.finished - r.dispatched for r in mine] for mine in groups.values()],
            tick_labels=list(groups),
            medianprops={"color": "black", "linewidth": 1.6},
            flierprops={"markersize": 3},
        )
    right.set(ylabel="seconds", title="Whole request", ylim=(0, None))
    right.tick_params(axis="x", rotation=30 if len(groups) > 5 else 0)
    return svg(figure, "Latency distributions")


def quality_against_load(figures: Sequence[dict], rows: Sequence[RequestRow], scores: Sequence[dict]) -> str:
    """Every clip's error rate and similarity at its load, with the means: does it still sound right under load?"""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    by_id = {r.id: r for r in rows}
    names = [f"{f['variant']} {f['cell']}".strip() for f in figures]
    rng = np.random.default_rng(0)
    for axis, pick, title in (
        (axes[0], _rate, "Word error rate (forgiving normaliser), %"),
        (axes[1], _cosine, "Cosine to the reference"),
    ):
        groups: dict[str, list[float]] = {name: [] for name in names}
        for s in scores:
            row, value = by_id.get(s["id"]), pick(s)
            if row is not None and value is not None:
                groups.setdefault(f"{row.variant} {row.cell}".strip(), []).append(value)
        for i, values in enumerate(groups.values()):
            axis.plot(i + rng.uniform(-0.2, 0.2, len(values)), values, "o", ms=3, mfc="none", mec="#555555", mew=0.7)
            if values:
                axis.plot([i - 0.3, i + 0.3], [np.mean(values)] * 2, "k-", lw=2.2)
        axis.set_xticks(range(len(groups)), list(groups), rotation=30 if len(groups) > 5 else 0)
        axis.set(title=title)
    axes[0].set_ylim(bottom=-2)
    return svg(figure, "Word error rate and speaker similarity of every clip against load")


def _rate(score: dict) -> float | None:
    for by_normalizer in score["wer"].values():
        return min(100 * list(by_normalizer.values())[-1]["rate"], 200)
    return None


def _cosine(score: dict) -> float | None:
    for one in score["similarity"].values():
        return one["whole"]
    return None


def timeline(rows: Sequence[RequestRow], title: str) -> str:
    """Each request of a stretch as a line: waiting (thin), speaking (thick), chunks as ticks."""
    rows = sorted((r for r in rows if not r.warmup), key=lambda r: r.dispatched)[:_TIMELINE_ROWS]
    figure, axis = plt.subplots(figsize=(9, max(1.8, 0.13 * len(rows) + 0.9)), layout="constrained")
    start = min((r.dispatched for r in rows), default=0.0)
    for y, r in enumerate(rows):
        first = r.chunk_times[0] if r.chunk_times else r.finished
        axis.plot([r.dispatched - start, first - start], [y, y], color="#888888", lw=0.9)
        ink = "#0b5fa5" if r.ok else "#c2500a"
        axis.plot([first - start, r.finished - start], [y, y], color=ink, lw=3, alpha=0.45, solid_capstyle="butt")
        axis.plot([t - start for t in r.chunk_times], [y] * len(r.chunk_times), "|", color="black", ms=4, mew=0.7)
        if not r.ok:
            axis.plot([r.finished - start], [y], "x", color="black", ms=5)
    axis.set(xlabel="seconds", ylabel="request", title=title)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    return svg(figure, "Timeline of requests")
