"""The decoder's transformer: causal attention over a sliding window of frames, rotary positions.

Attribute names are the checkpoint's (`decoder.pre_transformer.*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.codec.streaming import StateWalk


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerScale(nn.Module):
    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Attention(nn.Module):
    qkv_weight: Tensor | None
    qkv_bias: Tensor | None

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=bias)
        self.register_buffer("qkv_weight", None, persistent=False)
        self.register_buffer("qkv_bias", None, persistent=False)

    def fold(self) -> None:
        """The three projections of the input as one."""
        parts: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        self.qkv_weight = torch.cat([p.weight.detach() for p in parts])
        self.qkv_bias = torch.cat([p.bias.detach() for p in parts]) if parts[0].bias is not None else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, walk: StateWalk | None) -> Tensor:
        batch, frames, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, frames, self.heads, self.head_dim).transpose(1, 2), *rotation)
        k = rotate(self.k_proj(x).view(batch, frames, self.kv_heads, self.head_dim).transpose(1, 2), *rotation)
        v = self.v_proj(x).view(batch, frames, self.kv_heads, self.head_dim).transpose(1, 2)
        if walk:
            k, v = walk.extend_cache(k, v)
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, frames, -1))


class MLP(nn.Module):
    gate_up_weight: Tensor | None

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.register_buffer("gate_up_weight", None, persistent=False)

    def fold(self) -> None:
        """Gate and values in one product."""
        self.gate_up_weight = torch.cat([self.gate_proj.weight.detach(), self.up_proj.weight.detach()])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width = config["hidden_size"]
        heads = config["num_attention_heads"]
        self.self_attn = Attention(
            width, heads, config["num_key_value_heads"], head_dim_of(config), config["attention_bias"]
        )
        self.mlp = MLP(width, config["intermediate_size"])
        self.input_layernorm = RMSNorm(width, config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(width, config["rms_norm_eps"])
        self.self_attn_layer_scale = LayerScale(width, config["layer_scale_initial_scale"])
        self.mlp_layer_scale = LayerScale(width, config["layer_scale_initial_scale"])

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, walk: StateWalk | None) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotation, mask, walk))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class SlidingTransformer(nn.Module):
    """[B, T, latent_dim] -> [B, T, latent_dim]; frame t attends to frames t - window + 1 .. t."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.window = int(config["sliding_window"])
        self.layers = nn.ModuleList([Layer(config) for _ in range(config["num_hidden_layers"])])
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.input_proj = nn.Linear(config["latent_dim"], config["hidden_size"])
        self.output_proj = nn.Linear(config["hidden_size"], config["latent_dim"])
        self.head_dim = head_dim_of(config)
        self.theta = float(config["rope_theta"])

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        frames, device = x.shape[1], x.device
        past = walk.past if walk else 0
        query = torch.arange(frames, device=device)[:, None] + past
        key = torch.arange(past + frames, device=device)[None]
        mask = (key <= query) & (key > query - self.window)  # [T, past + T]
        position = torch.arange(frames, device=device)[None]
        if walk:
            position = position + walk.position[:, None]
            begun = key >= past - walk.position[:, None]  # a young stream has fewer than `past` frames behind it
            mask = mask[None] & begun[:, None]
            mask = mask[:, None]  # [B, 1, T, past + T]
        rotation = rotary(position, self.head_dim, self.theta, x.dtype)
        h = self.input_proj(x)
        for layer in self.layers:
            h = layer(h, rotation, mask, walk)
        return self.output_proj(self.norm(h))


def rotary(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [*, 1, T, head_dim] for integer positions [*, T]; angles in float32 as in the reference."""
    exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim
    angle = position[..., None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention: x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
