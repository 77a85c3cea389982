"""The code predictor of a few streams as one persistent Triton kernel: all layers, positions and draws of a frame.

As kernels of their own the 375 dependent steps of a frame take 5 us each, though reading the weights takes 1.5. Here
PROGRAMS programs, one a multiprocessor, stay for the whole frame and meet at a barrier after each stage. Weights, which
no stage writes, are read into registers before the barrier, so memory stays busy while the programs wait.

A layer has five stages: q/k/v with its norm; attention, one program for each row and key head; output with the
residual; gate and up with their norm and SwiGLU; down with the residual. After the last layer: head with its norm, then
one program for each row draws the code and looks up the next input row. Every sum has a fixed order, and no row sees
another one.

All programs must be on the device at once: a grid of at most as many programs as it has multiprocessors, each of which
can hold one, and nothing else on the device that waits for this kernel. A grid of one program needs no barrier, so
Triton's interpreter can run it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.talker.kernels import drawn, uniform
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

    It waits for this program's loads, too: what is read for a later stage is read after it, before `wait`."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(_ARRIVE, "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    return round + 1


@triton.jit
def wait(counter, round, PROGRAMS: tl.constexpr):
    """Until all have arrived."""
    if PROGRAMS > 1:
        given = [counter.to(tl.int64), round * PROGRAMS]
        tl.inline_asm_elementwise(_WAIT, "=r,l,r", given, dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def part(
    weight,
    tile,
    N,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """WARPS * EACH rows of weight [N, K] as [WARPS, EACH, K / BLOCK_K, BLOCK_K]: each warp has some of them.

    PAIRS: of weight [2 * N, K] a row of the gate, then its row of the up projection."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, BLOCK_K))
    n = tile * WARPS * EACH + tl.arange(0, WARPS)[:, None, None, None] * EACH + tl.arange(0, EACH)[None, :, None, None]
    inside = n < N
    if PAIRS:
        inside = n < 2 * N
        n = n // 2 + (n % 2) * N
    k = tl.arange(0, CHUNKS)[None, None, :, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, None, :]
    if CHUNKS * BLOCK_K > K:
        inside = inside & (k < K)
    return tl.load(weight + n * K + k, mask=inside, other=0.0)


@triton.jit
def vector(x, K: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [K] as [WARPS, 1, K / BLOCK_K, BLOCK_K]: each warp reads all of it, where it has a `part`."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, BLOCK_K))
    k = tl.arange(0, CHUNKS)[None, None, :, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, None, :]
    return tl.load(x + k + tl.zeros((WARPS, 1, 1, 1), tl.int32), mask=k < K, other=0.0)


@triton.jit
def normed(x, norm, eps, K: tl.constexpr, NORM: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [K] as a float32 `vector`, times the norm's weight, and what the product is to be multiplied by: [WARPS, 1]."""
    given = vector(x, K, WARPS, BLOCK_K).to(tl.float32)
    scale = tl.full((WARPS, 1), 1.0, tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(given * given, 2), 2) / K + eps)
        given = given * norm.to(tl.float32)
    return given, scale


@triton.jit
def product(
    weight,  # a `part`
    x,  # [ROWS, K]
    norm,  # a `vector`, when NORM
    one,  # of the only row, what `normed` returned
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """weight times x, or times RMSNorm(x): [WARPS, ROWS, EACH] float32."""
    if ROWS == 1:
        given, scale = one
        return (tl.sum(tl.sum(weight.to(tl.float32) * given, 2), 2) * scale)[:, None, :]
    total = tl.zeros((WARPS, ROWS, EACH), tl.float32)
    for row in tl.static_range(ROWS):
        given, scale = normed(x + row * K, norm, eps, K, NORM, WARPS, BLOCK_K)
        found = tl.sum(tl.sum(weight.to(tl.float32) * given, 2), 2) * scale
        total = tl.where(tl.arange(0, ROWS)[None, :, None] == row, found[:, None, :], total)
    return total


@triton.jit
def places(tile, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """Where a `product` belongs in [ROWS, N], and whether it does: [WARPS, ROWS, EACH]."""
    n = tl.arange(0, WARPS)[:, None, None] * EACH + tl.arange(0, EACH)[None, None, :] + tile * WARPS * EACH
    return tl.arange(0, ROWS)[None, :, None] * N + n, n < N


@triton.jit
def store(out, values, tile, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    place, inside = places(tile, N, ROWS, WARPS, EACH)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add(x, added, values, tile, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """x [ROWS, N] = added + values."""
    place, inside = places(tile, N, ROWS, WARPS, EACH)
    tl.store(x + place, finish(values, values, added, x.dtype.element_ty, False, True), mask=inside)


@triton.jit
def residual(x, tile, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    place, inside = places(tile, N, ROWS, WARPS, EACH)
    return tl.load(x + place, mask=inside, other=0.0)


@triton.jit
def store_gated(out, values, tile, N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """silu(gate) * up, of the pairs that `part` put side by side."""
    gate, up = tl.split(tl.reshape(values, (WARPS, ROWS, EACH // 2, 2)))
    place, inside = places(tile, N, ROWS, WARPS, EACH // 2)
    tl.store(out + place, finish(gate, up, gate, out.dtype.element_ty, True, False), mask=inside)


@triton.jit
def remember(keys, values, position, valid, DIM: tl.constexpr, LENGTH: tl.constexpr):
    """Keys and values [LENGTH, DIM] of the positions before, first and second halves: [STEPS, SIDE * DIM / 2] each.

    A warp has the numbers of SIDE positions side by side, 128 in all."""
    HALF: tl.constexpr = DIM // 2
    SIDE: tl.constexpr = 128 // HALF if HALF < 128 else 1
    STEPS: tl.constexpr = triton.cdiv(triton.next_power_of_2(LENGTH), SIDE)
    wide = tl.arange(0, SIDE * HALF)[None, :]
    when = tl.arange(0, STEPS)[:, None] * SIDE + wide // HALF
    past = (when < position) & valid
    offset = when * DIM + wide % HALF
    k_first = tl.load(keys + offset, mask=past, other=0.0)
    k_second = tl.load(keys + offset + HALF, mask=past, other=0.0)
    v_first = tl.load(values + offset, mask=past, other=0.0)
    v_second = tl.load(values + offset + HALF, mask=past, other=0.0)
    return k_first, k_second, v_first, v_second


@triton.jit
def attend(
    qkv,  # [(HEADS + 2 * KV_HEADS) * DIM] of this row
    keys,  # [LENGTH, DIM] cache of this row and key head
    values,
    past,  # what `remember` returned
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
):
    """As kernels.attend, of one query head."""
    HALF: tl.constexpr = DIM // 2
    EACH: tl.constexpr = HEADS // KV_HEADS
    SIDE: tl.constexpr = 128 // HALF if HALF < 128 else 1
    STEPS: tl.constexpr = triton.cdiv(triton.next_power_of_2(LENGTH), SIDE)
    kind = keys.dtype.element_ty
    k_first, k_second, v_first, v_second = past
    # [STEPS, SIDE * HALF]: what all positions share is read where they are
    wide = tl.arange(0, SIDE * HALF)[None, :]
    step = tl.arange(0, STEPS)[:, None]
    when = step * SIDE + wide // HALF
    now = when == position
    lane = wide % HALF + step * 0
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
    offset = when * DIM + wide % HALF
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


@triton.jit
def predict(
    start,  # [rows, HIDDEN]: the input rows of position 0
    first,  # [rows] int64: code 0
    codes,  # [rows, GROUPS] int64: the result
    counters,  # [64] int32, zero: left so
    # scratch of a frame, in the weights' dtype
    x,  # [rows, HIDDEN]
    qkv,  # [rows, QKV]
    attended,  # [rows, HEADS * DIM]
    active,  # [rows, WIDE]
    logits,  # [rows, VOCAB]
    cache,  # [LAYERS, 2, rows, KV_HEADS, GROUPS, DIM]
    # weights, of all layers one after the other
    qkv_weight,
    output_weight,
    gate_up_weight,
    down_weight,
    norms,  # [LAYERS, 2 * HIDDEN + 2 * DIM]: of the input, after the attention, of queries, of keys
    last_norm,  # [HIDDEN]
    heads,  # [GROUPS - 1, VOCAB, HIDDEN]
    table,  # [GROUPS - 1, VOCAB, HIDDEN]: the input row of each code
    first_table,  # [vocabulary, HIDDEN]: that of code 0
    rotary,  # [positions, DIM]
    # settings of the rows
    seeds,  # [rows] int64, integer_stride apart, like top_k
    top_k,
    integer_stride,
    temperature,  # [rows] float32, real_stride apart, like top_p
    top_p,
    real_stride,
    frames,  # [rows] int64
    eps,
    scale,
    COUNT: tl.constexpr,  # rows
    LAYERS: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VOCAB: tl.constexpr,
    BITS: tl.constexpr,  # of a logit, see kernels.drawn
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,  # of a program: num_warps
    EACH: tl.constexpr,  # rows of a matrix for each warp at a time: q/k/v, gate and up, head
    NARROW: tl.constexpr,  # output, down
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A frame's codes from 1 on. Grid (PROGRAMS,)."""
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    INNER: tl.constexpr = HEADS * DIM
    TILE: tl.constexpr = WARPS * EACH
    SLIM: tl.constexpr = WARPS * NARROW
    QKV_PARTS: tl.constexpr = triton.cdiv(triton.cdiv(QKV, TILE), PROGRAMS)
    GATE_PARTS: tl.constexpr = triton.cdiv(triton.cdiv(2 * WIDE, TILE), PROGRAMS)
    tl.static_assert(QKV_PARTS <= 2 and GATE_PARTS <= 3)
    tl.static_assert(triton.cdiv(HIDDEN, SLIM) <= PROGRAMS and triton.cdiv(VOCAB, TILE) <= PROGRAMS)
    ROWS: tl.constexpr = triton.next_power_of_2(COUNT)  # scratch has so many
    NORMS: tl.constexpr = 2 * HIDDEN + 2 * DIM
    pid = tl.program_id(0)
    last = PROGRAMS - 1 - pid  # the last programs have no part of the narrow products: they do what is one row's
    column = tl.arange(0, triton.next_power_of_2(HIDDEN))
    within = column < HIDDEN
    lane = tl.arange(0, triton.next_power_of_2(VOCAB))

    # Programs with a query head, and where they tell that they are done; all others need not wait for q, k and v.
    SPEAKERS: tl.constexpr = COUNT * HEADS
    tl.static_assert(SPEAKERS <= PROGRAMS or PROGRAMS == 1)
    heard = counters + 32

    round = tl.zeros((), tl.int32)
    turn = tl.zeros((), tl.int32)
    for mine in range(last, COUNT, PROGRAMS):
        tl.store(x + mine * HIDDEN + column, tl.load(start + mine * HIDDEN + column, mask=within), mask=within)
        tl.store(codes + mine * GROUPS, tl.load(first + mine))
    round = arrive(counters, round, PROGRAMS)
    a = part(qkv_weight, pid, QKV, HIDDEN, False, WARPS, EACH, BLOCK_K)
    b = a
    if QKV_PARTS > 1:
        b = part(qkv_weight, pid + PROGRAMS, QKV, HIDDEN, False, WARPS, EACH, BLOCK_K)
    norm = vector(norms, HIDDEN, WARPS, BLOCK_K)
    o = part(output_weight, pid, HIDDEN, INNER, False, WARPS, NARROW, BLOCK_K)
    wait(counters, round, PROGRAMS)

    for position in tl.range(0, GROUPS, num_stages=1):
        for layer in tl.range(0, LAYERS, num_stages=1):
            after = tl.where(layer + 1 < LAYERS, layer + 1, 0)
            weights = norms + layer * NORMS + HIDDEN
            gate_up = gate_up_weight + layer * 2 * WIDE * HIDDEN
            following = qkv_weight + after * QKV * HIDDEN
            after_output = output_weight + after * HIDDEN * INNER

            one = normed(x, norm, eps, HIDDEN, True, WARPS, BLOCK_K)
            found = product(a, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
            store(qkv, found, pid, QKV, ROWS, WARPS, EACH)
            if QKV_PARTS > 1:
                found = product(b, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
                store(qkv, found, pid + PROGRAMS, QKV, ROWS, WARPS, EACH)
            round = arrive(counters, round, PROGRAMS)

            if EARLY:
                d = part(gate_up, pid, WIDE, HIDDEN, True, WARPS, EACH, BLOCK_K)
                e, f = d, d
                if GATE_PARTS > 1:
                    e = part(gate_up, pid + PROGRAMS, WIDE, HIDDEN, True, WARPS, EACH, BLOCK_K)
            if last < SPEAKERS:
                for item in range(last, SPEAKERS, PROGRAMS):
                    mine, query = item // HEADS, item % HEADS
                    keys = cache + ((layer * 2 * COUNT + mine) * KV_HEADS + query // (HEADS // KV_HEADS)) * GROUPS * DIM
                    values = keys + COUNT * KV_HEADS * GROUPS * DIM
                    past = remember(keys, values, position, last < SPEAKERS, DIM, GROUPS)
                    if PROGRAMS > 1:
                        wait(counters, round, PROGRAMS)
                    attend(
                        qkv + mine * QKV,
                        keys,
                        values,
                        past,
                        attended + mine * INNER,
                        weights + HIDDEN,
                        weights + HIDDEN + DIM,
                        rotary,
                        query,
                        position,
                        eps,
                        scale,
                        HEADS,
                        KV_HEADS,
                        DIM,
                        GROUPS,
                    )
                arrive(heard, turn, PROGRAMS)
            turn += 1
            added = residual(x, pid, HIDDEN, ROWS, WARPS, NARROW)
            if not EARLY:
                d = part(gate_up, pid, WIDE, HIDDEN, True, WARPS, EACH, BLOCK_K)
                e, f = d, d
                if GATE_PARTS > 1:
                    e = part(gate_up, pid + PROGRAMS, WIDE, HIDDEN, True, WARPS, EACH, BLOCK_K)
            wait(heard, turn, SPEAKERS if PROGRAMS > 1 else 1)

            one = normed(attended, norm, eps, INNER, False, WARPS, BLOCK_K)
            found = product(o, attended, norm, one, eps, INNER, False, ROWS, WARPS, NARROW, BLOCK_K)
            add(x, added, found, pid, HIDDEN, ROWS, WARPS, NARROW)
            round = arrive(counters, round, PROGRAMS)
            norm = vector(weights, HIDDEN, WARPS, BLOCK_K)
            if GATE_PARTS > 2:
                f = part(gate_up, pid + 2 * PROGRAMS, WIDE, HIDDEN, True, WARPS, EACH, BLOCK_K)
            w = part(down_weight + layer * HIDDEN * WIDE, pid, HIDDEN, WIDE, False, WARPS, NARROW, BLOCK_K)
            wait(counters, round, PROGRAMS)

            one = normed(x, norm, eps, HIDDEN, True, WARPS, BLOCK_K)
            found = product(d, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
            store_gated(active, found, pid, WIDE, ROWS, WARPS, EACH)
            if GATE_PARTS > 1:
                found = product(e, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
                store_gated(active, found, pid + PROGRAMS, WIDE, ROWS, WARPS, EACH)
            if GATE_PARTS > 2:
                found = product(f, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
                store_gated(active, found, pid + 2 * PROGRAMS, WIDE, ROWS, WARPS, EACH)
            round = arrive(counters, round, PROGRAMS)
            added = residual(x, pid, HIDDEN, ROWS, WARPS, NARROW)
            # What comes next, as one load: of two branches the registers would wait for both.
            inner = layer + 1 < LAYERS
            head = heads + tl.maximum(position - 1, 0) * VOCAB * HIDDEN
            norm = vector(tl.where(inner, weights - HIDDEN + NORMS, last_norm), HIDDEN, WARPS, BLOCK_K)
            given, bound = tl.where(inner, following, head), tl.where(inner, QKV, VOCAB)
            a = part(given, pid, bound, HIDDEN, False, WARPS, EACH, BLOCK_K)
            wait(counters, round, PROGRAMS)

            one = normed(active, norm, eps, WIDE, False, WARPS, BLOCK_K)
            found = product(w, active, norm, one, eps, WIDE, False, ROWS, WARPS, NARROW, BLOCK_K)
            add(x, added, found, pid, HIDDEN, ROWS, WARPS, NARROW)
            round = arrive(counters, round, PROGRAMS)
            b = a
            if QKV_PARTS > 1:
                b = part(following, pid + PROGRAMS, QKV, HIDDEN, False, WARPS, EACH, BLOCK_K)
            o = part(after_output, pid, HIDDEN, INNER, False, WARPS, NARROW, BLOCK_K)
            wait(counters, round, PROGRAMS)

        if position > 0:
            one = normed(x, norm, eps, HIDDEN, True, WARPS, BLOCK_K)
            found = product(a, x, norm, one, eps, HIDDEN, True, ROWS, WARPS, EACH, BLOCK_K)
            store(logits, found, pid, VOCAB, ROWS, WARPS, EACH)
        round = arrive(counters, round, PROGRAMS)
        if last < COUNT:
            for mine in range(last, COUNT, PROGRAMS):
                seed, frame = tl.load(seeds + mine * integer_stride), tl.load(frames + mine)
                heat, share = tl.load(temperature + mine * real_stride), tl.load(top_p + mine * real_stride)
                kept = tl.load(top_k + mine * integer_stride)
                code = tl.load(first + mine)
                source = first_table
                if PROGRAMS > 1:
                    wait(counters, round, PROGRAMS)
                if position > 0:
                    scores = tl.load(logits + mine * VOCAB + lane, mask=lane < VOCAB, other=float("-inf"))
                    draw = uniform(seed, frame, tl.cast(position, tl.int64))
                    code = drawn(scores.to(tl.float32), lane, VOCAB, BITS, draw, heat, share, kept).to(tl.int64)
                    tl.store(codes + mine * GROUPS + position, code)
                    source = table + (position - 1) * VOCAB * HIDDEN
                tl.store(x + mine * HIDDEN + column, tl.load(source + code * HIDDEN + column, mask=within), mask=within)
        round = arrive(counters, round, PROGRAMS)
        norm = vector(norms, HIDDEN, WARPS, BLOCK_K)
        a = part(qkv_weight, pid, QKV, HIDDEN, False, WARPS, EACH, BLOCK_K)
        if QKV_PARTS == 1:
            b = a
        wait(counters, round, PROGRAMS)

    if PROGRAMS > 1:  # the last one to leave has seen all others past every barrier
        if tl.atomic_add(counters, 1) == (round + 1) * PROGRAMS - 1:
            tl.store(counters, 0)
            tl.store(heard, 0)
