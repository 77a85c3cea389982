"""The kernel of few rows and the predictor over them against torch. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from engine.talker import persistent
from engine.talker import skinny as module
from engine.talker.fp8 import dequantize, quantize, round_weights
from engine.talker.fused import FusedStep
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import DecoderLayer, rms_norm, rotary_table, rotate
from engine.talker.model import TalkerModel
from engine.talker.paged import PagedAttention
from engine.talker.predictor import CodePredictor
from engine.talker.skinny import (
    LAYER_ROWS,
    LAYER_TILES,
    MOST_ROWS,
    TILES,
    Matrix,
    SkinnyPredictor,
    SkinnyStep,
    Tile,
    linear,
    overlaps,
    tile,
)
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P
from engine.talker.torch_step import TorchStep
from tests.talker.driving import geometry_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CUTS = [Tile(8, 128, 4), Tile(16, 64, 4)]  # the rows' length in one block and in two, the last one not full


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
    for rows in (1, 4):
        arguments, expected = case(kind, rows, torch.float32, fp8)
        found = linear(kind, **arguments, cut=cut)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "gate_up", "down"])
def test_linear_in_bfloat16(kind, fp8):
    arguments, expected = case(kind, 3, torch.bfloat16, fp8)
    found = linear(kind, **arguments, cut=CUTS[1])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.03)  # the interpreter cuts bfloat16 off


def test_a_row_does_not_see_the_others():
    arguments, _ = case("gate_up", 5, torch.float32, False)
    together = linear("gate_up", **arguments)
    arguments["x"] = arguments["x"].clone()
    arguments["x"][[0, 1, 3, 4]] = torch.nan
    assert torch.equal(linear("gate_up", **arguments)[2], together[2])


def test_the_table():
    assert tile("gate_up", scaled=True) != tile("gate_up", scaled=False) == TILES["gate_up"]
    assert tile("down", scaled=True) == TILES["down"]
    assert not overlaps(torch.device("cpu"))


def test_many_rows_and_float32_take_the_separate_kernels(monkeypatch):
    step = SkinnyStep.__new__(SkinnyStep)
    monkeypatch.setattr(FusedStep, "predict", lambda self, *given: "fused")
    few, many = torch.zeros(MOST_ROWS, 4), torch.zeros(MOST_ROWS + 1, 4)
    step.skinny, step.persistent = SimpleNamespace(predict=lambda *given: "skinny"), None
    assert step.predict(few, *[few] * 4) == "skinny" and step.predict(many, *[many] * 4) == "fused"
    step.persistent = SimpleNamespace(predict=lambda *given: "persistent")
    one = torch.zeros(1, 4)
    assert step.predict(one, *[one] * 4) == "persistent" and step.predict(few, *[few] * 4) == "skinny"
    assert step.predict(many, *[many] * 4) == "fused"
    step.skinny = step.persistent = None
    assert step.predict(few, *[few] * 4) == "fused"


@pytest.mark.parametrize(("hidden", "fp8"), [(64, True), (128, False)])
def test_predict(fp8, hidden, monkeypatch):
    """Greedy and sampled codes of a small predictor, with and without projection, equal those of the plain one."""
    for kind in TILES:  # few programs: the interpreter takes its time for each
        monkeypatch.setitem(TILES, kind, Tile(64, 128, 4))
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
        for rows in (1, 2):
            integers, reals = torch.zeros(rows, 7, dtype=torch.int64), torch.ones(rows, 5)
            integers[:, SEED], integers[:, SUB_TOP_K] = torch.arange(rows) * 13, 20
            frame, first = torch.arange(rows), torch.arange(rows) * 7 + 1
            reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = 0.0 if rows == 1 else 0.9, 0.9
            inputs = torch.randn(rows, hidden), first, integers, reals, frame
            assert torch.equal(skinny.predict(*inputs), predictor(*inputs))


class Rotated(SkinnyStep):
    """What vLLM's kernels for 16-bit types do, in torch."""

    paged = None

    def attended(self, index: int, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        g, layer = self.model.geometry.talker, self.model.layers[index]
        parts = qkv.unflatten(-1, (-1, g.head_dim)).split([g.heads, g.kv_heads, g.kv_heads], dim=-2)
        table, norms = self.rotary[positions], (layer.query_norm, layer.key_norm)
        query, key = (rotate(rms_norm(x, norm, g.eps), table) for x, norm in zip(parts[:2], norms, strict=True))
        return self.model.attentions[index](query.flatten(-2), key.flatten(-2), parts[2].flatten(-2))


def talker_stack():
    """A small talker with random weights, and in the place of attention something that depends on q, k and v."""
    geometry = TalkerGeometry.from_config(geometry_config(hidden=96, layers=2))
    g = geometry.talker
    model = SimpleNamespace(geometry=geometry, layers=nn.ModuleList([DecoderLayer(g) for _ in range(g.layers)]))
    torch.manual_seed(5)
    for name, weight in model.layers.named_parameters():
        weight.data.normal_(1 if name.endswith("norm") else 0, 0.1)
    model.norm = 1 + 0.1 * torch.randn(g.hidden)

    class Attention(nn.Module):
        kv_cache = torch.empty(0)

        def forward(self, query, key, value):
            grouped = (key + value).unflatten(-1, (g.kv_heads, g.head_dim)).repeat_interleave(g.heads // g.kv_heads, -2)
            return (query * grouped.flatten(-2)).tanh()

    model.attentions = [Attention()] * g.layers
    return model


def test_layers(monkeypatch):
    """Normed hidden states, as from the plain layers; the input rows stay as they were."""
    monkeypatch.setattr(module, "norm_rows", rms_norm)
    for kind in LAYER_TILES:
        monkeypatch.setitem(LAYER_TILES, kind, Tile(64, 128, 4))
    with torch.device(DEVICE):
        model = talker_stack()
        plain, skinny = TorchStep.__new__(TorchStep), Rotated.__new__(Rotated)
        for step in (plain, skinny):
            step.model, step.rotary = model, rotary_table(model.geometry.talker, 16).to(DEVICE)
        for rows in (1, 2):
            x, positions = torch.randn(rows, 96), torch.arange(rows) + 3
            given = x.clone()
            torch.testing.assert_close(skinny.few_rows(x, positions), plain.layers(x, positions), rtol=1e-4, atol=1e-4)
            assert torch.equal(x, given)


class FlashAttentionMetadata(SimpleNamespace):
    """By this name vLLM's FlashAttention backend is known."""


def test_layers_over_the_paged_cache(monkeypatch):
    """A sequence, one row at a time; as by plain layers whose attention sees all rows at once. Where the cache is of
    another layout, or in a profiling run, which has none, the attention is vLLM's."""
    monkeypatch.setattr(module, "norm_rows", rms_norm)
    for kind in LAYER_TILES:
        monkeypatch.setitem(LAYER_TILES, kind, Tile(64, 128, 4))
    length, page = 40, 16
    with torch.device(DEVICE):
        model = talker_stack()
        g = model.geometry.talker
        plain, skinny = TorchStep.__new__(TorchStep), Rotated.__new__(Rotated)
        for step in (plain, skinny):
            step.model, step.rotary = model, rotary_table(g, 64).to(DEVICE)
        skinny.paged = PagedAttention(g, skinny.rotary)
        x, theirs = torch.randn(length, g.hidden), model.attentions

        def causal(query, key, value):
            parts = [t.unflatten(-1, (-1, g.head_dim)).transpose(0, 1) for t in (query, key, value)]
            out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            return out.transpose(0, 1).flatten(-2)

        model.attentions = [causal] * g.layers
        want = plain.layers(x, torch.arange(length))
        table = torch.tensor([[3, 0, 2]], dtype=torch.int32)
        shape = 4, g.kv_heads, page, 2 * g.head_dim
        model.attentions = [SimpleNamespace(kv_cache=torch.zeros(shape)) for _ in range(g.layers)]
        for position in range(length):
            slot = table[0, position // page].long() * page + position % page
            model.metadata = lambda slot=slot: (FlashAttentionMetadata(block_table=table), slot[None])
            found = skinny.few_rows(x[position : position + 1], torch.tensor([position]))
            torch.testing.assert_close(found, want[position : position + 1], rtol=1e-4, atol=1e-4)
        caches, model.attentions = model.attentions, theirs
        one, where = torch.randn(1, g.hidden), torch.tensor([3])
        found = model.metadata()
        for metadata, kv_cache in (
            ((None, None), caches[0].kv_cache),
            (found, theirs[0].kv_cache),
            ((SimpleNamespace(block_table=table), found[1]), caches[0].kv_cache),  # of another backend
        ):
            model.metadata = lambda metadata=metadata: metadata
            monkeypatch.setattr(theirs[0], "kv_cache", kv_cache)
            torch.testing.assert_close(skinny.few_rows(one, where), plain.layers(one, where), rtol=1e-4, atol=1e-4)


def test_which_layers_run_in_few_kernels(monkeypatch):
    step = SkinnyStep.__new__(SkinnyStep)
    monkeypatch.setattr(FusedStep, "layers", lambda self, *given: "separate")
    monkeypatch.setattr(SkinnyStep, "few_rows", lambda self, *given: "skinny")
    few, many = torch.zeros(LAYER_ROWS, 4), torch.zeros(LAYER_ROWS + 1, 4)
    step.skinny_layers = True
    assert step.layers(few, few) == "skinny" and step.layers(many, many) == "separate"
    step.skinny_layers = False
    assert step.layers(few, few) == "separate"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_predictor_and_layers_are_chosen_one_by_one(dtype, monkeypatch):
    """The model's step on CUDA; in float32 nothing is skinny, whatever is asked for. Persistent includes skinny, for
    where it does not suit: another GPU or model, eight bits."""
    suits = {"geometry": True}
    monkeypatch.setattr(persistent, "fits", lambda *given: suits["geometry"])
    model, half = SimpleNamespace(fp8=False), dtype == torch.bfloat16
    model.geometry = TalkerGeometry.from_config(geometry_config(head_dim=64))
    model.head, model.max_positions, model.max_rows = torch.zeros(1, dtype=dtype), 16, 2
    model.predictor = SimpleNamespace(norm=torch.zeros(1))
    cuda = torch.device("cuda")
    for predictor in ("skinny", "fused"):
        for layers in ("skinny", "separate"):
            step = TalkerModel._step(model, predictor, layers, cuda, dtype)
            assert isinstance(step, SkinnyStep) == ("skinny" in (predictor, layers))
            if isinstance(step, SkinnyStep):
                assert (step.skinny is not None) == (predictor == "skinny" and half)
                assert step.skinny_layers == (layers == "skinny" and half) and step.paged is None
    step = TalkerModel._step(model, "fused", "paged", cuda, dtype)
    assert isinstance(step, SkinnyStep) and step.skinny_layers == half == (step.paged is not None)
    for model.fp8, suits["geometry"], expected in ((False, True, half), (False, False, False), (True, True, False)):
        step = TalkerModel._step(model, "persistent", "separate", cuda, dtype)
        assert (step.persistent is not None, step.skinny is not None) == (expected, half)
    assert type(TalkerModel._step(model, "plain", "separate", cuda, dtype)) is TorchStep
    assert type(TalkerModel._step(model, "fused", "skinny", torch.device("cpu"), torch.bfloat16)) is TorchStep


def test_the_talkers_table():
    """Programs for every one of the 132 multiprocessors of an H100 or H200, at the published size."""
    columns = {"qkv": 4096, "output": 2048, "gate_up": 6144, "down": 2048}
    assert all(columns[kind] // cut.block_n >= 132 for kind, cut in LAYER_TILES.items())
