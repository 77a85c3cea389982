"""The kernels of few rows and the predictor over them against torch. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton")
pytest.importorskip("vllm")

from engine.talker.fp8 import dequantize, quantize, round_weights
from engine.talker.fused import FusedStep
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import rms_norm
from engine.talker.predictor import CodePredictor
from engine.talker.skinny import MOST_ROWS, TILES, Matrix, SkinnyPredictor, SkinnyStep, Tile, linear, overlaps, tile
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P
from tests.talker.driving import geometry_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CUTS = [
    Tile(0, 8, 128),
    Tile(0, 16, 64),
    Tile(16, 16, 32),
    Tile(16, 8, 16, split=4),
    Tile(32, 16, 32, split=2),
]


def case(kind: str, rows: int, dtype: torch.dtype, fp8: bool, size=96, columns=40):
    """What `linear` is given, and the result by separate steps in float32."""
    generator = torch.Generator().manual_seed(rows)
    gated, added = kind == "gate_up", kind in ("output", "down")

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    x, weight = made(rows, 2, size)[:, 1], made(columns * (2 if gated else 1), size) * 0.1  # rows that lie apart
    norm, residual = (None if added else 1 + 0.2 * made(size)), (made(rows, columns) if added else None)
    matrix = Matrix(*quantize(weight)) if fp8 else Matrix(weight)
    if fp8:
        weight = dequantize(*quantize(weight), torch.float32)
    wide = x.float() if norm is None else rms_norm(x.float(), norm.float(), EPS)
    expected = F.linear(wide, weight.float())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual.float()
    return {"x": x, "matrix": matrix, "norm": norm, "eps": EPS, "residual": residual}, expected


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
def test_linear(kind, fp8, cut):
    for rows in (1, 3, 17):
        arguments, expected = case(kind, rows, torch.float32, fp8)
        found = linear(kind, **arguments, cut=cut)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", CUTS[1:4], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
def test_linear_in_bfloat16(kind, fp8, cut):
    arguments, expected = case(kind, 3, torch.bfloat16, fp8)
    found = linear(kind, **arguments, cut=cut)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.03)  # the interpreter cuts bfloat16 off


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_does_not_see_the_others(cut):
    arguments, _ = case("gate_up", 5, torch.float32, False)
    together = linear("gate_up", **arguments, cut=cut)
    arguments["x"] = arguments["x"].clone()
    arguments["x"][[0, 1, 3, 4]] = torch.nan
    assert torch.equal(linear("gate_up", **arguments, cut=cut)[2], together[2])


def test_the_table_has_an_entry_for_any_number_of_rows():
    for kind, entries in TILES.items():
        for rows in (1, 2, 3, 16, 17, 64, 65, 128, 129, 1000):
            assert (
                tile(kind, rows, scaled=False) == entries[min((n for n in entries if n >= rows), default=max(entries))]
            )
        for cut in entries.values():
            assert cut.split in (1, cut.warps) and cut.block_m in (0, 16, 32, 64, 128)
    assert not overlaps(torch.device("cpu"))


def test_many_rows_and_float32_take_the_separate_kernels(monkeypatch):
    step = SkinnyStep.__new__(SkinnyStep)
    monkeypatch.setattr(FusedStep, "predict", lambda self, *given: "fused")
    few, many = torch.zeros(MOST_ROWS, 4), torch.zeros(MOST_ROWS + 1, 4)
    step.skinny = SimpleNamespace(predict=lambda *given: "skinny")
    assert step.predict(few, *[few] * 4) == "skinny" and step.predict(many, *[many] * 4) == "fused"
    step.skinny = None
    assert step.predict(few, *[few] * 4) == "fused"


@pytest.mark.parametrize(("hidden", "fp8"), [(64, True), (128, False)])
def test_predict(fp8, hidden, monkeypatch):
    """Greedy and sampled codes of a small predictor, with and without projection, equal those of the plain one."""
    for kind in TILES:  # few programs: the interpreter takes its time for each
        monkeypatch.setitem(TILES, kind, {2: Tile(0, 64, 128), 16: Tile(16, 64, 32, split=2, warps=2)})
    geometry = TalkerGeometry.from_config(geometry_config(hidden=hidden, width=64, depth=2, groups=3, codes=48))
    torch.manual_seed(3)
    with torch.device(DEVICE):
        predictor = CodePredictor(geometry)
        for name, weight in predictor.named_parameters():
            weight.data.normal_(1 if name.endswith("norm") else 0, 0.1)
        if fp8:
            round_weights(predictor)
        predictor.finish_loading()
        skinny = SkinnyPredictor(SimpleNamespace(predictor=predictor, geometry=geometry))
        skinny.finish_loading(fp8)
        assert (skinny.heads[0].weight.dtype == torch.float8_e4m3fn) == fp8
        for rows in (1, 3):
            integers, reals = torch.zeros(rows, 7, dtype=torch.int64), torch.ones(rows, 5)
            integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 20
            frame, first = torch.arange(rows), torch.arange(rows) * 7 + 1
            reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = 0.0 if rows == 1 else 0.9, 0.9
            inputs = torch.randn(rows, hidden), first, integers, reals, frame
            assert torch.equal(skinny.predict(*inputs), predictor(*inputs))
