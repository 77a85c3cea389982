"""Triton kernels of the code predictor on CUDA. One row of a batch is one program (one program per head group in
`attend`), so a row's result does not depend on the others.

The predictor's matrices are small; what costs time is the number of kernels. `attend` replaces q/k norm, rotary
embedding, cache write and attention; `sample` replaces the warpers, the draw, the lookup of the next input row and its
first norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.talker import sampler

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(value) for value in (sampler.GOLDEN, sampler.MIX_1, sampler.MIX_2))


@triton.jit(do_not_specialize=["position"])
def attend(
    qkv,  # [rows, (HEADS + 2 * KV_HEADS) * DIM], this step's projections; row_stride apart
    keys,  # [rows, KV_HEADS, LENGTH, DIM] cache of this layer
    values,
    out,  # [rows, HEADS * DIM], out_stride apart
    query_norm,  # [DIM]
    key_norm,
    rotary,  # [positions, DIM]: cosines, then sines
    position,
    row_stride,
    out_stride,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least LENGTH
    PDL: tl.constexpr = False,  # programmatic dependent launch, see kernels_skinny.py
):
    """One new position per row. Grid (rows, KV_HEADS)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, HALF)
    base = qkv + row * row_stride
    cos = tl.load(rotary + position * DIM + lane).to(tl.float32)
    sin = tl.load(rotary + position * DIM + HALF + lane).to(tl.float32)

    source = base + (HEADS + head) * DIM
    first, second = tl.load(source + lane).to(tl.float32), tl.load(source + HALF + lane).to(tl.float32)
    inverse = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + eps)
    first = first * inverse * tl.load(key_norm + lane).to(tl.float32)
    second = second * inverse * tl.load(key_norm + HALF + lane).to(tl.float32)
    key_first = (first * cos - second * sin).to(keys.dtype.element_ty)
    key_second = (second * cos + first * sin).to(keys.dtype.element_ty)
    source = base + (HEADS + KV_HEADS + head) * DIM
    value_first, value_second = tl.load(source + lane), tl.load(source + HALF + lane)
    cached_keys = keys + (row * KV_HEADS + head) * LENGTH * DIM
    cached_values = values + (row * KV_HEADS + head) * LENGTH * DIM
    tl.store(cached_keys + position * DIM + lane, key_first)
    tl.store(cached_keys + position * DIM + HALF + lane, key_second)
    tl.store(cached_values + position * DIM + lane, value_first)
    tl.store(cached_values + position * DIM + HALF + lane, value_second)

    # The new position comes from registers: what was just stored may not be visible to the loads below.
    time = tl.arange(0, BLOCK)
    past, now = time[:, None] < position, time[:, None] == position
    offset = time[:, None] * DIM + lane[None, :]
    k_first = tl.load(cached_keys + offset, mask=past, other=0.0).to(tl.float32)
    k_second = tl.load(cached_keys + offset + HALF, mask=past, other=0.0).to(tl.float32)
    v_first = tl.load(cached_values + offset, mask=past, other=0.0).to(tl.float32)
    v_second = tl.load(cached_values + offset + HALF, mask=past, other=0.0).to(tl.float32)
    k_first = tl.where(now, key_first[None, :].to(tl.float32), k_first)
    k_second = tl.where(now, key_second[None, :].to(tl.float32), k_second)
    v_first = tl.where(now, value_first[None, :].to(tl.float32), v_first)
    v_second = tl.where(now, value_second[None, :].to(tl.float32), v_second)

    norm_first = tl.load(query_norm + lane).to(tl.float32)
    norm_second = tl.load(query_norm + HALF + lane).to(tl.float32)
    for index in tl.static_range(HEADS // KV_HEADS):
        query_head = head * (HEADS // KV_HEADS) + index
        source = base + query_head * DIM
        first, second = tl.load(source + lane).to(tl.float32), tl.load(source + HALF + lane).to(tl.float32)
        inverse = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + eps)
        first, second = first * inverse * norm_first, second * inverse * norm_second
        q_first, q_second = first * cos - second * sin, second * cos + first * sin
        scores = (tl.sum(k_first * q_first[None, :], 1) + tl.sum(k_second * q_second[None, :], 1)) * scale
        scores = tl.where(time <= position, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 0))
        weights = weights / tl.sum(weights, 0)
        target = out + row * out_stride + query_head * DIM
        tl.store(target + lane, tl.sum(weights[:, None] * v_first, 0).to(out.dtype.element_ty))
        tl.store(target + HALF + lane, tl.sum(weights[:, None] * v_second, 0).to(out.dtype.element_ty))


@triton.jit
def uniform(seed, frame, group):
    """As sampler.uniform, of int64 scalars."""
    hashed = mix(mix(seed * GOLDEN + frame) + group * GOLDEN)
    return (((hashed >> 40) & 0xFFFFFF).to(tl.float32) + 0.5) / 16777216.0


@triton.jit
def mix(x):
    # >> is arithmetic on int64: the masks drop the copies of the sign
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def drawn(x, lane, SIZE: tl.constexpr, BITS: tl.constexpr, draw, heat, share, top_k):
    """As sampler.sample, one row: logits x, float32 of a power of two of lanes, -inf from SIZE on; the code as int32.

    Thresholds are built bit by bit over the logits read as ordered integers, without a sort."""
    inside = lane < SIZE
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if BITS == 16:
        key = tl.where(inside, (ordered >> 16) + 32768, -1)  # bfloat16 has no more
    else:
        key = tl.where(inside, ordered.to(tl.int64) + 2147483648, -1)

    wanted = tl.minimum(top_k, SIZE)
    kept = tl.zeros((), key.dtype)
    for bit in tl.static_range(BITS - 2, -1, -2):  # two bits at a time, three counts in one sum
        one, two, three = kept | (1 << bit), kept | (2 << bit), kept | (3 << bit)
        counts = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 16) + ((key >= three).to(tl.int64) << 32)
        total = tl.sum(counts, 0)
        kept = tl.where((total & 0xFFFF) >= wanted, one, kept)
        kept = tl.where(((total >> 16) & 0xFFFF) >= wanted, two, kept)
        kept = tl.where((total >> 32) >= wanted, three, kept)

    peak = tl.max(x, 0)
    mass = tl.where((key >= kept) & inside, tl.exp((x - peak) / tl.maximum(heat, 1e-4)), 0.0)
    if share < 1.0:
        enough = share * tl.sum(mass, 0)
        threshold = tl.zeros((), key.dtype)
        for bit in tl.static_range(BITS):
            candidate = threshold | (1 << (BITS - 1 - bit))
            reached = tl.sum(tl.where(key >= candidate, mass, 0.0), 0)
            threshold = tl.where(reached >= enough, candidate, threshold)
        mass = tl.where(key >= threshold, mass, 0.0)

    cumulative = tl.cumsum(mass, 0)
    target = draw * tl.sum(mass, 0)
    code = tl.sum((cumulative <= target).to(tl.int32), 0)
    code = tl.minimum(code, tl.max(tl.where(mass > 0, lane, 0), 0))  # rounding may step past the last kept code
    likeliest = tl.min(tl.where((x == peak) & inside, lane, SIZE - 1), 0)
    return tl.where(heat <= 0, likeliest, code)


@triton.jit(do_not_specialize=["group"])
def sample(
    logits,  # [rows, SIZE]
    seeds,  # [rows] int64, integer_stride apart, like top_k
    frames,  # [rows] int64
    group,  # of the draw, see sampler.uniform
    temperature,  # [rows] float32, setting_stride apart, like top_p; 0: the likeliest
    top_p,
    real_stride,
    top_k,  # [rows] int64
    integer_stride,
    codes,  # [rows] int64, code_stride apart: the result
    code_stride,
    table,  # [SIZE, WIDTH]: the next input row of each code
    norm,  # [WIDTH]
    normed,  # [rows, WIDTH]: the looked-up row after its norm
    looked_up,  # [rows, WIDTH]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least SIZE
    BITS: tl.constexpr,  # 16 for bfloat16 logits, 32 for float32
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    NEXT: tl.constexpr,  # whether to look up the next input row
    PDL: tl.constexpr = False,  # programmatic dependent launch, see kernels_skinny.py
):
    """As sampler.sample with the draw of sampler.uniform. Grid (rows,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    x = tl.load(logits + row * SIZE + lane, mask=lane < SIZE, other=float("-inf")).to(tl.float32)
    draw = uniform(tl.load(seeds + row * integer_stride), tl.load(frames + row), tl.cast(group, tl.int64))
    heat, share = tl.load(temperature + row * real_stride), tl.load(top_p + row * real_stride)
    code = drawn(x, lane, SIZE, BITS, draw, heat, share, tl.load(top_k + row * integer_stride))
    tl.store(codes + row * code_stride, code.to(tl.int64))
    if NEXT:
        column = tl.arange(0, WIDTH_BLOCK)
        within = column < WIDTH
        found = tl.load(table + code.to(tl.int64) * WIDTH + column, mask=within, other=0.0)
        tl.store(looked_up + row * WIDTH + column, found, mask=within)
        wide = found.to(tl.float32)
        wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps))
        wide = wide.to(found.dtype).to(tl.float32)  # rounded once before the weight, as the unfused norm does
        weight = tl.load(norm + column, mask=within, other=0.0).to(tl.float32)
        tl.store(normed + row * WIDTH + column, (wide * weight).to(found.dtype), mask=within)
