"""The cells of the speed benchmark: load, what others have published for it, what is aimed at; and the results' table.

Published figures are others' own, on one H100 with the 1.7B checkpoints unless said; their texts are those of
seed-tts-eval. Ours here have random weights unless another model is given, and fixed output lengths, which is the same
work per second of audio.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NARI = "nari-labs/benchmarks, 2026-08 (audible TTFA, 300 s, Ryan)"
TRITON = "vllm-project/vllm-omni PR #3221, its author's run of a Triton/TensorRT stack"
OMNI_7781 = "vllm-project/vllm-omni PR #7781, 2026-09"


_WHO = {"custom": "CustomVoice", "base": "Base, cloned voice", "codec": "codec alone"}


@dataclass(frozen=True)
class BenchCell:
    """`load` as in `Cell.parse`; `least` and `aim` in words, for the reader."""

    key: str
    kind: str  # custom | base | codec
    load: str
    published: str
    source: str
    least: str
    aim: str

    @property
    def title(self) -> str:
        return f"{_WHO[self.kind]}, {self.load}"


CELLS = (
    BenchCell("custom-c1", "custom", "c1", "TTFA 41 ms, 8.8 ×", TRITON, "25 ms, 12 ×", "13 ms, 25 ×"),
    BenchCell("custom-c32", "custom", "c32", "TTFA p95 230 ms, 85 ×", TRITON, "80 ms, 250 ×", "40 ms, 400 ×"),
    BenchCell("custom-10", "custom", "poisson10", "TTFA p95 34 ms (Nari), 136 (vLLM-Omni)", NARI, "34 ms", "18 ms"),
    BenchCell("custom-20", "custom", "poisson20", "TTFA p95 77 ms (Nari), 397 (vLLM-Omni)", NARI, "60 ms", "25 ms"),
    BenchCell("base-c64", "base", "c64", "112 ×, TTFA p50 353 ms", OMNI_7781, "300 ×, p95 150 ms", "600 ×, p95 100 ms"),
)
RISING = (30, 40, 60, 80, 100)  # requests a second, until playback is interrupted
# For `--ladder`, and about how many requests a second end in each closed loop on a fast GPU.
LADDER = ("c1", "c4", "c8", "c16", "c32", "c64", "poisson1", "poisson2", "poisson5", "poisson10", "poisson20")
EXPECTED = {"c1": 3, "c4": 12, "c8": 22, "c16": 40, "c32": 62, "c64": 85}
HIGHEST = ("20 req/s shown", NARI, "40 req/s", "80 req/s")
CODEC = (
    "143 × with 25 frames of context",
    "a prototype of this decoder with windows instead of state",
    "1000 ×",
    "2500 ×",
)


def measured(figures: dict[str, Any]) -> str:
    """One cell's figures (`CellMetrics.to_dict`) in a few words."""
    ttfa = figures["ttfa_ms"]
    first = "no audio" if ttfa is None else f"TTFA p50 {ttfa['p50']:.0f}, p95 {ttfa['p95']:.0f} ms"
    if later := figures.get("later_ttfa_ms"):  # closed loops: what the rush at the start adds is told apart
        first += f" ({later['p95']:.0f} after the first wave)"
    failed = figures["requests"] - figures["ok"]
    words = [
        first,
        f"{figures['x_real_time']:.0f} ×",
        f"{figures['underrun_events']} interruptions",
        *([f"{failed} failed"] if failed else []),
    ]
    return ", ".join(words)


def highest_rate(rates: Iterable[tuple[float, dict[str, Any]]]) -> float | None:
    """The highest rate up to which every request ended well and none was interrupted; None: not even the lowest."""
    best = None
    for rate, figures in sorted(rates, key=lambda item: item[0]):
        if not steady(figures):
            break
        best = rate
    return best


def steady(figures: dict[str, Any]) -> bool:
    return bool(figures["requests"]) and figures["ok"] == figures["requests"] and not figures["underrun_events"]


def markdown(results: dict[str, Any]) -> str:
    """The table. `results` is what raw.json holds; cells that were not measured say so."""
    head = results["about"]
    lines = [
        f"# Speed on {head['device']}",
        "",
        f"{head['date']}; torch {head['torch']}, commit {head['commit']}; {head['way']}; "
        f"{'quick; ' if head['quick'] else ''}{head['seconds']:.0f} s in all. × is audio seconds per second. "
        f"{_models(results)}Lengths of 12 to 110 frames, mean 50, drawn with a fixed seed. Settings and every request: "
        "raw.json.",
        "",
        "| cell | measured | published | at least | aim | source |",
        "|---|---|---|---|---|---|",
    ]
    cells = results["cells"]
    for cell in CELLS:
        got = measured(cells[cell.key]) if cell.key in cells else _why_not(results, cell.kind)
        lines.append(f"| {cell.title} | {got} | {cell.published} | {cell.least} | {cell.aim} | {cell.source} |")
        if cell.key == "custom-20":
            lines.append(_highest_line(results))
    codec = results.get("codec") or {}
    got = f"{codec['ms']:.2f} ms, {codec['x_real_time']:.0f} ×" if "ms" in codec else codec.get("error", "not run")
    lines.append(f"| codec alone, 32 streams × 4 frames | {got} | {CODEC[0]} | {CODEC[2]} | {CODEC[3]} | {CODEC[1]} |")
    for kind, loads in results.get("ladder", {}).items():
        lines += ["", f"| {_WHO[kind]} | TTFA p50 | p95 | p95 after the first wave | x real time | interruptions |"]
        lines += ["|---|---|---|---|---|---|", *(_ladder_line(load, figures) for load, figures in loads.items())]
    return "\n".join(lines) + "\n"


def _models(results: dict[str, Any]) -> str:
    """What spoke, and whether its weights mean anything."""
    said = []
    for target in results.get("targets", {}).values():
        models = target.get("server_models")
        about = models["data"][0] if isinstance(models, dict) and models.get("data") else target
        said.append(f"{about.get('id') or about.get('model')}: {about.get('weights', 'unknown')} weights")
    return "; ".join(dict.fromkeys(said)) + ". " if said else ""


def _ladder_line(load: str, figures: dict[str, Any]) -> str:
    ttfa, later = figures["ttfa_ms"], figures.get("later_ttfa_ms")
    times = [f"{ttfa['p50']:.0f} ms", f"{ttfa['p95']:.0f} ms"] if ttfa else ["-", "-"]
    times.append(f"{later['p95']:.0f} ms" if later else "")
    name = load.replace("poisson", "") + " requests/s" if load.startswith("poisson") else load
    return f"| {name} | {' | '.join(times)} | {figures['x_real_time']:.1f} | {figures['underrun_events']} |"


def _highest_line(results: dict[str, Any]) -> str:
    rates = [(float(rate), figures) for rate, figures in results["rates"].items()]
    best = highest_rate(rates)
    tried = ", ".join(f"{rate:g}: {measured(figures)}" for rate, figures in sorted(rates, key=lambda item: item[0]))
    got = "none" if best is None else f"{best:g} req/s"
    got = f"{got} ({tried})" if tried else _why_not(results, "custom")
    published, source, least, aim = HIGHEST
    return f"| CustomVoice, highest rate without interruption | {got} | {published} | {least} | {aim} | {source} |"


def _why_not(results: dict[str, Any], kind: str) -> str:
    return f"failed: {results['errors'][kind]}" if kind in results.get("errors", {}) else "not run"
