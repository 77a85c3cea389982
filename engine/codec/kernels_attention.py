"""The decoder's sliding-window attention as two Triton kernels. CUDA only.

A step has a few new frames per stream against a window of 72: libraries spend it on launches, masks and copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_and_append(
    qkv,  # [B, T, (heads + 2 * kv_heads) * D]
    old_keys,  # [B, kv_heads, P, D]
    old_values,  # [B, kv_heads, P, D]
    position,  # int64 [B], of the first new frame
    inverse,  # float32 [D / 2], radians per frame
    queries,  # [B, T, heads, D] out
    keys,  # [B, kv_heads, P + T, D] out
    values,  # [B, kv_heads, P + T, D] out
    past,
    frames,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= heads * D
    KV_WIDTH: tl.constexpr,
):
    """One frame of one stream, old or new, per program. Grid (P + T, B)."""
    at = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    frame = at - past
    is_new = frame >= 0
    lane = tl.arange(0, KV_WIDTH)
    head = lane // DIM
    dim = lane % DIM
    real = lane < KV_HEADS * DIM
    row = qkv + (batch * frames + frame) * ((HEADS + 2 * KV_HEADS) * DIM)
    start = frame.to(tl.float32)
    if HAS_POSITION:
        start = (tl.load(position + batch) + frame).to(tl.float32)

    # halves convention: dimension d turns with d + D / 2
    angle = start * tl.load(inverse + dim % (DIM // 2))
    partner = head * DIM + (dim + DIM // 2) % DIM
    sign = tl.where(dim < DIM // 2, -1.0, 1.0)
    new = real & is_new
    key = tl.load(row + HEADS * DIM + lane, mask=new, other=0.0).to(tl.float32) * tl.cos(angle)
    key += tl.load(row + HEADS * DIM + partner, mask=new, other=0.0).to(tl.float32) * sign * tl.sin(angle)
    value = tl.load(row + (HEADS + KV_HEADS) * DIM + lane, mask=new, other=0.0).to(tl.float32)
    source = ((batch * KV_HEADS + head) * past + at) * DIM + dim
    old = real & (at < past)
    key += tl.load(old_keys + source, mask=old, other=0.0).to(tl.float32)
    value += tl.load(old_values + source, mask=old, other=0.0).to(tl.float32)
    target = ((batch * KV_HEADS + head) * (past + frames) + at) * DIM + dim
    tl.store(keys + target, key, mask=real)
    tl.store(values + target, value, mask=real)

    lane = tl.arange(0, WIDTH)
    head = lane // DIM
    dim = lane % DIM
    new = (lane < HEADS * DIM) & is_new
    angle = start * tl.load(inverse + dim % (DIM // 2))
    partner = head * DIM + (dim + DIM // 2) % DIM
    sign = tl.where(dim < DIM // 2, -1.0, 1.0)
    query = tl.load(row + lane, mask=new, other=0.0).to(tl.float32) * tl.cos(angle)
    query += tl.load(row + partner, mask=new, other=0.0).to(tl.float32) * sign * tl.sin(angle)
    tl.store(queries + (batch * frames + frame) * (HEADS * DIM) + lane, query, mask=new)


@triton.jit
def _attend(
    queries,  # [B, T, heads, D]
    keys,  # [B, kv_heads, P + T, D]
    values,  # [B, kv_heads, P + T, D]
    position,  # int64 [B]
    out,  # [B, T, heads, D] out
    past,
    frames,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= WINDOW
    COLUMNS: tl.constexpr,  # power of two >= D
):
    """One query per program. Grid (T, heads, B)."""
    frame = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, COLUMNS)
    inside = dim < DIM
    number = tl.arange(0, ROWS)
    at = past + frame - (WINDOW - 1) + number
    seen = (number < WINDOW) & (at >= 0)
    if HAS_POSITION:
        # a young stream has fewer than `past` frames behind it
        seen = seen & (at >= past - tl.load(position + batch))
    one = ((batch * frames + frame) * HEADS + head) * DIM + dim
    query = tl.load(queries + one, mask=inside, other=0.0).to(tl.float32)
    group = batch * KV_HEADS + head // (HEADS // KV_HEADS)
    place = (group * (past + frames) + at)[:, None] * DIM + dim[None, :]
    mask = seen[:, None] & inside[None, :]
    key = tl.load(keys + place, mask=mask, other=0.0).to(tl.float32)
    score = tl.sum(key * query[None, :], axis=1) * scale
    score = tl.where(seen, score, -1.0e30)
    weight = tl.where(seen, tl.exp(score - tl.max(score, axis=0)), 0.0)
    # nothing seen (a window's missing frames): zeros
    weight = weight / tl.maximum(tl.sum(weight, axis=0), 1.0e-30)
    value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + one, tl.sum(value * weight[:, None], axis=0), mask=inside)


def sliding_attention(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    position: Tensor | None,
    inverse: Tensor,
    heads: int,
    kv_heads: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions, the cache joined with the new keys and values, attention over the last `window` frames.

    Args:
        qkv: [B, T, (heads + 2 * kv_heads) * D], contiguous.
        cache: rotated keys and values of earlier frames, each [B, kv_heads, P, D]; None: there are none.
        position: int64 [B], of the first new frame; frames before position 0 are not seen. None: 0.
        inverse: float32 [D / 2], radians per frame.

    Returns:
        [B, T, heads * D], and keys and values [B, kv_heads, P + T, D].
    """
    batch, frames, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    assert qkv.is_contiguous()
    old_keys, old_values = (t.contiguous() for t in cache) if cache else (qkv, qkv)
    past = old_keys.shape[2] if cache else 0
    queries = torch.empty((batch, frames, heads * dim), dtype=qkv.dtype, device=qkv.device)
    keys = torch.empty((batch, kv_heads, past + frames, dim), dtype=qkv.dtype, device=qkv.device)
    values = torch.empty_like(keys)
    out = torch.empty_like(queries)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "HAS_POSITION": position is not None}
    where = inverse if position is None else position
    _rotate_and_append[(past + frames, batch)](
        qkv,
        old_keys,
        old_values,
        where,
        inverse,
        queries,
        keys,
        values,
        past,
        frames,
        WIDTH=triton.next_power_of_2(heads * dim),
        KV_WIDTH=triton.next_power_of_2(kv_heads * dim),
        **shape,
    )
    _attend[(frames, heads, batch)](
        queries,
        keys,
        values,
        where,
        out,
        past,
        frames,
        dim**-0.5,
        WINDOW=window,
        ROWS=triton.next_power_of_2(window),
        COLUMNS=triton.next_power_of_2(dim),
        **shape,
    )
    return out, keys, values
