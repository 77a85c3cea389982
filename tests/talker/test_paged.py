"""The attention of one row over a paged cache against torch. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from engine.talker import paged
from engine.talker.geometry import StackGeometry
from engine.talker.layers import DecoderLayer, rms_norm, rotary_table, rotate
from engine.talker.paged import PagedAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
PAGE, PAGES = 16, 40


def scene(length: int, order: str, dtype: torch.dtype):
    """A layer, a cache whose first `length` positions are filled, their pages, and the keys and values as they lie."""
    geometry = StackGeometry(
        layers=1, hidden=32, intermediate=32, heads=4, kv_heads=2, head_dim=16, eps=1e-6, rope_theta=10_000.0
    )
    torch.manual_seed(length)
    layer = DecoderLayer(geometry).to(DEVICE, dtype)
    with torch.no_grad():
        for norm in (layer.query_norm, layer.key_norm):
            norm.copy_(1 + 0.3 * torch.randn(16))
    cache = (
        torch.randn(PAGES, 2, PAGE, 32) if order == "heads first" else torch.randn(PAGES, PAGE, 2, 32).transpose(1, 2)
    )
    table = torch.randperm(PAGES, dtype=torch.int32)[None, :36]
    return geometry, layer, cache.to(DEVICE, dtype), table.to(DEVICE)


def spoken(geometry, layer, qkv, cache, position, table):
    """The same by torch, in float32 from the rounded heads: output [1, 64], key and value [2, 16]."""
    dtype, g = qkv.dtype, geometry
    rotary = rotary_table(g, 640).to(DEVICE, dtype)
    query, key, value = qkv.float().unflatten(-1, (-1, 16)).split([4, 2, 2], dim=1)
    turned = rotary[position : position + 1].float()
    query, key = (
        rotate(rms_norm(x, norm.float(), g.eps), turned).to(dtype).float()
        for x, norm in ((query, layer.query_norm), (key, layer.key_norm))
    )
    past = cache.float()[table[0].long()].permute(1, 0, 2, 3).flatten(1, 2)[:, :position]  # [kv_heads, position, 2 d]
    keys = torch.cat([past[..., :16], key[0, :, None]], dim=1)
    values = torch.cat([past[..., 16:], value[0, :, None]], dim=1)
    out = F.scaled_dot_product_attention(query[0, :, None], *(x.repeat_interleave(2, 0) for x in (keys, values)))
    return out.reshape(1, -1), key[0].to(dtype), value[0].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 127, 128, 129, 300, 575])
def test_the_row_sees_all_before_it_and_is_stored(position, order, dtype, monkeypatch):
    monkeypatch.setattr(paged, "BLOCK", 32)  # 575 past keys are three blocks of each of six programs
    geometry, layer, cache, table = scene(position, order, dtype)
    rotary = rotary_table(geometry, 640).to(DEVICE, dtype)
    attention = PagedAttention(geometry, rotary)
    assert attention.reads(cache)
    where = torch.tensor([position], device=DEVICE)
    slot = table[0, position // PAGE].long() * PAGE + position % PAGE
    for seed in range(2):  # the counters are as they were
        qkv = torch.randn(1, 8 * 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
        want, key, value = spoken(geometry, layer, qkv, cache, position, table)
        before = cache.clone()
        out = attention.attend(layer, qkv, cache, where, table, slot[None], pdl=False)
        assert (out.float() - want).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)
        page, place = divmod(int(slot), PAGE)
        stored = torch.cat([key, value], dim=-1)
        assert (cache[page, :, place].float() - stored.float()).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
        cache[page, :, place] = before[page, :, place]
        assert torch.equal(cache, before)  # nothing else was written
    assert not attention._counters.any()


def test_padding_is_not_stored():
    geometry, layer, cache, table = scene(20, "heads first", torch.float32)
    attention = PagedAttention(geometry, rotary_table(geometry, 640).to(DEVICE))
    before, qkv = cache.clone(), torch.randn(1, 8 * 16, device=DEVICE)
    nowhere = torch.tensor([-1], device=DEVICE)
    attention.attend(layer, qkv, cache, torch.tensor([20], device=DEVICE), table, nowhere, pdl=False)
    assert torch.equal(cache, before)


def test_what_is_merged_is_float32_whatever_the_model_is():
    geometry, rotary = scene(20, "heads first", torch.float32)[0], torch.zeros(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert PagedAttention(geometry, rotary)._partial.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_caches_are_left_to_vllm():
    geometry, _, cache, _ = scene(20, "heads first", torch.float32)
    attention = PagedAttention(geometry, rotary_table(geometry, 640).to(DEVICE))
    assert attention.reads(cache)
    for other in (cache[:, :1], cache.bfloat16(), cache[..., ::2], cache[None], torch.empty(0)):
        assert not attention.reads(other)
    odd = StackGeometry(
        layers=1, hidden=32, intermediate=32, heads=6, kv_heads=2, head_dim=16, eps=1e-6, rope_theta=10_000.0
    )
    assert not PagedAttention(odd, rotary_table(odd, 640).to(DEVICE)).reads(cache)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("position", [0, 63, 64, 65, 127, 128, 129, 700, 1500])
def test_the_published_size_in_a_graph_with_early_starts(position):
    """Twenty-eight layers in a row, each kernel started while the one before it runs, as in the talker's graph."""
    from engine.talker.skinny import Matrix, Tile, linear, overlaps

    geometry = StackGeometry(
        layers=28, hidden=2048, intermediate=6144, heads=16, kv_heads=8, head_dim=128, eps=1e-6, rope_theta=1e6
    )
    pdl, pages, cut = overlaps(torch.device(DEVICE)), 128, Tile(8, 256, 8, 0)
    with torch.device(DEVICE), torch.inference_mode():
        torch.manual_seed(position)
        weights = torch.randn(4096, 2048).bfloat16() * 0.02
        layer = DecoderLayer(geometry).to(DEVICE, torch.bfloat16)
        layer.query_norm.fill_(1.0), layer.key_norm.fill_(1.0)
        caches = [torch.randn(pages, PAGE, 8, 256).bfloat16().transpose(1, 2) for _ in range(28)]
        table = torch.randperm(pages, dtype=torch.int32)[None]
        rotary = rotary_table(geometry, 2048).to(DEVICE, torch.bfloat16)
        attention, where = PagedAttention(geometry, rotary), torch.tensor([position])
        slot = table[0, position // PAGE].long()[None] * PAGE + position % PAGE
        x, found = torch.randn(1, 2048).bfloat16(), torch.zeros(28, 2048).bfloat16()

        def run(alone: bool) -> None:
            for index, cache in enumerate(caches):
                qkv = linear("qkv", x, Matrix(weights), cut=cut, pdl=pdl and not alone)
                attended = attention.attend(layer, qkv, cache, where, table, slot, pdl and not alone)
                found[index] = linear("output", attended, Matrix(weights[:2048]), residual=x, cut=cut, pdl=False)[0]

        run(alone=True)
        want, stored = found.clone(), [cache.clone() for cache in caches]
        for cache in caches:
            cache[slot // PAGE, :, slot % PAGE] = 0
        run(alone=False)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(alone=False)
        for _ in range(20):
            found.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, want)
        assert all(torch.equal(one, other) for one, other in zip(caches, stored, strict=True))
        qkv = linear("qkv", x, Matrix(weights), cut=cut, pdl=False).float()
        query, key, value = qkv.unflatten(-1, (-1, 128)).split([16, 8, 8], dim=1)
        turned = rotary[position : position + 1].float()
        query, key = (rotate(rms_norm(t, torch.ones(128), 1e-6), turned) for t in (query, key))
        past = caches[3].float()[table[0].long()].permute(1, 0, 2, 3).flatten(1, 2)[:, :position]
        keys = torch.cat([past[..., :128], key[0, :, None]], dim=1).repeat_interleave(2, 0)
        values = torch.cat([past[..., 128:], value[0, :, None]], dim=1).repeat_interleave(2, 0)
        out = F.scaled_dot_product_attention(query[0, :, None], keys, values).reshape(1, -1)
        plain = attention.attend(layer, qkv.bfloat16(), caches[3], where, table, slot, False).float()
        assert (plain - out).norm() / out.norm() < 0.01
