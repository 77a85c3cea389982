"""What the persistent kernel (kernels_persistent.py) is made of: how its programs meet, and their parts of a product
and of the attention."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.talker.kernels_skinny import finish

# By the first thread of a program; the others wait behind debug_barrier.
_ARRIVE = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p red.release.gpu.global.add.u32 [$1], 1;
    mov.b32 $0, 0;
}""")
_WAIT = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 t;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra DONE;
WAIT:
    ld.acquire.gpu.global.u32 t, [$1];
    setp.lt.u32 p, t, $2;
    @p bra WAIT;
DONE:
    mov.b32 $0, 0;
}""")


@triton.jit
def arrive(counter, round, PROGRAMS: tl.constexpr):
    """Tell the others that what was stored up to here can be read; returns how often all have met then.

    It waits for this program's loads, too: what is read for a later stage is read between `arrive` and `wait`."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(_ARRIVE, "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    return round + 1


@triton.jit
def wait(counter, arrivals, PROGRAMS: tl.constexpr):
    """Until so many have arrived."""
    if PROGRAMS > 1:
        given = [counter.to(tl.int64), arrivals]
        tl.inline_asm_elementwise(_WAIT, "=r,l,r", given, dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def part(weight, tile, N, K: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """WARPS * EACH rows of weight [N, K] as [WARPS, EACH, K / 256, 256]: each warp has some of them, whole.

    PAIRS: of weight [2 * N, K] a row of the gate, then its row of the up projection."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, 256))
    n = tile * WARPS * EACH + tl.arange(0, WARPS)[:, None, None, None] * EACH + tl.arange(0, EACH)[None, :, None, None]
    inside = n < N
    if PAIRS:
        inside = n < 2 * N
        n = n // 2 + (n % 2) * N
    k = tl.arange(0, CHUNKS)[None, None, :, None] * 256 + tl.arange(0, 256)[None, None, None, :]
    if CHUNKS * 256 > K:
        inside = inside & (k < K)
    return tl.load(weight + n * K + k, mask=inside, other=0.0)


@triton.jit
def vector(x, K: tl.constexpr, WARPS: tl.constexpr):
    """x [K] as [WARPS, 1, K / 256, 256]: each warp reads all of it, where it has a `part`; nothing is exchanged."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, 256))
    k = tl.arange(0, CHUNKS)[None, None, :, None] * 256 + tl.arange(0, 256)[None, None, None, :]
    return tl.load(x + k + tl.zeros((WARPS, 1, 1, 1), tl.int32), mask=k < K, other=0.0)


@triton.jit
def normed(x, norm, eps, K: tl.constexpr, WARPS: tl.constexpr):
    """x [K] times the norm's weight as a float32 `vector`, and one over its root mean square: [WARPS, 1]."""
    given = vector(x, K, WARPS).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(given * given, 2), 2) / K + eps)
    return given * norm.to(tl.float32), inverse


@triton.jit
def product(weight, x):
    """A `part` times a `vector`: [WARPS, EACH] float32."""
    return tl.sum(tl.sum(weight.to(tl.float32) * x.to(tl.float32), 2), 2)


@triton.jit
def columns(tile, WARPS: tl.constexpr, EACH: tl.constexpr):
    """Where a `product` belongs: [WARPS, EACH]."""
    return tile * WARPS * EACH + tl.arange(0, WARPS)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def store(out, values, tile, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    n = columns(tile, WARPS, EACH)
    tl.store(out + n, values.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def store_gated(out, values, tile, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """silu(gate) * up, of the pairs that `part` put side by side."""
    gate, up = tl.split(tl.reshape(values, (WARPS, EACH // 2, 2)))
    n = columns(tile, WARPS, EACH // 2)
    tl.store(out + n, finish(gate, up, gate, out.dtype.element_ty, True, False), mask=n < N)


@triton.jit
def residual(x, tile, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    n = columns(tile, WARPS, EACH)
    return tl.load(x + n, mask=n < N, other=0.0)


@triton.jit
def add(x, added, values, tile, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """x [N] = added + values, where they belong."""
    n = columns(tile, WARPS, EACH)
    tl.store(x + n, finish(values, values, added, x.dtype.element_ty, False, True), mask=n < N)


@triton.jit
def attend(
    qkv,  # [(HEADS + 2 * KV_HEADS) * DIM]
    keys,  # [LENGTH, DIM] cache of the key head
    values,
    out,  # [HEADS * DIM]
    query_norm,
    key_norm,
    rotary,
    head,  # of queries
    position,
    eps,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    counter,  # of `wait`: what the others have stored when so many have arrived is read, the past before
    arrivals,
    PROGRAMS: tl.constexpr,
):
    """As kernels.attend, of one query head. A warp has the numbers of SIDE positions side by side, 128 in all."""
    HALF: tl.constexpr = DIM // 2
    EACH: tl.constexpr = HEADS // KV_HEADS
    SIDE: tl.constexpr = 128 // HALF if HALF < 128 else 1
    STEPS: tl.constexpr = triton.cdiv(triton.next_power_of_2(LENGTH), SIDE)
    kind = keys.dtype.element_ty
    # [STEPS, SIDE * HALF]: what all positions share is read where they are
    wide = tl.arange(0, SIDE * HALF)[None, :]
    step = tl.arange(0, STEPS)[:, None]
    when = step * SIDE + wide // HALF
    past, now = when < position, when == position
    lane = wide % HALF + step * 0
    offset = when * DIM + wide % HALF
    k_first = tl.load(keys + offset, mask=past, other=0.0)
    k_second = tl.load(keys + offset + HALF, mask=past, other=0.0)
    v_first = tl.load(values + offset, mask=past, other=0.0)
    v_second = tl.load(values + offset + HALF, mask=past, other=0.0)
    wait(counter, arrivals, PROGRAMS)
    source = qkv + head * DIM + lane
    q_first, q_second = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    source = qkv + (HEADS + head // EACH) * DIM + lane
    new_first, new_second = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    source += KV_HEADS * DIM
    value_first, value_second = tl.load(source), tl.load(source + HALF)
    rotary += position * DIM + lane
    cos, sin = tl.load(rotary).to(tl.float32), tl.load(rotary + HALF).to(tl.float32)

    inverse = 1.0 / tl.sqrt(tl.sum(new_first * new_first + new_second * new_second, 1)[:, None] / SIDE / DIM + eps)
    new_first = new_first * inverse * tl.load(key_norm + lane).to(tl.float32)
    new_second = new_second * inverse * tl.load(key_norm + HALF + lane).to(tl.float32)
    key_first, key_second = (new_first * cos - new_second * sin).to(kind), (new_second * cos + new_first * sin).to(kind)
    once = now & (head % EACH == 0)  # its own place in the cache
    tl.store(keys + offset, key_first, mask=once)
    tl.store(keys + offset + HALF, key_second, mask=once)
    tl.store(values + offset, value_first, mask=once)
    tl.store(values + offset + HALF, value_second, mask=once)
    k_first = tl.where(now, key_first, k_first).to(tl.float32)
    k_second = tl.where(now, key_second, k_second).to(tl.float32)
    v_first = tl.where(now, value_first, v_first).to(tl.float32)
    v_second = tl.where(now, value_second, v_second).to(tl.float32)

    inverse = scale / tl.sqrt(tl.sum(q_first * q_first + q_second * q_second, 1)[:, None] / SIDE / DIM + eps)
    q_first = q_first * inverse * tl.load(query_norm + lane).to(tl.float32)
    q_second = q_second * inverse * tl.load(query_norm + HALF + lane).to(tl.float32)
    products = (q_first * cos - q_second * sin) * k_first + (q_second * cos + q_first * sin) * k_second
    scores = tl.sum(tl.reshape(products, (STEPS, SIDE, HALF)), 2)
    time = tl.arange(0, STEPS)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    scores = tl.where(time <= position, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
    mass = tl.sum(tl.sum(weights, 1), 0)
    weights = tl.reshape(tl.broadcast_to(weights[:, :, None], (STEPS, SIDE, HALF)), (STEPS, SIDE * HALF))
    first = tl.sum(tl.reshape(weights * v_first, (STEPS, SIDE, HALF)), 1)
    second = tl.sum(tl.reshape(weights * v_second, (STEPS, SIDE, HALF)), 1)
    both = tl.sum(tl.join(first, second), 0) / mass  # [HALF, 2]
    out += head * DIM + tl.arange(0, HALF)[:, None] + tl.arange(0, 2)[None, :] * HALF
    tl.store(out, both.to(kind))
