"""The kernels of one or two streams (skinny.py, persistent.py) on a CUDA machine, 1.7B geometry with random weights in
bfloat16: whether they are right, which tiles suit them, what the code predictor and the talker's layers cost on each
path.

    python3 tests/gpu/check_predictor.py [predictor] [talker] [small]

small: the kernels between the products, by warps; alone it compiles in a few seconds.

Prints lines that start with `result`. What fails prints its error and the next one runs. Kernels are compiled by
several processes into Triton's cache before the measuring starts.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from engine.geometry import published_config
from engine.talker import launches, skinny
from engine.talker.fp8 import dequantize, quantize, round_weights
from engine.talker.fused import FusedStep
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import DecoderLayer, rms_norm, rotary_table
from engine.talker.persistent import PersistentPredictor, fits
from engine.talker.predictor import CodePredictor
from engine.talker.skinny import LAYER_TILES, Matrix, SkinnyPredictor, SkinnyStep, Tile, linear, tile
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

DEVICE = "cuda"
EPS, GEOMETRY = 1e-6, TalkerGeometry.from_config(published_config("1.7b-base") or {})
SHAPES = {"head": (GEOMETRY.predictor_vocab, GEOMETRY.predictor.hidden)}  # [N, K] of a matrix as it is stored
for part, g in (("", GEOMETRY.predictor), ("talker ", GEOMETRY.talker)):
    SHAPES |= {f"{part}qkv": (g.qkv_width, g.hidden), f"{part}output": (g.hidden, g.heads * g.head_dim)}
    SHAPES |= {f"{part}gate_up": (2 * g.intermediate, g.hidden), f"{part}down": (g.hidden, g.intermediate)}
ROWS = (1, 2, 3, 4)
MANY = (1, 2, 4, 16, 32, 64)
WARPS = (1, 2, 4, 8, 16)
BYTES = 160 << 20  # of matrices that a measured graph goes through: more than L2 holds, as a pass of the predictor is
CUTS = [Tile(8, 256, 4), Tile(8, 256, 8), Tile(8, 512, 8), Tile(16, 256, 4), Tile(16, 256, 8), Tile(32, 256, 8)]
LAYER_CUTS = [*CUTS, *(cut._replace(ahead=n) for cut in (CUTS[0], CUTS[1]) for n in (0, 1024, 2048))]
SIDES = [(name, fp8) for fp8 in (False, True) for name in SHAPES if not fp8 or " " not in name]  # the talker has no fp8
result = partial(print, "result", flush=True)


@contextlib.contextmanager
def survives(what: str):
    try:
        yield
    except Exception as error:
        result(f"{what} FAILED: {error!r:.300}")


class Case:
    """Inputs of a matrix in SHAPES and, in bfloat16 or eight bits, `count` of it; 0: enough not to sit in L2."""

    def __init__(self, name: str, fp8: bool, count: int = 0) -> None:
        (columns, size), kind, added = SHAPES[name], name.removeprefix("talker "), name.endswith(("output", "down"))
        count = count or -(-BYTES // ((1 if fp8 else 2) * columns * size))
        generator = torch.Generator(device=DEVICE).manual_seed(len(kind))
        weights = (torch.randn(columns, size, generator=generator) * 0.02 for _ in range(count))
        self.matrices = [Matrix(*quantize(weight)) if fp8 else Matrix(weight) for weight in weights]
        self.name, self.kind, self.fp8 = name, kind, fp8
        self.table, self.cuts = (tile(kind, fp8), CUTS) if kind == name else (LAYER_TILES[kind], LAYER_CUTS)
        self.x = torch.randn(max(ROWS), size, generator=generator)
        self.norm = None if added else 1 + 0.1 * torch.randn(size, generator=generator)
        self.residual = torch.randn(max(ROWS), columns, generator=generator) if added else None

    def run(self, rows: int, cut: Tile | None = None, pdl: bool | None = None) -> list[torch.Tensor]:
        x, residual = self.x[:rows], None if self.residual is None else self.residual[:rows]
        return [linear(self.kind, x, each, self.norm, EPS, residual, cut or self.table, pdl) for each in self.matrices]

    def error(self, rows: int, cut: Tile | None = None, pdl: bool | None = None) -> float:
        """Relative, against the separate steps in float32 on the same inputs."""
        x, (weight, scales) = self.x[:rows].float(), self.matrices[0]
        x = x if self.norm is None else rms_norm(x, self.norm.float(), EPS)
        expected = F.linear(x, weight.float() if scales is None else dequantize(weight, scales, torch.float32))
        if self.kind == "gate_up":
            expected = F.silu(expected.chunk(2, -1)[0]) * expected.chunk(2, -1)[1]
        if self.residual is not None:
            expected += self.residual[:rows]
        return float((self.run(rows, cut, pdl)[0].float() - expected).norm() / expected.norm())


def microseconds(run: Callable) -> float:
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
    what, times = f"{case.name}, fp8 {case.fp8}, {rows} rows, overlap {overlap}", []
    for cut in case.cuts:
        with survives(f"{what}, {cut}"):
            if (wrong := case.error(rows, cut, overlap)) > 0.02:
                raise ValueError(f"relative error {wrong:.4f}")
            times.append((microseconds(partial(case.run, rows, cut, overlap)) / len(case.matrices), tuple(cut)))
    listed = "  ".join(f"{cut} {spent:.2f}" for spent, cut in sorted(times))
    if not case.fp8:  # the product alone, by cuBLAS
        separate = microseconds(lambda: [F.linear(case.x[:rows], matrix.weight) for matrix in case.matrices])
        listed += f"  F.linear {separate / len(case.matrices):.2f}"
    result(f"us, {what}, table {tuple(case.table)}: {listed}")


def inputs(rows: int, heat: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    hidden = torch.randn(rows, GEOMETRY.talker.hidden, generator=generator)
    first = torch.randint(0, 2048, (rows,), generator=generator)
    integers, reals = torch.zeros(rows, 7, dtype=torch.int64), torch.ones(rows, 5, dtype=torch.float32)
    integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 50
    reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = heat, 1.0
    return hidden, first, integers, reals, torch.arange(rows)


def predictors() -> dict[str, FusedStep | SkinnyPredictor | PersistentPredictor]:
    """The same weights, which eight bits hold exactly, on each path. Persistent is for one row."""
    predictor = CodePredictor(GEOMETRY)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for name, weight in predictor.named_parameters():
        weight.data.fill_(1.0) if name.endswith("norm") else weight.data.normal_(0, 0.02, generator=generator)
    round_weights(predictor)
    predictor.finish_loading()
    model = SimpleNamespace(predictor=predictor, geometry=GEOMETRY)
    plain = FusedStep.__new__(FusedStep)
    plain.model = model  # type: ignore[assignment]
    wide, eight = SkinnyPredictor(model), SkinnyPredictor(model)  # type: ignore[arg-type]
    paths: dict[str, FusedStep | SkinnyPredictor | PersistentPredictor] = {"fused": plain, "skinny": wide}
    if fits(GEOMETRY, torch.device(DEVICE)):  # elsewhere its programs would wait for others that never start
        one = PersistentPredictor(model)  # type: ignore[arg-type]
        one.finish_loading()  # first: it moves the matrices
        paths["persistent"] = one
    wide.finish_loading(False)
    eight.finish_loading(True)
    return paths | {"skinny fp8": eight}


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
            most = ROWS[:1] if name == "persistent" else ROWS
            times = {rows: microseconds(partial(path.predict, *inputs(rows, 0.9))) / 1e3 for rows in most}
            result(f"ms a frame by rows, {name}, {how}: {'  '.join(f'{n}: {t:.3f}' for n, t in times.items())}")


def small(path: FusedStep) -> None:
    """Attention and sampling by the warps of a program, and a frame with each."""
    predictor, g = path.model.predictor, GEOMETRY.predictor
    layer, groups = predictor.layers[0], GEOMETRY.groups
    for rows in MANY:
        qkv, out = torch.randn(rows, g.qkv_width), torch.empty(rows, g.heads * g.head_dim)
        caches = torch.randn(40, 2, rows, g.kv_heads, groups, g.head_dim)
        _, _, integers, reals, frame = inputs(rows, 0.9)
        logits = torch.randn(rows, GEOMETRY.predictor_vocab)
        codes = torch.empty(rows, dtype=torch.int64)
        columns = (SUB_TEMPERATURE, SUB_TOP_P, SUB_TOP_K)
        following = (predictor.projected[0], layer.input_norm, EPS)
        times: dict[str, list[str]] = {"attend": [], "sample": [], "frame": []}
        for warps in WARPS:
            with (
                survives(f"{rows} rows, {warps} warps"),
                mock.patch.multiple(launches, ATTEND_WARPS=warps, SAMPLE_WARPS=warps),
            ):
                attended = partial(launches.attend, predictor, layer, qkv, out)
                spent = microseconds(lambda: [attended(cache, 8, rows, 1) for cache in caches]) / len(caches)  # noqa: B023
                times["attend"].append(f"{warps}: {spent:.2f}")
                sampled = partial(launches.sample, logits, integers, reals, frame, 1, columns, codes, following)
                times["sample"].append(f"{warps}: {microseconds(lambda: [sampled() for _ in range(40)]) / 40:.2f}")  # noqa: B023
                given = inputs(rows, 0.9)
                times["frame"].append(f"{warps}: {microseconds(partial(path.predict, *given)):.0f}")
        for name, listed in times.items():
            result(f"us by warps, {name}, {rows} rows: {'  '.join(listed)}")


class Queries(torch.nn.Module):
    """In the place of vLLM's attention."""

    kv_cache = None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query


@survives("the talker's layers")
def stacks() -> None:
    """The talker's layers on each path, each layer's attention giving back its queries."""
    g, model = GEOMETRY.talker, SimpleNamespace(geometry=GEOMETRY, attentions=[Queries()] * 99)
    model.layers, model.norm = torch.nn.ModuleList([DecoderLayer(g) for _ in range(g.layers)]), torch.ones(g.hidden)
    for name, weight in model.layers.named_parameters():
        weight.data.fill_(1.0) if name.endswith("norm") else weight.data.normal_(0, 0.02)
    steps = {"separate": FusedStep.__new__(FusedStep), "skinny": SkinnyStep.__new__(SkinnyStep)}
    for step in steps.values():
        step.model, step.fused_rotary, step.skinny_layers, step.paged = model, True, True, None  # type: ignore
        step.wide_rotary = rotary_table(g, 64).to(DEVICE, torch.bfloat16)
    for rows in (1, 2):
        x, positions = torch.randn(rows, g.hidden), torch.arange(rows) + 5
        separate, found = (step.layers(x.clone(), positions).float() for step in steps.values())
        result(f"layers, {rows} rows, skinny against separate: {(found - separate).norm() / separate.norm():.4f}")
        for name, step in steps.items():  # separate works in place on its input
            result(f"ms, layers, {rows} rows, {name}: {microseconds(partial(step.layers, x, positions)) / 1e3:.3f}")


def compile_one(side: tuple[str, bool], cut: Tile, overlap: bool) -> None:
    """Run a kernel once, so that it is in Triton's cache."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.inference_mode(), contextlib.suppress(Exception):  # told where it is measured
        case = Case(*side, 1)
        if cut in case.cuts:
            case.run(1, cut, overlap)


def main() -> None:
    began, parts = time.perf_counter(), sys.argv[1:] or ["predictor", "talker"]
    torch.set_default_dtype(torch.bfloat16)
    sides = [side for side in SIDES if ("talker" if " " in side[0] else "predictor") in parts]
    work = list(itertools.product(sides, LAYER_CUTS, (True, False)))
    if work:
        with multiprocessing.get_context("spawn").Pool(10) as pool:
            pool.starmap_async(compile_one, work, 1).wait(90)
    result(f"compiled after {time.perf_counter() - began:.0f} s, {torch.cuda.get_device_name()}")
    with torch.device(DEVICE), torch.inference_mode():
        cases = [Case(*side) for side in sides]
        for case in cases:
            with survives(f"correctness of {case.name}, fp8 {case.fp8}"):
                errors = [round(case.error(rows), 4) for rows in ROWS]
                good = "ok" if max(errors) < 0.02 else "WRONG"
                result(f"{good} {case.name}, fp8 {case.fp8}: relative errors {errors}")
        if "talker" in parts:
            stacks()
        if "small" in parts:
            small(predictors()["fused"])
        if "predictor" in parts:
            paths = predictors()
            if "persistent" in paths:
                check_predict(paths, "persistent", 1)
            for name, rows in itertools.product(("skinny", "skinny fp8"), ROWS):
                check_predict(paths, name, rows)
            frames(paths, "with overlap")
            with mock.patch.object(skinny, "overlaps", lambda _: False):
                frames(paths, "without overlap")
        for overlap, rows, case in itertools.product((True, False), (1, 4), cases):
            if case.name == case.kind or (overlap and rows == 1):
                tune(case, rows, overlap)


if __name__ == "__main__":
    main()
