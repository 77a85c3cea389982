"""The decoder's transformer for serving on CUDA: the same layers in a quarter of the kernels.

A chunk has so few frames that plain torch spends its time on launches. The projections of one input are one product,
norms are torch's fused ones, and attention is two kernels (`kernels_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.codec.kernels_attention import sliding_attention
from engine.codec.streaming import StateWalk
from engine.codec.transformer import SlidingTransformer


class CompactTransformer:
    """Stands for a frozen `SlidingTransformer`: [B, T, latent] -> [B, T, latent]."""

    def __init__(self, transformer: SlidingTransformer) -> None:
        self._transformer = transformer
        for layer in transformer.layers:
            layer.self_attn.fold()  # type: ignore[union-attr,operator]
            layer.mlp.fold()  # type: ignore[union-attr,operator]
        device, dim = transformer.input_proj.weight.device, transformer.head_dim
        exponent = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        self._inverse = 1.0 / transformer.theta**exponent  # as `transformer.rotary`

    def __call__(self, x: Tensor, walk: StateWalk | None) -> Tensor:
        h = self._transformer.input_proj(x)
        for layer in self._transformer.layers:
            h = self._layer(layer, h, walk)
        return self._transformer.output_proj(_norm(self._transformer.norm, h))

    def _layer(self, layer: Any, x: Tensor, walk: StateWalk | None) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = F.linear(_norm(layer.input_layernorm, x), attention.qkv_weight, attention.qkv_bias)
        heads, keys, values = sliding_attention(
            qkv.contiguous(),
            walk.next_cache() if walk else None,
            walk.position if walk else None,
            self._inverse,
            attention.heads,
            attention.kv_heads,
            self._transformer.window,
        )
        if walk:
            walk.keep_cache(keys, values)
        x = torch.addcmul(x, layer.self_attn_layer_scale.scale, attention.o_proj(heads))
        gate, up = F.linear(_norm(layer.post_attention_layernorm, x), mlp.gate_up_weight).chunk(2, dim=-1)
        return torch.addcmul(x, layer.mlp_layer_scale.scale, mlp.down_proj(F.silu(gate) * up))


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
