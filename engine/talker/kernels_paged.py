"""A Triton kernel for the attention of one row over vLLM's paged cache, with all that surrounds it: q/k norm, rotary
embedding, the cache write, and the merge where several programs share a head's keys.

What is in the cache was written in earlier steps: with PDL (kernels_skinny.py) the first keys and values are read while
the projection before it still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heads_of(source, norm, cos, sin, eps, COUNT: tl.constexpr, DIM: tl.constexpr):
    """COUNT heads of DIM next to each other, after RMSNorm and rotary embedding, rounded as they would be stored: the
    first halves and the second, float32 [COUNT, DIM / 2]."""
    HALF: tl.constexpr = DIM // 2
    dtype: tl.constexpr = source.dtype.element_ty
    lane = tl.arange(0, HALF)
    place = tl.arange(0, COUNT)[:, None] * DIM + lane[None, :]
    first, second = tl.load(source + place).to(tl.float32), tl.load(source + place + HALF).to(tl.float32)
    inverse = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
    first = first * inverse * tl.load(norm + lane).to(tl.float32)[None, :]
    second = second * inverse * tl.load(norm + HALF + lane).to(tl.float32)[None, :]
    turned = (first * cos - second * sin).to(dtype).to(tl.float32)
    return turned, (second * cos + first * sin).to(dtype).to(tl.float32)


@triton.jit
def cached(
    head, table, at, stop, block_stride, token_stride, BLOCK: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr
):
    """Keys and values of BLOCK positions from `at` on, zeros from `stop` on: halves [BLOCK, DIM / 2], keys first."""
    HALF: tl.constexpr = DIM // 2
    time, lane = at + tl.arange(0, BLOCK), tl.arange(0, HALF)
    page = tl.load(table + time // PAGE, mask=time < stop, other=0).to(tl.int64)
    place = (page * block_stride + (time % PAGE) * token_stride)[:, None] + lane[None, :]
    mask = (time < stop)[:, None] & (lane < HALF)[None, :]
    key_first = tl.load(head + place, mask=mask, other=0.0)
    key_second = tl.load(head + place + HALF, mask=mask, other=0.0)
    value_first = tl.load(head + place + DIM, mask=mask, other=0.0)
    return key_first, key_second, value_first, tl.load(head + place + DIM + HALF, mask=mask, other=0.0)


@triton.jit
def fold(state, query, block, valid, scale):
    """The attention of [E] queries so far (largest score, sum of weights, both halves of the weighted values) with a
    block of keys and values more."""
    most, total, first, second = state
    q_first, q_second = query
    key_first, key_second, value_first, value_second = block
    scores = tl.sum(key_first.to(tl.float32)[None] * q_first[:, None], 2)
    scores = (scores + tl.sum(key_second.to(tl.float32)[None] * q_second[:, None], 2)) * scale  # [E, BLOCK]
    scores = tl.where(valid[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    kept, weights = tl.exp(most - higher), tl.exp(scores - higher[:, None])
    total = total * kept + tl.sum(weights, 1)
    first = first * kept[:, None] + tl.sum(weights[:, :, None] * value_first.to(tl.float32)[None], 1)
    second = second * kept[:, None] + tl.sum(weights[:, :, None] * value_second.to(tl.float32)[None], 1)
    return higher, total, first, second


@triton.jit
def merge(partial, parts, out, EACH: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr):
    """`parts` results of `fold`, as `attend` stores them, to EACH heads of `out`."""
    HALF: tl.constexpr = DIM // 2
    index, query, lane = tl.arange(0, PARTS), tl.arange(0, EACH), tl.arange(0, HALF)
    row = partial + (index[:, None] * EACH + query[None, :]) * (DIM + 2)
    inside = (index < parts)[:, None] & (query < EACH)[None, :]
    most = tl.load(row + DIM, mask=inside, other=float("-inf"))
    weight = tl.exp(most - tl.max(most, 0)[None, :])
    total = tl.sum(weight * tl.load(row + DIM + 1, mask=inside, other=0.0), 0)[:, None]
    place, mask = row[:, :, None] + lane[None, None, :], inside[:, :, None] & (lane < HALF)[None, None, :]
    first = tl.sum(weight[:, :, None] * tl.load(place, mask=mask, other=0.0), 0) / total
    second = tl.sum(weight[:, :, None] * tl.load(place + HALF, mask=mask, other=0.0), 0) / total
    target = out + query[:, None] * DIM + lane[None, :]
    tl.store(target, first.to(out.dtype.element_ty))
    tl.store(target + HALF, second.to(out.dtype.element_ty))


@triton.jit
def attend(
    qkv,  # [(HEADS + 2 * KV_HEADS) * DIM], the projection of the new position
    cache,  # of this layer: a token's key and value of a head next to each other, 2 * DIM
    table,  # int32, the pages of the request, PAGE positions each
    slots,  # int64 [1], where in the cache the new position goes; below 0: nowhere
    positions,  # int64 [1]
    out,  # [HEADS * DIM]
    partial,  # float32 [KV_HEADS, PARTS, HEADS / KV_HEADS, DIM + 2]
    counters,  # int32 [KV_HEADS], zeros before and after
    query_norm,  # [DIM]
    key_norm,
    rotary,  # [positions, DIM]: cosines, then sines
    block_stride,
    head_stride,
    token_stride,
    eps,
    scale,
    EACH: tl.constexpr,  # HEADS / KV_HEADS, a power of two like DIM
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys that a program reads at a time
    PARTS: tl.constexpr,  # programs that may share a head's keys
    PDL: tl.constexpr,
):
    """Up to 2 * BLOCK past keys of a head are one program's, more are shared out. Grid (KV_HEADS, PARTS)."""
    HALF: tl.constexpr = DIM // 2
    head, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions)
    share = tl.maximum(tl.cdiv(tl.cdiv(position, PARTS), BLOCK), 2) * BLOCK
    parts = tl.maximum(tl.cdiv(position, share), 1)
    start = part * share
    stop = tl.minimum(start + share, position)
    keys = cache + head * head_stride
    block = cached(keys, table, start, stop, block_stride, token_stride, BLOCK, PAGE, DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if part < parts:
        dtype: tl.constexpr = qkv.dtype.element_ty
        lane = tl.arange(0, HALF)
        cos = tl.load(rotary + position * DIM + lane).to(tl.float32)[None, :]
        sin = tl.load(rotary + position * DIM + HALF + lane).to(tl.float32)[None, :]
        query = heads_of(qkv + head * EACH * DIM, query_norm, cos, sin, eps, EACH, DIM)
        key_first, key_second = heads_of(qkv + (KV_HEADS * EACH + head) * DIM, key_norm, cos, sin, eps, 1, DIM)
        source = qkv + (KV_HEADS * (EACH + 1) + head) * DIM + lane[None, :]
        value_first, value_second = tl.load(source), tl.load(source + HALF)
        mine = part == parts - 1  # the new position follows this program's
        slot = tl.load(slots)
        if mine & (slot >= 0):
            target = keys + (slot // PAGE) * block_stride + (slot % PAGE) * token_stride + lane[None, :]
            tl.store(target, key_first.to(dtype))
            tl.store(target + HALF, key_second.to(dtype))
            tl.store(target + DIM, value_first)
            tl.store(target + DIM + HALF, value_second)

        # it comes from registers: what was just stored may not be visible to loads
        own = (tl.sum(query[0] * key_first, 1) + tl.sum(query[1] * key_second, 1)) * scale
        total = tl.where(mine, own * 0.0 + 1.0, 0.0)
        weighted = total[:, None] * value_first.to(tl.float32), total[:, None] * value_second.to(tl.float32)
        state = tl.where(mine, own, float("-inf")), total, weighted[0], weighted[1]
        time = tl.arange(0, BLOCK)
        state = fold(state, query, block, start + time < stop, scale)
        for at in range(start + BLOCK, stop, BLOCK):
            block = cached(keys, table, at, stop, block_stride, token_stride, BLOCK, PAGE, DIM)
            state = fold(state, query, block, at + time < stop, scale)

        most, total, first, second = state
        each = tl.arange(0, EACH)
        results = out + head * EACH * DIM
        if parts == 1:
            target = results + each[:, None] * DIM + lane[None, :]
            tl.store(target, (first / total[:, None]).to(dtype))
            tl.store(target + HALF, (second / total[:, None]).to(dtype))
        else:
            shared = partial + head * PARTS * EACH * (DIM + 2)
            row = shared + (part * EACH + each) * (DIM + 2)
            tl.store(row[:, None] + lane[None, :], first)
            tl.store(row[:, None] + HALF + lane[None, :], second)
            tl.store(row + DIM, most)
            tl.store(row + DIM + 1, total)
            tl.debug_barrier()  # every thread's part is stored before one of them says so
            if tl.atomic_add(counters + head, 1) == parts - 1:
                tl.store(counters + head, 0)
                merge(shared, parts, results, EACH, PARTS, DIM)
