"""A Qwen3-style decoder layer, split where attention sits, and the plain torch operations it is made of.

Talker and code predictor share the layer: RMSNorm, fused q/k/v projection, q/k norm per head, rotary embedding,
grouped-query attention, output projection, RMSNorm, SwiGLU.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from engine.talker.geometry import StackGeometry


def parameter(*shape: int) -> nn.Parameter:
    """An empty weight of the default dtype and device; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32, returned in x's dtype."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_table(geometry: StackGeometry, positions: int) -> torch.Tensor:
    """[positions, head_dim] float32: cosines of the head_dim / 2 frequencies, then sines."""
    half = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32, device="cpu") / geometry.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device="cpu"), 1.0 / geometry.rope_theta**half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired as in the reference. x: [..., heads, head_dim], table: [..., head_dim]."""
    cos, sin = table.unsqueeze(-2).to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DecoderLayer(nn.Module):
    """Weights of one layer. H hidden, I intermediate, d head_dim.

    qkv [(heads + 2 * kv_heads) * d, H], output [H, heads * d], gate_up [2 * I, H], down [H, I].
    """

    def __init__(self, geometry: StackGeometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.input_norm, self.post_norm = parameter(g.hidden), parameter(g.hidden)
        self.query_norm, self.key_norm = parameter(g.head_dim), parameter(g.head_dim)
        self.qkv, self.output = parameter(g.qkv_width, g.hidden), parameter(g.hidden, g.heads * g.head_dim)
        self.gate_up, self.down = parameter(2 * g.intermediate, g.hidden), parameter(g.hidden, g.intermediate)

    def before_attention(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [..., H] and its rotary rows [..., d] to q [..., heads, d], k and v [..., kv_heads, d]."""
        g = self.geometry
        qkv = F.linear(rms_norm(x, self.input_norm, g.eps), self.qkv).unflatten(-1, (-1, g.head_dim))
        query, key, value = qkv.split([g.heads, g.kv_heads, g.kv_heads], dim=-2)
        query, key = rms_norm(query, self.query_norm, g.eps), rms_norm(key, self.key_norm, g.eps)
        return rotate(query, table), rotate(key, table), value

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [..., H] and the attention's output [..., heads * d] to the layer's output [..., H]."""
        x = x + F.linear(attended, self.output)
        gate, up = F.linear(rms_norm(x, self.post_norm, self.geometry.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def decoder_layers(modules: nn.ModuleList) -> list[DecoderLayer]:
    """The same modules with the type that nn.ModuleList forgets."""
    return cast(list[DecoderLayer], list(modules))
