"""The CUDA kernels against the plain torch step. Runs where Triton is: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.talker import kernels
from engine.talker.geometry import StackGeometry
from engine.talker.layers import DecoderLayer, rotary_table
from engine.talker.sampler import sample, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2048, 1000])
def test_sample(dtype, size):
    generator = torch.Generator().manual_seed(1)
    rows = 24
    logits = (torch.randn(rows, size, generator=generator) * 3).to(DEVICE, dtype)
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows, 1), generator=generator).to(DEVICE)
    frames = torch.randint(0, 900, (rows,), generator=generator).to(DEVICE)
    temperature = torch.tensor([0.0, 0.9, 1.5, 0.7] * 6, device=DEVICE)
    top_k = torch.tensor([50, 50, size, 1, 1 << 30, 7] * 4, device=DEVICE)
    top_p = torch.tensor([1.0, 0.8, 1.0, 0.3, 1.0, 0.95, 0.01, 1.0] * 3, device=DEVICE)
    table, norm = torch.randn(size, 96, generator=generator).to(DEVICE, dtype), torch.rand(96).to(DEVICE, dtype)
    codes = torch.zeros(rows, 4, dtype=torch.int64, device=DEVICE)
    normed, raw = table.new_empty(rows, 96), table.new_empty(rows, 96)
    kernels.sample[(rows,)](
        logits, seeds, frames, 3, temperature, top_p, 1, top_k, 1, codes[:, 2], 4, table, norm, normed, raw, 1e-6,
        SIZE=size, BLOCK=2048, BITS=16 if dtype == torch.bfloat16 else 32, WIDTH=96, WIDTH_BLOCK=128, NEXT=True,
    )  # fmt: skip
    expected = sample(
        logits.float(), uniform(seeds[:, 0], frames, torch.full_like(frames, 3)), temperature, top_k, top_p
    )
    assert (codes[:, 2] != expected).sum() <= 1  # a draw within rounding of a border
    assert codes[:, [0, 1, 3]].eq(0).all()
    found = table[codes[:, 2]]
    assert torch.equal(raw, found)
    wide = found.float()
    reference = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * norm
    torch.testing.assert_close(normed, reference)


def test_attend():
    g = StackGeometry(64, 128, 1, 4, 2, 32, 1e-6, 1e6)
    rows, groups = 3, 6
    torch.manual_seed(0)
    layer = DecoderLayer(g).to(DEVICE)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3)
    table = rotary_table(g, groups).to(DEVICE)
    x = torch.randn(rows, groups, g.hidden, device=DEVICE)
    normed_x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + g.eps) * layer.input_norm
    qkv = torch.nn.functional.linear(normed_x, layer.qkv)
    cache = torch.full((2, rows, g.kv_heads, groups, g.head_dim), float("nan"), device=DEVICE)
    out = torch.empty(rows, groups, g.heads * g.head_dim, device=DEVICE)
    for position in range(groups):
        kernels.attend[(rows, g.kv_heads)](
            qkv[:, position], cache[0], cache[1], out[:, position], layer.query_norm, layer.key_norm, table, position,
            groups * g.qkv_width, groups * g.heads * g.head_dim, g.eps, g.head_dim**-0.5,
            HEADS=g.heads, KV_HEADS=g.kv_heads, DIM=g.head_dim, LENGTH=groups, BLOCK=8,
        )  # fmt: skip
    query, key, value = layer.before_attention(x, table)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(-2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache[1], value.transpose(1, 2))
