"""The step on CUDA: vLLM's fused norm, rotary and activation kernels, our own around sampling and in the predictor.

Everything is static and without a host read, so the whole step is captured as one graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
from vllm import _custom_ops as ops

from engine.talker import kernels
from engine.talker.layers import decoder_layers
from engine.talker.sampler import penalise, uniform
from engine.talker.slots import (
    MIN_FRAMES,
    PENALTY,
    SEED,
    SUB_TEMPERATURE,
    SUB_TOP_K,
    SUB_TOP_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from engine.talker.torch_step import TorchStep

if TYPE_CHECKING:
    from engine.talker.layers import DecoderLayer
    from engine.talker.model import TalkerModel
    from engine.talker.predictor import CodePredictor

# Warps of a program; tests/gpu/check_predictor.py measures them.
SAMPLE_WARPS, ATTEND_WARPS = 8, 1


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, eps)
    return out


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


def sample(
    logits: torch.Tensor,
    draws: torch.Tensor,
    reals: torch.Tensor,
    integers: torch.Tensor,
    columns: tuple[int, int, int],
    codes: torch.Tensor,
    following: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Launch kernels.sample.

    Args:
        logits: [R, V] contiguous, float32 or bfloat16. draws: [R] float32, any stride.
        reals, integers: the rows' settings; columns: which of them are temperature, top-p and top-k.
        codes: [R] int64, any stride: filled.
        following: next input table [V, W], norm weight [W] and eps: also return the looked-up rows, normed and raw.
        pdl: with programmatic dependent launch, see skinny.overlaps.
    """
    rows, size = logits.shape
    temperature, top_p, top_k = reals[:, columns[0]], reals[:, columns[1]], integers[:, columns[2]]
    width = following[0].shape[1] if following else 1
    table, norm, eps = following or (logits, logits, 0.0)
    normed, raw = table.new_empty(rows, width), table.new_empty(rows, width)
    kernels.sample[(rows,)](
        logits,
        draws,
        draws.stride(0),
        temperature,
        top_p,
        reals.stride(0),
        top_k,
        integers.stride(0),
        codes,
        codes.stride(0),
        table,
        norm,
        normed,
        raw,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        NEXT=following is not None,
        PDL=pdl,
        num_warps=SAMPLE_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return (normed, raw) if following else None


def attend(
    predictor: CodePredictor,
    layer: DecoderLayer,
    qkv: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    position: int,
    rows: int,
    per: int,
    pdl: bool = False,
) -> None:
    """Launch kernels.attend: one position of each row; rows of qkv and out lie `per` apart.

    Args:
        qkv: [.., qkv_width]; out: [.., heads * d], filled; cache: [2, R, kv_heads, G, d].
        pdl: with programmatic dependent launch, see skinny.overlaps.
    """
    g, groups = predictor.geometry.predictor, predictor.geometry.groups
    kernels.attend[(rows, g.kv_heads)](
        qkv,
        cache[0],
        cache[1],
        out,
        layer.query_norm,
        layer.key_norm,
        predictor.rotary,
        position,
        per * g.qkv_width,
        per * g.heads * g.head_dim,
        g.eps,
        g.head_dim**-0.5,
        HEADS=g.heads,
        KV_HEADS=g.kv_heads,
        DIM=g.head_dim,
        LENGTH=groups,
        BLOCK=triton.next_power_of_2(groups),
        PDL=pdl,
        num_warps=ATTEND_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )


class FusedStep(TorchStep):
    """As TorchStep, with fewer and larger kernels."""

    def __init__(self, model: TalkerModel) -> None:
        super().__init__(model)
        self.wide_rotary = self.rotary  # [positions, d], the layout vLLM's kernel reads
        g = model.geometry.talker
        # vLLM's q/k norm and rotary kernel is written for 16-bit types and these widths
        self.fused_rotary = model.head.dtype == torch.bfloat16 and g.head_dim in (64, 128, 256)

    def attended(self, index: int, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """From a layer's projection [N, qkv_width], which is normed and rotated in place, to its attention's output."""
        g, layer = self.model.geometry.talker, decoder_layers(self.model.layers)[index]
        ops.fused_qk_norm_rope(
            qkv,
            g.heads,
            g.kv_heads,
            g.kv_heads,
            g.head_dim,
            g.eps,
            layer.query_norm,
            layer.key_norm,
            self.wide_rotary,
            True,
            positions,
        )
        widths = [g.heads * g.head_dim, g.kv_heads * g.head_dim, g.kv_heads * g.head_dim]
        return self.model.attentions[index](*qkv.split(widths, dim=-1))

    def layers(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.fused_rotary:
            return super().layers(x, positions)
        g = self.model.geometry.talker
        stack = decoder_layers(self.model.layers)
        residual, x = x, norm_rows(x, stack[0].input_norm, g.eps)
        for index, layer in enumerate(stack):
            x = F.linear(self.attended(index, F.linear(x, layer.qkv), positions), layer.output)
            ops.fused_add_rms_norm(x, residual, layer.post_norm, g.eps)
            x = F.linear(_swiglu(F.linear(x, layer.gate_up)), layer.down)
            last = index + 1 == len(stack)
            ops.fused_add_rms_norm(x, residual, self.model.norm if last else stack[index + 1].input_norm, g.eps)
        return x

    def first_code(
        self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, integers: torch.Tensor, reals: torch.Tensor
    ) -> torch.Tensor:
        logits = F.linear(hidden, self.model.head).float()
        logits = penalise(logits, self.model.slots.seen_at[slot] < frame[:, None], reals[:, PENALTY])
        logits[:, self.model.geometry.eos].masked_fill_(frame < integers[:, MIN_FRAMES], float("-inf"))
        logits = logits.masked_fill(self.suppressed, float("-inf"))
        draws = uniform(integers[:, SEED], frame, torch.zeros_like(frame))
        codes = torch.empty_like(frame)
        sample(logits, draws, reals, integers, (TEMPERATURE, TOP_P, TOP_K), codes)
        return codes

    def predict(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        predictor, g = self.model.predictor, self.model.geometry.predictor
        rows, groups = hidden.shape[0], self.model.geometry.groups
        stack = decoder_layers(predictor.layers)
        draws = uniform(integers[:, SEED, None], frame[:, None], predictor.groups[None])
        codes = first.new_empty(rows, groups)
        codes[:, 0] = first
        cache = hidden.new_empty(len(stack), 2, rows, g.kv_heads, groups, g.head_dim)
        start = torch.stack([predictor.project(hidden), F.embedding(first, predictor.projected_first)], dim=1)
        residual = start.view(2 * rows, g.hidden)  # positions 0 and 1 of each row, side by side
        x, per, position = norm_rows(residual, stack[0].input_norm, g.eps), 2, 0
        for group in range(groups - 1):
            for index, layer in enumerate(stack):
                qkv = F.linear(x, layer.qkv)
                attended = hidden.new_empty(rows * per, g.heads * g.head_dim)
                for step in range(per):
                    attend(predictor, layer, qkv[step:], attended[step:], cache[index], position + step, rows, per)
                x = F.linear(attended, layer.output)
                ops.fused_add_rms_norm(x, residual, layer.post_norm, g.eps)
                x = F.linear(_swiglu(F.linear(x, layer.gate_up)), layer.down)
                last = index + 1 == len(stack)
                if last and per == 2:  # only the second position goes on to the head
                    x, residual = x.view(rows, 2, -1)[:, 1].contiguous(), residual.view(rows, 2, -1)[:, 1].contiguous()
                ops.fused_add_rms_norm(x, residual, predictor.norm if last else stack[index + 1].input_norm, g.eps)
            position, per = position + per, 1
            following = (predictor.projected[group], stack[0].input_norm, g.eps) if group + 2 < groups else None
            columns = (SUB_TEMPERATURE, SUB_TOP_P, SUB_TOP_K)
            logits = F.linear(x, predictor.heads[group])
            found = sample(logits, draws[:, group], reals, integers, columns, codes[:, group + 1], following)
            if found is not None:
                x, residual = found
        return codes
