"""The code predictor of one stream as one persistent Triton kernel: all layers, positions and draws of a frame.

Separate kernels take 5 us for each of a frame's 375 dependent steps, though its weights could be read in 1.5. Here
PROGRAMS programs, one a multiprocessor, stay for the whole frame and meet after each stage. Weights, which no stage
writes, are read into registers before the others are waited for: memory stays busy meanwhile.

A layer has five stages: q/k/v with its norm; attention, a program for each query head; output with the residual; gate
and up with their norm and SwiGLU; down with the residual. After the last layer: head with its norm, then one program
draws the code and looks up the next input row. Every sum has a fixed order.

All programs must be on the device at once: at most one for each of its multiprocessors, and nothing on the device that
waits for this kernel. A grid of one program needs nobody to wait for, so Triton's interpreter can run it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.talker.kernels import drawn, uniform
from engine.talker.kernels_persistent_parts import (
    add,
    arrive,
    attend,
    normed,
    part,
    product,
    residual,
    store,
    store_gated,
    vector,
    wait,
)


@triton.jit
def predict(
    start,  # [HIDDEN]: the input row of position 0
    first,  # [1] int64: code 0
    codes,  # [GROUPS] int64: the result
    counters,  # [64] int32, zero: left so
    # scratch of a frame, in the weights' dtype
    x,  # [HIDDEN]
    qkv,  # [QKV]
    attended,  # [HEADS * DIM]
    active,  # [WIDE]
    logits,  # [VOCAB]
    cache,  # [LAYERS, 2, KV_HEADS, GROUPS, DIM]
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
    seed,  # [1] int64, like top_k and frame: what is drawn with
    frame,
    temperature,  # [1] float32, like top_p
    top_p,
    top_k,
    eps,
    scale,
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
):
    """A frame's codes. Grid (PROGRAMS,)."""
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    INNER: tl.constexpr = HEADS * DIM
    NORMS: tl.constexpr = 2 * HIDDEN + 2 * DIM
    TILE: tl.constexpr = WARPS * EACH
    QKV_PARTS: tl.constexpr = triton.cdiv(triton.cdiv(QKV, TILE), PROGRAMS)
    GATE_PARTS: tl.constexpr = triton.cdiv(triton.cdiv(2 * WIDE, TILE), PROGRAMS)
    tl.static_assert(QKV_PARTS <= 2 and GATE_PARTS <= 3 and (HEADS <= PROGRAMS or PROGRAMS == 1))
    tl.static_assert(triton.cdiv(HIDDEN, WARPS * NARROW) <= PROGRAMS and triton.cdiv(VOCAB, TILE) <= PROGRAMS)
    pid = tl.program_id(0)
    last = PROGRAMS - 1 - pid  # the last programs have the least of the products: they attend and draw
    heard = counters + 32  # where those with a query head arrive; nobody else waits for q, k and v
    column = tl.arange(0, triton.next_power_of_2(HIDDEN))
    within = column < HIDDEN
    lane = tl.arange(0, triton.next_power_of_2(VOCAB))

    round = tl.zeros((), tl.int32)
    turn = tl.zeros((), tl.int32)
    if last == 0:
        tl.store(x + column, tl.load(start + column, mask=within), mask=within)
        tl.store(codes, tl.load(first))
    round = arrive(counters, round, PROGRAMS)
    norm = vector(norms, HIDDEN, WARPS)
    a = part(qkv_weight, pid, QKV, HIDDEN, False, WARPS, EACH)
    b = a
    if QKV_PARTS > 1:
        b = part(qkv_weight, pid + PROGRAMS, QKV, HIDDEN, False, WARPS, EACH)
    o = part(output_weight, pid, HIDDEN, INNER, False, WARPS, NARROW)
    wait(counters, round * PROGRAMS, PROGRAMS)

    for position in tl.range(0, GROUPS, num_stages=1):
        for layer in tl.range(0, LAYERS, num_stages=1):
            inner = layer + 1 < LAYERS
            after = tl.where(inner, layer + 1, 0)
            weights = norms + layer * NORMS + HIDDEN
            gate_up = gate_up_weight + layer * 2 * WIDE * HIDDEN
            following = qkv_weight + after * QKV * HIDDEN

            given, inverse = normed(x, norm, eps, HIDDEN, WARPS)
            store(qkv, product(a, given) * inverse, pid, QKV, WARPS, EACH)
            if QKV_PARTS > 1:
                store(qkv, product(b, given) * inverse, pid + PROGRAMS, QKV, WARPS, EACH)
            round = arrive(counters, round, PROGRAMS)

            if last < HEADS:
                for query in range(last, HEADS, PROGRAMS):
                    keys = cache + (layer * 2 * KV_HEADS + query // (HEADS // KV_HEADS)) * GROUPS * DIM
                    values = keys + KV_HEADS * GROUPS * DIM
                    attend(
                        qkv,
                        keys,
                        values,
                        attended,
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
                        counters,
                        round * PROGRAMS,
                        PROGRAMS,
                    )
                arrive(heard, turn, PROGRAMS)
            turn += 1
            added = residual(x, pid, HIDDEN, WARPS, NARROW)
            d = part(gate_up, pid, WIDE, HIDDEN, True, WARPS, EACH)
            e, f = d, d
            if GATE_PARTS > 1:
                e = part(gate_up, pid + PROGRAMS, WIDE, HIDDEN, True, WARPS, EACH)
            wait(heard, turn * HEADS, PROGRAMS)

            add(x, added, product(o, vector(attended, INNER, WARPS)), pid, HIDDEN, WARPS, NARROW)
            round = arrive(counters, round, PROGRAMS)
            norm = vector(weights, HIDDEN, WARPS)
            if GATE_PARTS > 2:
                f = part(gate_up, pid + 2 * PROGRAMS, WIDE, HIDDEN, True, WARPS, EACH)
            w = part(down_weight + layer * HIDDEN * WIDE, pid, HIDDEN, WIDE, False, WARPS, NARROW)
            wait(counters, round * PROGRAMS, PROGRAMS)

            given, inverse = normed(x, norm, eps, HIDDEN, WARPS)
            store_gated(active, product(d, given) * inverse, pid, WIDE, WARPS, EACH)
            if GATE_PARTS > 1:
                store_gated(active, product(e, given) * inverse, pid + PROGRAMS, WIDE, WARPS, EACH)
            if GATE_PARTS > 2:
                store_gated(active, product(f, given) * inverse, pid + 2 * PROGRAMS, WIDE, WARPS, EACH)
            round = arrive(counters, round, PROGRAMS)
            added = residual(x, pid, HIDDEN, WARPS, NARROW)
            # The next layer's, or the head's, by one load: where branches join, the registers wait for theirs.
            norm = vector(tl.where(inner, weights - HIDDEN + NORMS, last_norm), HIDDEN, WARPS)
            head = heads + tl.maximum(position - 1, 0) * VOCAB * HIDDEN
            a = part(tl.where(inner, following, head), pid, tl.where(inner, QKV, VOCAB), HIDDEN, False, WARPS, EACH)
            wait(counters, round * PROGRAMS, PROGRAMS)

            add(x, added, product(w, vector(active, WIDE, WARPS)), pid, HIDDEN, WARPS, NARROW)
            round = arrive(counters, round, PROGRAMS)
            b = a
            if QKV_PARTS > 1:
                b = part(following, pid + PROGRAMS, QKV, HIDDEN, False, WARPS, EACH)
            o = part(output_weight + after * HIDDEN * INNER, pid, HIDDEN, INNER, False, WARPS, NARROW)
            wait(counters, round * PROGRAMS, PROGRAMS)

        if position > 0:
            given, inverse = normed(x, norm, eps, HIDDEN, WARPS)
            store(logits, product(a, given) * inverse, pid, VOCAB, WARPS, EACH)
        round = arrive(counters, round, PROGRAMS)
        if last == 0:
            heat, share, kept = tl.load(temperature), tl.load(top_p), tl.load(top_k)
            draw = uniform(tl.load(seed), tl.load(frame), tl.cast(position, tl.int64))
            code = tl.load(first)
            source = first_table
            wait(counters, round * PROGRAMS, PROGRAMS)
            if position > 0:
                scores = tl.load(logits + lane, mask=lane < VOCAB, other=float("-inf")).to(tl.float32)
                code = drawn(scores, lane, VOCAB, BITS, draw, heat, share, kept).to(tl.int64)
                tl.store(codes + position, code)
                source = table + (position - 1) * VOCAB * HIDDEN
            tl.store(x + column, tl.load(source + code * HIDDEN + column, mask=within), mask=within)
        round = arrive(counters, round, PROGRAMS)
        norm = vector(norms, HIDDEN, WARPS)
        a = part(qkv_weight, pid, QKV, HIDDEN, False, WARPS, EACH)
        if QKV_PARTS == 1:
            b = a
        wait(counters, round * PROGRAMS, PROGRAMS)

    if PROGRAMS > 1:  # the last one to leave has seen all others past every wait
        if tl.atomic_add(counters, 1) == (round + 1) * PROGRAMS - 1:
            tl.store(counters, 0)
            tl.store(heard, 0)
