"""The step on CUDA: vLLM's fused norm, rotary and activation kernels, our own around sampling and in the predictor.

Everything is static and without a host read, so the whole step is captured as one graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops

from engine.talker import launches
from engine.talker.launches import attend, sample
from engine.talker.layers import decoder_layers
from engine.talker.slots import SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P
from engine.talker.torch_step import TorchStep

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, eps)
    return out


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


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

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return launches.input_rows(self.model.slots, self.model.predictor, ids, positions)

    def speak(self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        model, slots = self.model, self.model.slots
        slot, frame, integers, reals = launches.settle(slots, slot, frame, valid)
        logits, eos = F.linear(hidden, model.head), model.geometry.eos
        first = launches.first_code(logits, slots, self.suppressed, slot, frame, integers, reals, eos)
        codes = self.predict(hidden, first, integers, reals, frame)
        return launches.store_frame(codes, slots, self.report, slot, frame, valid, integers, eos, model.end_token)

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
            found = sample(logits, integers, reals, frame, group + 1, columns, codes[:, group + 1], following)
            if found is not None:
                x, residual = found
        return codes
