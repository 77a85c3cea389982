"""Launches of the talker's own CUDA kernels (kernels.py, kernels_step.py): tensors in; grids and constants follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from engine.talker import kernels, kernels_step
from engine.talker.slots import SEED

if TYPE_CHECKING:
    from engine.talker.layers import DecoderLayer
    from engine.talker.predictor import CodePredictor
    from engine.talker.slots import SlotBuffers

# Warps of a program; tests/gpu/check_predictor.py measures them.
SAMPLE_WARPS, ATTEND_WARPS = 8, 1


def sample(
    logits: torch.Tensor,
    integers: torch.Tensor,
    reals: torch.Tensor,
    frame: torch.Tensor,
    group: int,
    columns: tuple[int, int, int],
    codes: torch.Tensor,
    following: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Launch kernels.sample.

    Args:
        logits: [R, V] contiguous, float32 or bfloat16.
        integers, reals: the rows' settings; columns: which of them are temperature, top-p and top-k.
        frame: [R] int64 contiguous, and the code group: what is drawn with, besides the seed.
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
        integers[:, SEED],
        frame,
        group,
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


def input_rows(
    slots: SlotBuffers, predictor: CodePredictor, ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As TorchStep.inputs."""
    count, (_, rows, width), groups = ids.shape[0], slots.rows.shape, slots.codes.shape[2]
    x, slot = slots.rows.new_empty(count, width), slots.codes.new_empty(count)
    frame = torch.empty_like(slot)
    block = min(512, triton.next_power_of_2(width))
    kernels_step.input_rows[(count, triton.cdiv(width, block))](
        ids,
        positions,
        slots.integers,
        slots.rows,
        slots.codes,
        predictor.first_embedding,
        predictor.embeddings,
        x,
        slot,
        frame,
        slots.slots,
        INTEGERS=slots.integers.shape[1],
        ROWS=rows,
        FRAMES=slots.max_frames,
        GROUPS=groups,
        VOCAB=predictor.embeddings.shape[1],
        WIDTH=width,
        BLOCK=block,
    )
    return x, slot, frame


def settle(
    slots: SlotBuffers, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slot and frame [R] with rows that are not valid moved to the trash slot, and the rows' integers and reals."""
    count = slot.shape[0]
    out = torch.empty_like(slot), torch.empty_like(frame)
    settings = (
        slots.integers.new_empty(count, slots.integers.shape[1]),
        slots.reals.new_empty(count, slots.reals.shape[1]),
    )
    kernels_step.settle[(count,)](
        slot,
        frame,
        valid,
        slots.integers,
        slots.reals,
        *out,
        *settings,
        INTEGERS=slots.integers.shape[1],
        REALS=slots.reals.shape[1],
        FRAMES=slots.max_frames,
        num_warps=1,
    )
    return (*out, *settings)


def first_code(
    logits: torch.Tensor,
    slots: SlotBuffers,
    suppressed: torch.Tensor,
    slot: torch.Tensor,
    frame: torch.Tensor,
    integers: torch.Tensor,
    reals: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    """[R] int64 code 0 of logits [R, V] and of what `settle` returned; suppressed: [V] bool."""
    rows, size = logits.shape
    codes = torch.empty_like(slot)
    kernels_step.first_code[(rows,)](
        logits,
        slots.seen_at,
        suppressed,
        slot,
        frame,
        integers,
        reals,
        codes,
        eos,
        INTEGERS=integers.shape[1],
        REALS=reals.shape[1],
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=SAMPLE_WARPS,
    )
    return codes


def store_frame(
    made: torch.Tensor,
    slots: SlotBuffers,
    report: torch.Tensor,
    slot: torch.Tensor,
    frame: torch.Tensor,
    valid: torch.Tensor,
    integers: torch.Tensor,
    eos: int,
    end_token: int,
) -> torch.Tensor:
    """Store codes `made` [R, G] in the slots and in the report [max_rows, 2 + G]; returns vLLM's tokens [R] int64."""
    rows, groups = made.shape
    tokens = torch.empty_like(slot)
    kernels_step.store_frame[(report.shape[0],)](
        made,
        slot,
        frame,
        valid,
        integers,
        slots.codes,
        slots.seen_at,
        report,
        tokens,
        rows,
        eos,
        end_token,
        INTEGERS=integers.shape[1],
        FRAMES=slots.max_frames,
        GROUPS=groups,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        SIZE=slots.seen_at.shape[1],
        num_warps=1,
    )
    return tokens
