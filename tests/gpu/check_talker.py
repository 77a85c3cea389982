"""The talker on a CUDA machine, 1.7B geometry with random weights: correctness of graphs and kernels, then speed.

    python3 tests/gpu/check_talker.py [--quick] [PART ...]

Prints a table; its lines start with `result`. A part that fails prints its traceback and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.geometry import published_config
from engine.talker import PromptRows, SlotOptions, Talker, TalkerSettings

CONFIG = published_config("1.7b-base")
LINES: list[str] = []


def result(*words: object) -> None:
    LINES.append(" ".join(["result", *map(str, words)]))
    print(LINES[-1], flush=True)


def checkpoint(config=None) -> SimpleNamespace:
    return SimpleNamespace(config=config or CONFIG, load_format="dummy", tensors=lambda prefix="": iter(()))


def start(config=None, **changes) -> Talker:
    values = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "slots": 128,
        "max_model_len": 1536,
        "max_prompt": 1290,
        "max_frames": 512,
        "scheduler_mode": "async",
        "kv_cache_memory_bytes": 4 << 30,
    }
    began = time.perf_counter()
    talker = Talker(TalkerSettings(**(values | changes)), checkpoint(config))
    talker.start_s = time.perf_counter() - began
    return talker


def stop(talker: Talker) -> None:
    talker.close()
    gc.collect()
    torch.cuda.empty_cache()


def prompt(seed: int, length: int, width: int = 2048) -> PromptRows:
    rows = torch.randn(length + 21, width, generator=torch.Generator().manual_seed(seed)) * 0.5
    return PromptRows(rows[:length], rows[length:-1], rows[-1])


def run(talker: Talker) -> dict[str, torch.Tensor]:
    codes: dict[str, list] = {}
    while talker.busy:
        for frames in talker.step():
            codes.setdefault(frames.id, []).extend(frames.codes.tolist())
    return {name: torch.tensor(rows) for name, rows in codes.items()}


def milliseconds(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.2f}"


def part_kernels() -> None:
    """Predictor of the published size, float32 and bfloat16: fused kernels against plain torch, greedy and sampled."""
    from engine.talker.fused import FusedStep
    from engine.talker.geometry import TalkerGeometry
    from engine.talker.predictor import CodePredictor
    from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

    geometry = TalkerGeometry.from_config(CONFIG)
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        with torch.device("cuda"), torch.inference_mode():
            predictor = CodePredictor(geometry)
            generator = torch.Generator(device="cuda").manual_seed(0)
            for name, weight in predictor.named_parameters():
                weight.data.fill_(1.0) if name.endswith("norm") else weight.data.normal_(0, 0.02, generator=generator)
            predictor.finish_loading()
            step = FusedStep.__new__(FusedStep)
            step.model = SimpleNamespace(predictor=predictor, geometry=geometry)
            rows = 32
            hidden = torch.randn(rows, 2048, generator=generator, dtype=dtype)
            first = torch.randint(0, 2048, (rows,), generator=generator)
            frame = torch.arange(rows)
            integers = torch.zeros(rows, 7, dtype=torch.int64)
            integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 50
            for name, heat, share in (("greedy", 0.0, 1.0), ("sampled", 0.9, 1.0), ("top-p 0.8", 0.9, 0.8)):
                reals = torch.ones(rows, 5, dtype=torch.float32)
                reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = heat, share
                plain = predictor(hidden, first, integers, reals, frame)
                fused = step.predict(hidden, first, integers, reals, frame)
                agree = [round(float((plain[:, g] == fused[:, g]).float().mean()), 2) for g in (1, 2, 8, 15)]
                result(f"fused = plain predictor, {dtype}, {name}: share of equal codes in groups 1, 2, 8, 15:", agree)
        torch.set_default_dtype(torch.float32)


def part_full() -> None:
    """FULL graphs, async: start, self-check, speed, first frame, aborts."""
    talker = start()
    try:
        result(f"engine start {talker.start_s:.1f} s (self-check included), graphs {talker.settings.graph_sizes}")
        for check in talker.self_check:
            result(f"graph against eager: {check.rows} rows, graph {check.graph}, relative error {check.error:.3f}")
        speed(talker, "full async")
        first_frame(talker)
        repeat(talker)
        aborts(talker)
        result(f"GPU memory {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    finally:
        stop(talker)


def speed(
    talker: Talker, name: str, batches: tuple[int, ...] = (1, 16, 64), frames: int = 80, width: int = 2048
) -> None:
    for batch in batches:
        for index in range(batch):
            talker.add(
                str(index), prompt(index, 150, width), SlotOptions(seed=index, max_frames=frames, min_frames=frames)
            )
        times, last = [], None
        while talker.busy:
            made = talker.step()
            now = time.perf_counter()
            if made:
                if last is not None and len(made) == batch:
                    times.append(now - last)
                last = now
        times = times[10:-3]
        slow = sorted(times)[int(0.95 * len(times))]
        real = batch * 80 / (1e3 * statistics.median(times))
        result(
            f"{name}: decode step batch {batch}: {milliseconds(times)} ms, p95 {1e3 * slow:.2f}, {real:.0f} x real time"
        )


def first_frame(talker: Talker) -> None:
    for running in (0, 16):
        times, steps = [], []
        for turn in range(8):
            while len(talker._running) < running:
                name = f"busy {talker._ticket}"
                talker.add(name, prompt(talker._ticket, 150), SlotOptions(seed=1, max_frames=400, min_frames=400))
            for _ in range(4 if running else 0):
                talker.step()
            rows = prompt(turn, 150)
            torch.cuda.synchronize()
            began, seen = time.perf_counter(), False
            talker.add("new", rows, SlotOptions(seed=1, max_frames=3, min_frames=3))
            while not seen:
                before = time.perf_counter()
                seen = any(frames.id == "new" and len(frames.codes) for frames in talker.step())
                steps.append(time.perf_counter() - before)
            times.append(time.perf_counter() - began)
            while "new" in talker._running:
                talker.step()
        result(f"first frame, {running} running: {milliseconds(times[2:])} ms, max {1e3 * max(times[2:]):.1f}")
        for name in list(talker._running):
            talker.abort(name)
        run(talker)


def repeat(talker: Talker) -> None:
    """The same seed alone and again: equal. Slot reuse and the end with a step in flight."""
    settings = SlotOptions(seed=5, max_frames=40)
    outcomes = []
    for _ in range(3):
        talker.add("again", prompt(1, 150), settings)
        outcomes.append(run(talker)["again"])
    result(
        "same request three times: equal",
        all(torch.equal(outcomes[0], other) for other in outcomes[1:]),
        "frames",
        len(outcomes[0]),
        "codes in range",
        bool((outcomes[0] >= 0).all() and (outcomes[0] < 2048).all()),
    )


def aborts(talker: Talker) -> None:
    slots, blocks = talker.free_slots, talker.free_kv_blocks
    talker.add("expected", prompt(3, 100), SlotOptions(seed=3, max_frames=20, min_frames=20))
    expected = run(talker)["expected"]
    for turn in range(50):
        talker.add("goes", prompt(turn, 60), SlotOptions(seed=1, max_frames=300, min_frames=300))
        for _ in range(turn % 6):
            talker.step()
        talker.abort("goes")
    run(talker)
    talker.add("after", prompt(3, 100), SlotOptions(seed=3, max_frames=20, min_frames=20))
    same = torch.equal(run(talker)["after"], expected)
    result(
        "50 aborts: slots and KV blocks back",
        (talker.free_slots, talker.free_kv_blocks) == (slots, blocks),
        "codes after as before",
        same,
    )


def part_sync() -> None:
    """Sync scheduling in the same graphs: speed, and the same codes as async."""
    outcomes = {}
    for mode in ("async", "sync"):
        talker = start(scheduler_mode=mode, self_check=False)
        try:
            talker.add("one", prompt(1, 150), SlotOptions(seed=5, max_frames=60))
            outcomes[mode] = run(talker)["one"]
            if mode == "sync":
                speed(talker, "full sync")
        finally:
            stop(talker)
    result("sync and async codes equal", torch.equal(outcomes["sync"], outcomes["async"]), len(outcomes["sync"]))


def part_plain() -> None:
    """Decode-only graphs, plain predictor: the slow side of the comparison; also the eager-prefill first frame."""
    talker = start(cudagraph="decode", predictor="plain", self_check=False)
    try:
        speed(talker, "decode graphs, plain predictor", (1, 64))
    finally:
        stop(talker)
    talker = start(cudagraph="decode", self_check=False)
    try:
        speed(talker, "decode graphs, predictor as by default", (1, 64))
        first_frame(talker)
    finally:
        stop(talker)


def part_small() -> None:
    """0.6B geometry (no projection between talker and predictor), max_num_seqs 16."""
    talker = start(published_config("0.6b-base"), max_num_seqs=16, slots=32)
    try:
        worst = max(talker.self_check, key=lambda check: check.error)
        result(f"0.6B: start {talker.start_s:.1f} s, worst self-check {worst}")
        speed(talker, "0.6B", (1, 16), 60, width=1024)
    finally:
        stop(talker)


def part_float32() -> None:
    """float32: the path without vLLM's 16-bit rotary kernel."""
    talker = start(dtype="float32", max_num_seqs=8, slots=16, cudagraph="decode", self_check=False)
    try:
        talker.add("one", prompt(1, 50), SlotOptions(seed=5, max_frames=20, min_frames=20))
        result("float32: frames", len(run(talker)["one"]))
    finally:
        stop(talker)


PARTS = {
    "kernels": part_kernels,
    "full": part_full,
    "sync": part_sync,
    "plain": part_plain,
    "small": part_small,
    "float32": part_float32,
}
QUICK = ("kernels", "full", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    arguments = parser.parse_args()
    print("device", torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for name in arguments.parts or (QUICK if arguments.quick else PARTS):
        began = time.perf_counter()
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc()
            result(f"part {name} FAILED: {traceback.format_exc().strip().splitlines()[-1][:300]}")
        result(f"part {name} took {time.perf_counter() - began:.0f} s")
    print("\n" + "\n".join(LINES))


if __name__ == "__main__":
    main()
