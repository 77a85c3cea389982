"""A run in a terminal: its progress on stderr, one JSON line of figures for each load setting."""

from __future__ import annotations

import sys
import time
from typing import Any

from eval.runs import Progress

_last: tuple[float, str] = (0.0, "")


def print_progress(p: Progress) -> None:
    """At most twice a second; one line that rewrites itself where stderr is a terminal."""
    global _last
    now = time.monotonic()
    if p.stage == _last[1] and now - _last[0] < 0.5 and p.done != p.total:
        return
    _last = (now, p.stage)
    left = "" if p.left_s is None else f", {p.left_s:.0f} s left"
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{p.stage}: {p.detail} {p.done}/{p.total}{left}".ljust(78), end=end, file=sys.stderr, flush=True)


def headline(figure: dict[str, Any]) -> dict[str, Any]:
    """The figures of one load setting that fit into a line; the rest is in summary.json."""
    m = figure["load"]
    line: dict[str, Any] = {"load": figure["title"]}
    if figure["variant"]:
        line = {"variant": figure["variant"]} | line
    line |= {"ok": m["ok"], "requests": m["requests"], "failures": m["failures"]}
    for name in ("ttfa_ms", "audible_ttfa_ms", "e2e_ms"):
        if m[name]:
            line[name] = {key: round(m[name][key], 1) for key in ("mean", "p50", "p95", "p99")}
    line |= {key: round(m[key], 3) for key in ("x_real_time", "requests_per_s", "mean_audio_s") if m[key] is not None}
    line["underrun_events"] = m["underrun_events"]
    for asr, by_normalizer in figure["wer"].items():
        for normalizer, w in by_normalizer.items():
            rates = {"macro": w["macro"], "filtered": w["macro_filtered"], "micro": w["micro"]}
            line[f"WER {asr} / {normalizer}"] = {k: round(v, 4) for k, v in rates.items() if v is not None} | {
                "above half": w["above_half"],
                "scored": w["scored"],
            }
    for model, v in figure["similarity"].items():
        if v["mean"] is not None:
            line[f"similarity {model}"] = {"mean": round(v["mean"], 3), "own nearest": v["nearest_is_own"]}
    line |= {name: round(v["mean"], 2) for name, v in figure["mos"].items()}
    if figure["checks"]:
        line["checks"] = figure["checks"]
    return line
