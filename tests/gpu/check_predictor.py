"""The code predictor's kernels on a CUDA machine, 1.7B geometry with random weights in bfloat16: whether the kernels of
few rows (skinny.py) are right, which tiles suit them, and what a frame costs on each path.

    python3 tests/gpu/check_predictor.py [--seconds 55] [--workers 10]

Prints a table; its lines start with `result`. What fails prints its error and the next one runs. Kernels are compiled
by several processes into Triton's cache before the measuring starts.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from engine.geometry import published_config
from engine.talker import skinny
from engine.talker.fp8 import dequantize, quantize, round_weights
from engine.talker.fused import FusedStep, _swiglu, ops
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import rms_norm
from engine.talker.predictor import CodePredictor
from engine.talker.skinny import FP8_TILES, TILES, Matrix, SkinnyPredictor, Tile, linear, tile
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

GEOMETRY = TalkerGeometry.from_config(published_config("1.7b-base"))
EPS = GEOMETRY.predictor.eps
ROWS = (1, 8, 16, 32, 64)
TUNED = {1: 2, 16: 16, 32: 32, 64: 64}  # rows that are measured, and the entry of the table they decide
BYTES = 160 << 20  # of matrices that a measured graph goes through: more than L2 holds, as a pass of the predictor is
DEVICE = "cuda"
LINES: list[str] = []

WIDE: dict[int, list[Tile]] = {  # besides the table's own entry
    1: [Tile(0, 8, 256), Tile(0, 16, 256, warps=8), Tile(0, 32, 256, warps=8), Tile(16, 16, 64, 4, 4, 3)],
    16: [Tile(16, 32, 64, 4, 4, 3), Tile(16, 16, 128, 4, 4, 2), Tile(16, 32, 128, 1, 4, 4), Tile(16, 32, 64, 2, 4, 4)],
    32: [Tile(32, 32, 64, 4, 4, 3), Tile(32, 32, 128, 1, 4, 3), Tile(32, 32, 64, 2, 4, 3)],
    64: [Tile(64, 32, 64, 1, 4, 4), Tile(64, 64, 64, 1, 4, 4), Tile(32, 32, 64, 4, 4, 3)],
}
NARROW: dict[int, list[Tile]] = {
    1: [Tile(0, 4, 512), Tile(0, 8, 256, warps=8), Tile(0, 8, 512, warps=8), Tile(16, 8, 128, 4, 4, 3)],
    16: [Tile(16, 8, 64, 8, 8, 3), Tile(16, 16, 128, 4, 4, 3), Tile(16, 16, 64, 8, 8, 3)],
    32: [Tile(32, 8, 64, 8, 8, 3), Tile(32, 16, 128, 4, 4, 2), Tile(16, 16, 128, 4, 4, 3)],
    64: [Tile(64, 16, 128, 1, 4, 4), Tile(32, 8, 128, 4, 4, 3), Tile(64, 16, 64, 4, 4, 3)],
}
KINDS = ("qkv", "output", "gate_up", "down", "head")


def candidates(kind: str, rows: int, fp8: bool) -> list[Tile]:
    """What is measured: the table's entry first; for eight bits it and the nearest others only."""
    others = (NARROW if kind in ("output", "down") else WIDE)[rows]
    listed = [tile(kind, rows, fp8), *(others[:2] if fp8 else others)]
    return list(dict.fromkeys(listed))


def result(*words: object) -> None:
    LINES.append(" ".join(["result", *map(str, words)]))
    print(LINES[-1], flush=True)


@contextlib.contextmanager
def survives(what: str):
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        result(f"{what} FAILED: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}")


def shape(kind: str) -> tuple[int, int]:
    """[N, K] of a kind's matrix as it is stored."""
    g = GEOMETRY.predictor
    inner = g.heads * g.head_dim
    return {
        "qkv": (g.qkv_width, g.hidden),
        "output": (g.hidden, inner),
        "gate_up": (2 * g.intermediate, g.hidden),
        "down": (g.hidden, g.intermediate),
        "head": (GEOMETRY.predictor_vocab, g.hidden),
    }[kind]


class Case:
    """Inputs of one kind for up to 128 rows, and enough matrices not to sit in L2."""

    def __init__(self, kind: str) -> None:
        columns, size = shape(kind)
        count = -(-BYTES // (2 * columns * size))
        generator = torch.Generator(device=DEVICE).manual_seed(len(kind))
        self.kind, self.added = kind, kind in ("output", "down")
        self.weights = [torch.randn(columns, size, generator=generator) * 0.02 for _ in range(count)]
        eight = [quantize(weight) for weight in self.weights]
        eight += [(w.clone(), s.clone()) for w, s in eight]  # half the bytes: twice as many
        self.matrices = {False: [Matrix(w) for w in self.weights], True: [Matrix(*held) for held in eight]}
        self.x = torch.randn(128, size, generator=generator)
        self.norm = None if self.added else 1 + 0.1 * torch.randn(size, generator=generator)
        self.residual = torch.randn(128, columns, generator=generator) if self.added else None
        self.post, self.spare = torch.ones(columns), torch.zeros(128, columns)  # what separate kernels also touch

    def call(self, rows: int, matrix: Matrix, cut: Tile | None = None) -> torch.Tensor:
        residual = None if self.residual is None else self.residual[:rows]
        return linear(self.kind, self.x[:rows], matrix, self.norm, EPS, residual, cut)

    def reference(self, rows: int, fp8: bool) -> torch.Tensor:
        """In float32, of the same inputs."""
        x = self.x[:rows].float()
        if self.norm is not None:
            x = rms_norm(x, self.norm.float(), EPS)
        weight = self.weights[0].float()
        if fp8:
            held, scales = self.matrices[True][0]
            assert scales is not None
            weight = dequantize(held, scales, torch.float32)
        found = F.linear(x, weight)
        if self.kind == "gate_up":
            gate, up = found.chunk(2, dim=-1)
            found = F.silu(gate) * up
        return found if self.residual is None else found + self.residual[:rows].float()

    def separate(self, rows: int, weight: torch.Tensor) -> torch.Tensor:
        """By the kernels of FusedStep: linear, then what follows; the norm stands after the residual there."""
        found = F.linear(self.x[:rows], weight)
        if self.kind == "gate_up":
            return _swiglu(found)
        if self.residual is not None:
            ops.fused_add_rms_norm(found, self.spare[:rows], self.post, EPS)
        return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def microseconds(run: Callable[[], object], calls: int, replays: int = 10) -> float:
    """Of one of `calls` calls that `run` makes, inside a graph."""
    graph = captured(run)
    for _ in range(3):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / replays / calls


def over(matrices: list, call: Callable) -> Callable[[], None]:
    def run() -> None:
        for matrix in matrices:
            call(matrix)

    return run


def check_kernels(cases: dict[str, Case]) -> None:
    for fp8 in (False, True):
        for kind, case in cases.items():
            with survives(f"correctness of {kind}, fp8 {fp8}"):
                errors = {}
                for rows in (*ROWS, 2, 128):
                    if rows == 128 and kind == "head":
                        continue
                    errors[rows] = error(case.call(rows, case.matrices[fp8][0]), case.reference(rows, fp8))
                words = " ".join(f"{rows}: {value:.4f}" for rows, value in errors.items())
                good = "ok" if max(errors.values()) < 0.02 else "WRONG"
                result(f"{good} {kind} {'fp8' if fp8 else 'bf16'}: relative error by rows {words}")


def tune(cases: dict[str, Case], fp8: bool, spent: Callable[[], bool]) -> dict[tuple[str, int], Tile]:
    best: dict[tuple[str, int], Tile] = {}
    for rows, entry in TUNED.items():
        for kind, case in cases.items():
            if spent():
                result(f"tuning stopped at {kind}, {rows} rows: out of time")
                return best
            times: dict[Tile, float] = {}
            for cut in candidates(kind, rows, fp8):
                with survives(f"{kind} {rows} rows {cut}"):
                    matrices = case.matrices[fp8]
                    wrong = error(case.call(rows, matrices[0], cut), case.reference(rows, fp8))
                    if wrong > 0.02:
                        result(f"WRONG {kind} {rows} rows {cut}: relative error {wrong:.4f}")
                        continue
                    times[cut] = microseconds(over(matrices, lambda m: case.call(rows, m, cut)), len(matrices))  # noqa: B023
                    print(f"{kind} {rows} rows fp8 {fp8} {tuple(cut)}: {times[cut]:.2f} us", flush=True)
            if not times:
                continue
            winner = best[kind, entry] = min(times, key=times.__getitem__)
            words = f"best {'fp8' if fp8 else 'bf16'} {kind} {rows} rows: {times[winner]:.2f} us {tuple(winner)}"
            words += f"; table {next(iter(times.values())):.2f}"
            if fp8:
                result(words)
                continue
            with survives(f"separate kernels of {kind}"):
                plain = microseconds(over(case.weights, lambda w: F.linear(case.x[:rows], w)), len(case.weights))  # noqa: B023
                parts = microseconds(over(case.weights, lambda w: case.separate(rows, w)), len(case.weights))  # noqa: B023
                words += f", F.linear {plain:.2f}, with its others {parts:.2f}"
            result(words)
    return best


def inputs(rows: int, heat: float = 0.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    hidden = torch.randn(rows, GEOMETRY.talker.hidden, generator=generator)
    first = torch.randint(0, 2048, (rows,), generator=generator)
    integers, reals = torch.zeros(rows, 7, dtype=torch.int64), torch.ones(rows, 5, dtype=torch.float32)
    integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 50
    reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = heat, 1.0
    return hidden, first, integers, reals, torch.arange(rows)


def predictors() -> tuple[CodePredictor, FusedStep, SkinnyPredictor, SkinnyPredictor]:
    """One set of weights on the old path, the new one, and the new one in eight bits."""
    predictor = CodePredictor(GEOMETRY)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for name, weight in predictor.named_parameters():
        weight.data.fill_(1.0) if name.endswith("norm") else weight.data.normal_(0, 0.02, generator=generator)
    predictor.finish_loading()
    model = SimpleNamespace(predictor=predictor, geometry=GEOMETRY)
    old = FusedStep.__new__(FusedStep)
    old.model = model  # type: ignore[assignment]
    new, eight = SkinnyPredictor(model), SkinnyPredictor(model)  # type: ignore[arg-type]
    new.finish_loading(False)
    eight.finish_loading(True)
    return predictor, old, new, eight


def check_predict(old: FusedStep, new: SkinnyPredictor, name: str) -> None:
    for rows in (1, 16, 64):
        with survives(f"predict, {name}, {rows} rows"):
            given = inputs(rows)
            expected, found = old.predict(*given), new.predict(*given)
            agree = [round(float((expected[:, g] == found[:, g]).float().mean()), 2) for g in (1, 2, 8, 15)]
            others = [value.clone() for value in given]
            others[0][1:] *= -1.5
            alone = torch.equal(new.predict(*others)[0], found[0])
            again = torch.equal(new.predict(*given), found)
            result(f"{name} = fused, greedy, {rows} rows: groups 1, 2, 8, 15: {agree}; again {again}, alone {alone}")


def milliseconds(predict: Callable, rows: int) -> float:
    given = inputs(rows, 0.9)
    return 1e-3 * microseconds(lambda: predict(*given), 1, 20)


def frames(old: FusedStep, new: SkinnyPredictor, eight: SkinnyPredictor, name: str, with_old: bool) -> None:
    paths = {f"skinny {name}": new.predict, f"skinny fp8 {name}": eight.predict}
    for label, predict in (({"fused": old.predict} if with_old else {}) | paths).items():
        with survives(f"predict, {label}"):
            words = [f"{rows}: {milliseconds(predict, rows):.3f}" for rows in ROWS]
            result(f"ms a frame by rows, {label}: {'  '.join(words)}")


def work() -> list[tuple[str, int, Tile, bool]]:
    """Every kernel that will be needed: kind, rows, tile, eight bits."""
    listed: dict[tuple[str, Tile, bool], int] = {}
    for fp8 in (False, True):
        for kind in KINDS:
            for rows in (1, 2, 8, 16, 32, 64, 128):
                listed[kind, tile(kind, rows, fp8), fp8] = rows
            for rows in TUNED:
                listed |= {(kind, cut, fp8): rows for cut in candidates(kind, rows, fp8)}
    return [(kind, rows, cut, fp8) for (kind, cut, fp8), rows in listed.items()]


def compile_part(index: int, count: int) -> None:
    """Run a share of the kernels once, so that they are in Triton's cache."""
    for kind, rows, cut, fp8 in work()[index::count]:
        columns, size = shape(kind)
        added = kind in ("output", "down")
        weight = torch.zeros(columns, size)
        matrix = Matrix(*quantize(weight)) if fp8 else Matrix(weight)
        residual = torch.zeros(rows, columns) if added else None
        norm = None if added else torch.ones(size)
        with contextlib.suppress(Exception):  # told where it is measured
            linear(kind, torch.zeros(rows, size), matrix, norm, EPS, residual, cut)
    torch.cuda.synchronize()


def compile_all(workers: int) -> None:
    command = [sys.executable, str(Path(__file__).resolve()), "--compile"]
    running = [subprocess.Popen([*command, f"{index}/{workers}"]) for index in range(workers)]
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        if process.poll() is None:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=55, help="no candidate is begun when 15 s less have passed")
    parser.add_argument("--workers", type=int, default=10, help="processes that compile")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.inference_mode():
        if arguments.compile:
            compile_part(*map(int, arguments.compile.split("/")))
            return
        print("device", torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
        if arguments.workers:
            compile_all(arguments.workers)
        pdl = skinny.overlaps(torch.device(DEVICE))
        result(f"compiled after {time.perf_counter() - began:.0f} s; kernels overlap: {pdl}")
        cases = {kind: Case(kind) for kind in KINDS}
        check_kernels(cases)
        predictor, old, new, eight = predictors()
        check_predict(old, new, "skinny")
        frames(old, new, eight, "as in the table", True)
        for fp8 in (False, True):
            best = tune(cases, fp8, lambda: time.perf_counter() - began > arguments.seconds - 15)
            for (kind, entry), cut in best.items():
                (FP8_TILES if fp8 else TILES).setdefault(kind, {})[entry] = cut
        frames(old, new, eight, "with the best tiles", False)
        with survives("without overlap"):
            overlaps, skinny.overlaps = skinny.overlaps, lambda _: False
            try:
                result(f"ms a frame, 1 row, skinny without overlapping kernels: {milliseconds(new.predict, 1):.3f}")
            finally:
                skinny.overlaps = overlaps
        round_weights(predictor)
        eight.finish_loading(True)
        check_predict(old, eight, "skinny fp8 on rounded weights")
    result(f"took {time.perf_counter() - began:.0f} s")
    print("\n" + "\n".join(LINES))


if __name__ == "__main__":
    main()
