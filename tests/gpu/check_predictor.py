"""The code predictor's kernels on a CUDA machine, 1.7B geometry with random weights in bfloat16: whether those of one
or two streams (skinny.py) are right, which tiles suit them, and what a frame costs on each path.

    python3 tests/gpu/check_predictor.py

Prints lines that start with `result`. What fails prints its error and the next one runs. Kernels are compiled by
several processes into Triton's cache before the measuring starts.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from engine.geometry import published_config
from engine.talker import skinny
from engine.talker.fp8 import dequantize, quantize, round_weights
from engine.talker.fused import FusedStep
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import rms_norm
from engine.talker.predictor import CodePredictor
from engine.talker.skinny import Matrix, SkinnyPredictor, Tile, linear, tile
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

DEVICE = "cuda"
GEOMETRY = TalkerGeometry.from_config(published_config("1.7b-base") or {})
WIDTH, INNER, EPS = GEOMETRY.predictor.hidden, GEOMETRY.predictor.intermediate, GEOMETRY.predictor.eps
SHAPES = {  # [N, K] of a matrix as it is stored
    "qkv": (GEOMETRY.predictor.qkv_width, WIDTH),
    "output": (WIDTH, GEOMETRY.predictor.heads * GEOMETRY.predictor.head_dim),
    "gate_up": (2 * INNER, WIDTH),
    "down": (WIDTH, INNER),
    "head": (GEOMETRY.predictor_vocab, WIDTH),
}
ROWS = (1, 2, 4)
BYTES = 160 << 20  # of matrices that a measured graph goes through: more than L2 holds, as a pass of the predictor is
CUTS = [Tile(8, 256, 4), Tile(8, 256, 8), Tile(8, 512, 8), Tile(16, 256, 4), Tile(16, 256, 8), Tile(32, 256, 8)]
result = partial(print, "result", flush=True)


@contextlib.contextmanager
def survives(what: str):
    try:
        yield
    except Exception as error:
        result(f"{what} FAILED: {error!r:.300}")


class Case:
    """Inputs of one kind and, in bfloat16 or eight bits, `count` matrices; 0: enough of them not to sit in L2."""

    def __init__(self, kind: str, fp8: bool, count: int = 0) -> None:
        (columns, size), added = SHAPES[kind], kind in ("output", "down")
        count = count or -(-BYTES // ((1 if fp8 else 2) * columns * size))
        generator = torch.Generator(device=DEVICE).manual_seed(len(kind))
        weights = (torch.randn(columns, size, generator=generator) * 0.02 for _ in range(count))
        self.matrices = [Matrix(*quantize(weight)) if fp8 else Matrix(weight) for weight in weights]
        self.kind, self.fp8 = kind, fp8
        self.x = torch.randn(max(ROWS), size, generator=generator)
        self.norm = None if added else 1 + 0.1 * torch.randn(size, generator=generator)
        self.residual = torch.randn(max(ROWS), columns, generator=generator) if added else None

    def run(self, rows: int, cut: Tile | None = None, pdl: bool | None = None) -> list[torch.Tensor]:
        x, residual = self.x[:rows], None if self.residual is None else self.residual[:rows]
        return [linear(self.kind, x, matrix, self.norm, EPS, residual, cut, pdl) for matrix in self.matrices]

    def error(self, rows: int, cut: Tile | None = None, pdl: bool | None = None) -> float:
        """Relative, against the separate steps in float32 on the same inputs."""
        x, (weight, scales) = self.x[:rows].float(), self.matrices[0]
        x = x if self.norm is None else rms_norm(x, self.norm.float(), EPS)
        expected = F.linear(x, weight.float() if scales is None else dequantize(weight, scales, torch.float32))
        if self.kind == "gate_up":
            expected = F.silu(expected[:, :INNER]) * expected[:, INNER:]
        if self.residual is not None:
            expected += self.residual[:rows]
        return float((self.run(rows, cut, pdl)[0].float() - expected).norm() / expected.norm())


def microseconds(run: partial) -> float:
    """Of a call, in a graph that is replayed 20 times."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage each time
        run()
        torch.cuda.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / 20


def tune(case: Case, rows: int, overlap: bool) -> None:
    what, times = f"{case.kind}, fp8 {case.fp8}, {rows} rows, overlap {overlap}", []
    for cut in CUTS:
        with survives(f"{what}, {cut}"):
            if (wrong := case.error(rows, cut, overlap)) > 0.02:
                raise ValueError(f"relative error {wrong:.4f}")
            times.append((microseconds(partial(case.run, rows, cut, overlap)) / len(case.matrices), tuple(cut)))
    listed = "  ".join(f"{cut} {spent:.2f}" for spent, cut in sorted(times))
    result(f"us, {what}, table {tuple(tile(case.kind, case.fp8))}: {listed}")


def inputs(rows: int, heat: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    hidden = torch.randn(rows, GEOMETRY.talker.hidden, generator=generator)
    first = torch.randint(0, 2048, (rows,), generator=generator)
    integers, reals = torch.zeros(rows, 7, dtype=torch.int64), torch.ones(rows, 5, dtype=torch.float32)
    integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 50
    reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = heat, 1.0
    return hidden, first, integers, reals, torch.arange(rows)


def predictors() -> dict[str, FusedStep | SkinnyPredictor]:
    """The same weights, which eight bits hold exactly, on each path."""
    predictor = CodePredictor(GEOMETRY)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for name, weight in predictor.named_parameters():
        weight.data.fill_(1.0) if name.endswith("norm") else weight.data.normal_(0, 0.02, generator=generator)
    round_weights(predictor)
    predictor.finish_loading()
    model = SimpleNamespace(predictor=predictor, geometry=GEOMETRY)
    fused = FusedStep.__new__(FusedStep)
    fused.model = model  # type: ignore[assignment]
    wide, eight = SkinnyPredictor(model), SkinnyPredictor(model)  # type: ignore[arg-type]
    wide.finish_loading(False)
    eight.finish_loading(True)
    return {"fused": fused, "skinny": wide, "skinny fp8": eight}


def check_predict(paths: dict, name: str, rows: int) -> None:
    with survives(f"predict, {name}, {rows} rows"):
        given = inputs(rows, 0.0)
        expected, found = paths["fused"].predict(*given), paths[name].predict(*given)
        agree = [round(float((expected[:, g] == found[:, g]).float().mean()), 2) for g in (1, 2, 8, 15)]
        again = torch.equal(paths[name].predict(*given), found)
        given[0][1:] *= -1.5
        alone = torch.equal(paths[name].predict(*given)[0], found[0])
        result(f"{name} = fused, greedy, {rows} rows: groups 1, 2, 8, 15: {agree}; again {again}, alone {alone}")


def frames(paths: dict, how: str) -> None:
    for name, path in paths.items():
        with survives(f"predict, {name}, {how}"):
            times = {rows: microseconds(partial(path.predict, *inputs(rows, 0.9))) / 1e3 for rows in ROWS}
            result(f"ms a frame by rows, {name}, {how}: {'  '.join(f'{n}: {t:.3f}' for n, t in times.items())}")


def compile_one(kind: str, fp8: bool, cut: Tile, overlap: bool) -> None:
    """Run a kernel once, so that it is in Triton's cache."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.inference_mode(), contextlib.suppress(Exception):  # told where it is measured
        Case(kind, fp8, 1).run(1, cut, overlap)


def main() -> None:
    began = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    with multiprocessing.get_context("spawn").Pool(10) as pool:
        work = itertools.product(SHAPES, (False, True), CUTS, (True, False))
        pool.starmap_async(compile_one, work, 1).wait(90)
    result(f"compiled after {time.perf_counter() - began:.0f} s, {torch.cuda.get_device_name()}")
    with torch.device(DEVICE), torch.inference_mode():
        cases = [Case(kind, fp8) for fp8 in (False, True) for kind in SHAPES]
        for case in cases:
            with survives(f"correctness of {case.kind}, fp8 {case.fp8}"):
                errors = [round(case.error(rows), 4) for rows in ROWS]
                good = "ok" if max(errors) < 0.02 else "WRONG"
                result(f"{good} {case.kind}, fp8 {case.fp8}: relative errors {errors}")
        paths = predictors()
        for name, rows in itertools.product(("skinny", "skinny fp8"), ROWS):
            check_predict(paths, name, rows)
        frames(paths, "with overlap")
        with mock.patch.object(skinny, "overlaps", lambda _: False):
            frames(paths, "without overlap")
        for overlap, rows, case in itertools.product((True, False), (1, 4), cases):
            tune(case, rows, overlap)


if __name__ == "__main__":
    main()
