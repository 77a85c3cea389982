"""The speed benchmark: one table of a machine, next to what others have published (`bench_table.py`).

Each model is served by a process of its own (`python -m engine serve`) and spoken to over HTTP on this machine; with
`--in-process`, or where the server's packages are missing, through the engine's child process instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ROOT
from eval import bench_table
from eval.bench_target import can_serve, opened
from eval.datasets import Utterance
from eval.load import LoadSettings, run_cell
from eval.metrics import cell_metrics
from eval.plan import Cell, plan_cell
from eval.records import RequestRow
from eval.targets import Answer, Ask, Target

WORDS = (
    "the ferry leaves early morning and comes back before lights go out every winter while people wait near old "
    "harbour walls with paper cups of warm tea listening for its long low horn across quiet grey water"
).split()


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Frames of each request: mean 50, 12 to 110."""
    return np.clip(np.rint(np.random.default_rng(seed).normal(50, 19, count)), 12, 110).astype(int)


def texts(count: int, seed: int = 0) -> tuple[Utterance, ...]:
    """Ten words each."""
    rng = np.random.default_rng(seed)
    return tuple(
        Utterance(f"b{i:04d}", " ".join(rng.choice(WORDS, 10)).capitalize() + ".", "bench") for i in range(count)
    )


class FixedLengths:
    """A target whose requests are each as long as drawn for their text."""

    def __init__(self, target: Target, frames: dict[str, int]) -> None:
        self.name, self._target, self._frames = target.name, target, frames

    async def speak(self, ask: Ask) -> Answer:
        return await self._target.speak(replace(ask, frames=self._frames[ask.text]))


# ---- what is measured --------------------------------------------------------------------------------------------


async def measure(
    target: Target, voice: str, load: str, *, requests: int, warmup: int, seed: int
) -> tuple[dict, list[RequestRow]]:
    """One cell: its figures and its rows."""
    utterances = texts(requests, seed)
    frames = dict(zip((u.text for u in utterances), map(int, lengths(requests, seed)), strict=True))
    cell = Cell.parse(load)
    planned = plan_cell(
        cell, [replace(u, voice=voice) for u in utterances], requests=requests, warmup=warmup, seed=seed
    )
    rows: list[RequestRow] = []
    lag = await run_cell(
        FixedLengths(target, frames),  # type: ignore[arg-type]
        cell,
        planned,
        LoadSettings(deadline_s=60.0),
        started=time.monotonic(),
        on_row=lambda row, pcm: rows.append(row),
    )
    figures = cell_metrics(rows).to_dict() | {"client_lag": lag.to_dict(), "load": load}
    if cell.kind == "closed":
        figures["later_ttfa_ms"] = after_first_wave(rows, int(cell.level))
    return figures, rows


def after_first_wave(rows: Sequence[RequestRow], level: int) -> dict | None:
    """First audio without the requests that opened the cell, all within a few ms: each worker's first."""
    later = sorted((r for r in rows if not r.warmup), key=lambda row: row.dispatched)[level:]
    found = cell_metrics(later).ttfa_ms if later else None
    return asdict(found) if found else None


def _requests(load: str, seconds: float, expected: float) -> int:
    """So many that a cell takes about `seconds`; expected: requests a second of a closed loop."""
    cell = Cell.parse(load)
    rate = cell.level if cell.kind == "open" else expected
    return max(8, int(cell.level) * 2 if cell.kind == "closed" else 8, round(rate * seconds))


async def _session(args: argparse.Namespace, kind: str, out: Path, results: dict[str, Any]) -> None:
    with opened(args, kind, out) as (target, voice):
        await target.prepare({})
        results["targets"][kind] = target.describe()

        async def one(key: str, load: str) -> dict:
            expected = bench_table.EXPECTED.get(load, 3.0) if args.fast_machine else 0.5
            warmup = min(64, int(float(Cell.parse(load).level)) or 1) if load.startswith("c") else 8
            requests = args.requests or _requests(load, args.seconds, expected)
            figures, rows = await measure(target, voice, load, requests=requests, warmup=warmup, seed=args.seed)
            print(f"{kind} {load}: {bench_table.measured(figures)}", flush=True)
            results["rows"][key] = [asdict(row) for row in rows]
            return figures

        await one("warm-up", "c8")  # not in the table: kernels and connections
        results["rows"].pop("warm-up")
        for cell in bench_table.CELLS:
            if cell.kind == kind and (not args.cells or cell.key in args.cells):
                results["cells"][cell.key] = await one(cell.key, cell.load)
        for load in bench_table.LADDER if args.ladder else ():
            results["ladder"].setdefault(kind, {})[load] = await one(f"{kind}-ladder-{load}", load)
        if kind == "custom" and not args.cells:
            for load, key in ((10, "custom-10"), (20, "custom-20")):
                results["rates"][str(load)] = results["cells"][key]
            rates = bench_table.RISING if bench_table.steady(results["cells"]["custom-20"]) else ()
            for rate in rates:
                figures = await one(f"custom-{rate}", f"poisson{rate}")
                results["rates"][str(rate)] = figures
                if not bench_table.steady(figures):
                    break
        await target.close()


def codec_alone(settings: Mapping[str, Any], batch: int = 32, frames: int = 4, runs: int = 100) -> dict[str, Any]:
    """The codec of the published geometry by itself, as `python -m eval bench` runs it in a process of its own, with
    the engine's settings (dotted) on top."""
    import torch

    from engine import wiring
    from engine.checkpoint import Checkpoint
    from engine.codec.graphs import CodecRunner
    from engine.config import EngineConfig

    config = EngineConfig.load(None, **{**settings, "model": "dummy:1.7b-base"})
    device = wiring.device(config)
    codec = wiring.load_codec(config, Checkpoint.open(config.model), device)
    cuda, dtype = device.type == "cuda", codec.decoder.tail_dtype
    runner = CodecRunner(codec.decoder, batch, ((batch, frames),) if cuda else (), device, dtype)
    codes = torch.randint(0, codec.decoder.codebook_size, (batch, codec.groups, frames))
    times = []
    for _ in range(runs if cuda else 1):
        began = time.perf_counter()
        runner.decode(range(batch), codes)
        times.append(time.perf_counter() - began)
    ms = 1e3 * float(np.median(times))
    return {"ms": ms, "x_real_time": batch * frames * 80 / ms, "dtype": str(dtype), "runs": len(times)}


def _codec(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    code = "import json, sys; from eval.bench import codec_alone; print(json.dumps(codec_alone(json.load(sys.stdin))))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, cwd=ROOT, input=json.dumps(settings), capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        (out / "codec.log").write_text(done.stderr)
        return {"error": (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _about(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "quick": args.quick,
        "way": "through the engine's child process" if args.in_process else "over HTTP on the same machine",
        "config": args.config,
        "settings": args.settings,
        "seed": args.seed,
    }


def main(args: argparse.Namespace) -> int:
    """Measure everything; a part that fails is named in the table and does not stop the others."""
    out = Path(args.out or f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    if not args.in_process and not can_serve():
        print("fastapi, uvicorn or prometheus_client is missing: no HTTP, as with --in-process", file=sys.stderr)
        args.in_process = True
    args.seconds = args.seconds or (4.0 if args.quick else 10.0)
    began = time.monotonic()
    results: dict[str, Any] = {"about": _about(args), "targets": {}, "cells": {}, "rates": {}, "ladder": {}, "rows": {}}
    results["errors"] = {}
    args.fast_machine = not results["about"]["device"].startswith("CPU")
    if "codec" in args.parts:
        results["codec"] = _codec(out, args.settings)
        print(f"codec: {results['codec']}", flush=True)
    for kind in ("custom", "base"):
        if kind not in args.parts:
            continue
        try:
            asyncio.run(_session(args, kind, out, results))
        except Exception as error:
            traceback.print_exc()
            results["errors"][kind] = f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:300]
        _write(out, results, began)
    table = _write(out, results, began)
    print(table + f"\n{out}/raw.json, {out}/table.md")
    return 1 if results["errors"] else 0


def _write(out: Path, results: dict[str, Any], began: float) -> str:
    results["about"]["seconds"] = time.monotonic() - began
    (out / "raw.json").write_text(json.dumps(results, indent=1, default=str))
    table = bench_table.markdown(results)
    (out / "table.md").write_text(table)
    return table


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--out", help="output folder; default runs/bench-<date>")
    p.add_argument("--quick", action="store_true", help="about three minutes: shorter cells")
    p.add_argument("--seconds", type=float, default=0.0, help="length of a cell, about")
    p.add_argument("--requests", type=int, default=0, help="requests of each cell instead")
    p.add_argument("--in-process", action="store_true", help="no HTTP: through the engine's child process")
    p.add_argument("--config", default="configs/latency.yaml")
    p.add_argument("--custom", default="dummy:1.7b-customvoice", help="model of the CustomVoice cells")
    p.add_argument("--base", default="dummy:1.7b-base", help="model of the Base cells")
    p.add_argument("--streams", type=int, default=0, help="streams at once in the engine; default 64")
    p.add_argument("--parts", type=lambda s: s.split(","), default=["codec", "custom", "base"])
    p.add_argument("--cells", type=lambda s: s.split(","), default=[], help="only these, e.g. custom-c1,base-c64")
    p.add_argument("--ladder", action="store_true", help="also closed loops of 1 to 64 streams and 1 to 20 requests/s")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting on top, repeatable")
