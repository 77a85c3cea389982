"""Everything of a step on the CPU except attention over the paged cache, compiled by Numba.

At batch 1 a frame of a small talker is some 500 torch operations of a few microseconds each, most of it dispatch.
Here it is a handful of calls, each without the interpreter lock. Rows of a batch are computed independently of each
other and always in the same order, so a row's result does not depend on what else is in the batch.

Matrices may be stored as the upper halves of float32 (bfloat16, as uint16): where that loses nothing, and published
checkpoints are bfloat16, it halves the memory traffic that bounds a small batch. The arithmetic stays float32.

All functions live in one file on purpose: Numba's on-disk cache notices changes of a function's own file only.
Arrays are C-contiguous float32 unless said otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Sums may be reordered and contracted (that is what vectorises them); infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
jit = numba.njit(fastmath=FAST, nogil=True, cache=True, error_model="numpy")

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
MIX_1, MIX_2, GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
COLDEST = np.float32(1e-4)
# the same columns as in slots.py
PROMPT_LEN, LAST_ROW, SEED, MIN_FRAMES, TICKET, TOP_K, SUB_TOP_K = 0, 1, 2, 3, 4, 5, 6
TEMPERATURE, TOP_P, PENALTY, SUB_TEMPERATURE, SUB_TOP_P = 0, 1, 2, 3, 4


class LayerArrays(NamedTuple):
    """One decoder layer, as in layers.DecoderLayer. Matrices float32 or uint16, norms float32."""

    input_norm: np.ndarray
    qkv: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    output: np.ndarray
    post_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


class PredictorArrays(NamedTuple):
    """The code predictor, as in predictor.CodePredictor; the arrays of `layers` are stacked over layers. Heads and
    projection float32 or uint16, as the layers' matrices; the rest float32."""

    layers: LayerArrays
    norm: np.ndarray
    heads: np.ndarray  # [G-1, V, Hp]
    projection: np.ndarray  # [Hp, H], empty where the widths agree
    projection_bias: np.ndarray
    projected: np.ndarray  # [G-1, V, Hp]
    projected_first: np.ndarray  # [vocab, Hp]
    rotary: np.ndarray  # [G+1, d]


class SlotArrays(NamedTuple):
    """Views of slots.SlotBuffers."""

    rows: np.ndarray
    codes: np.ndarray  # int64
    seen_at: np.ndarray  # int32
    integers: np.ndarray  # int64
    reals: np.ndarray


class Scratch(NamedTuple):
    """Working memory for R rows."""

    query: np.ndarray  # [2R, heads, d] of the predictor
    key: np.ndarray  # [2R, kv_heads, d]
    value: np.ndarray
    logits: np.ndarray  # [R, V]
    first_logits: np.ndarray  # [R, spoken + 1]
    order: np.ndarray  # int32, as long as the longer of the two
    mass: np.ndarray


@intrinsic
def widen(context: Any, value: Any) -> Any:
    """A stored matrix element as float32: itself, or a uint16 as the upper half of the bits."""

    def same(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    def upper(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(value), upper if value == types.uint16 else same


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """The float32 with these bits (int32)."""
    return types.float32(types.int32), lambda _, builder, signature, a: builder.bitcast(a[0], ir.FloatType())


@intrinsic
def as_bits(context: Any, value: Any) -> Any:
    """The bits (int32) of a float32."""
    return types.int32(types.float32), lambda _, builder, signature, a: builder.bitcast(a[0], ir.IntType(32))


@jit
def copy(source, target):
    """A loop: in Numba a slice assignment costs seconds of compilation for all the shapes it allows for."""
    for k in range(target.shape[0]):
        target[k] = source[k]


@jit
def add(source, target):
    for k in range(target.shape[0]):
        target[k] += source[k]


@jit
def linear(x, count, weight, out):
    """out [:count] = x [:count] @ weight.T; weight [N, K]. Four outputs at a time share the loads of x."""
    inner, width = weight.shape[1], weight.shape[0]
    whole = width - width % 4
    for n in range(0, whole, 4):
        w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
        for m in range(count):
            row = x[m]
            a = b = c = d = np.float32(0)
            for k in range(inner):
                value = row[k]
                a += value * widen(w0[k])
                b += value * widen(w1[k])
                c += value * widen(w2[k])
                d += value * widen(w3[k])
            out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = a, b, c, d
    for n in range(whole, width):
        for m in range(count):
            a = np.float32(0)
            for k in range(inner):
                a += x[m, k] * widen(weight[n, k])
            out[m, n] = a


@jit
def rms_norm(x, count, weight, eps, out):
    width = weight.shape[0]
    for m in range(count):
        row, target, total = x[m], out[m], np.float32(0)
        for k in range(width):
            total += row[k] * row[k]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for k in range(width):
            target[k] = row[k] * scale * weight[k]


@jit
def exponential(x):
    """exp of a float32, relative error below 2e-7: a polynomial times a power of two made of its bits. Unlike the
    library's it vectorises. Clamped to +-87, where float32 ends."""
    t = min(max(x * LOG2_E, np.float32(-126)), np.float32(126))
    whole = np.floor(t + np.float32(0.5))
    r = (t - whole) * LN_2
    series = np.float32(1 / 720) + r * np.float32(1 / 5040)
    series = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * series)
    series = np.float32(1) + r * (np.float32(1) + r * (np.float32(1 / 2) + r * (np.float32(1 / 6) + r * series)))
    return series * as_float((np.int32(whole) + np.int32(127)) << np.int32(23))


@jit
def swiglu(gate_up, count, out):
    """out [M, I] = silu(gate) * up."""
    width = out.shape[1]
    for m in range(count):
        row, result = gate_up[m], out[m]
        for i in range(width):
            result[i] = row[i] / (np.float32(1) + exponential(-row[i])) * row[width + i]


@jit
def norm_rotate(heads, start, weight, cos_sin, eps, out):
    """RMSNorm and rotary embedding of the head at heads[start : start + d]; cos_sin [d]."""
    half = weight.shape[0] // 2
    total = np.float32(0)
    for k in range(2 * half):
        total += heads[start + k] * heads[start + k]
    scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + np.float32(eps))
    for k in range(half):
        first, second = heads[start + k] * scale * weight[k], heads[start + half + k] * scale * weight[half + k]
        out[k] = first * cos_sin[k] - second * cos_sin[half + k]
        out[half + k] = second * cos_sin[k] + first * cos_sin[half + k]


@jit
def split_heads(qkv, count, layer, table, positions, eps, query, key, value):
    """Projections [M, (heads + 2 * kv_heads) * d] to query [M, heads, d], key and value [M, kv_heads, d], normed and
    rotated, first `count` rows; table [P, d] is read at positions [M]."""
    heads, groups, dim = query.shape[1], key.shape[1], layer.key_norm.shape[0]
    for m in range(count):
        parts, cos_sin = qkv[m], table[positions[m]]
        for h in range(heads):
            norm_rotate(parts, h * dim, layer.query_norm, cos_sin, eps, query[m, h])
        for h in range(groups):
            norm_rotate(parts, (heads + h) * dim, layer.key_norm, cos_sin, eps, key[m, h])
            start = (heads + groups + h) * dim
            for k in range(dim):
                value[m, h, k] = parts[start + k]


@jit
def before_attention(x, count, layer, table, positions, eps, query, key, value):
    """x [M, H] to what split_heads gives."""
    normed = np.empty((count, x.shape[1]), np.float32)
    qkv = np.empty((count, (query.shape[1] + 2 * key.shape[1]) * query.shape[2]), np.float32)
    rms_norm(x, count, layer.input_norm, eps, normed)
    linear(normed, count, layer.qkv, qkv)
    split_heads(qkv, count, layer, table, positions, eps, query, key, value)


@jit
def after_attention(x, count, attended, layer, eps):
    """Adds attention's output projection and the SwiGLU block to the first `count` rows of x [M, H], in place.
    attended [M, heads * d]."""
    hidden, inner = x.shape[1], layer.down.shape[1]
    added, normed = np.empty((count, hidden), np.float32), np.empty((count, hidden), np.float32)
    gate_up, active = np.empty((count, 2 * inner), np.float32), np.empty((count, inner), np.float32)
    linear(attended, count, layer.output, added)
    for m in range(count):
        add(added[m], x[m])
    rms_norm(x, count, layer.post_norm, eps, normed)
    linear(normed, count, layer.gate_up, gate_up)
    swiglu(gate_up, count, active)
    linear(active, count, layer.down, added)
    for m in range(count):
        add(added[m], x[m])


@jit
def build_inputs(ids, positions, slots, first_embedding, embeddings, x, slot, frame):
    """The rows the talker reads: text row plus, after the prompt, the embeddings of the last frame's codes.

    ids, positions: [N] int64. Fills x [N, H], slot [N] and frame [N] (int64): the frame this position produces.
    """
    groups = slots.codes.shape[2]
    for n in range(ids.shape[0]):
        s = ids[n] if 0 < ids[n] < slots.rows.shape[0] else 0
        consumed = positions[n] - slots.integers[s, PROMPT_LEN]
        slot[n], frame[n] = s, consumed + 1
        copy(slots.rows[s, min(positions[n], slots.integers[s, LAST_ROW])], x[n])
        if s > 0 and consumed >= 0:
            codes = slots.codes[s, min(consumed, slots.codes.shape[1] - 1)]
            if codes[0] >= 0:
                add(first_embedding[codes[0]], x[n])
                for g in range(1, groups):
                    add(embeddings[g - 1, codes[g]], x[n])


@jit
def mix(x):
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


@jit
def uniform(seed, frame, group):
    """As sampler.uniform."""
    hashed = mix(mix(np.uint64(seed) * GOLDEN + np.uint64(frame)) + np.uint64(group) * GOLDEN)
    return (np.float32(hashed >> np.uint64(40)) + np.float32(0.5)) / np.float32(16777216)


@jit
def draw_code(logits, draw, temperature, top_k, top_p, order, mass):
    """As sampler.sample, for one row [V]. Thresholds are found by bisection over the bits of the logits, read as
    integers of the same order, so nothing is sorted. order (int32) and mass are scratch of at least V."""
    size = logits.shape[0]
    best = 0
    for i in range(size):
        if logits[i] > logits[best]:
            best = i
    if temperature <= 0:
        return best
    peak, scale, total = logits[best], np.float32(1) / max(temperature, COLDEST), np.float32(0)
    least = np.int32(0x7FFFFFFF)
    for i in range(size):
        bits = as_bits(logits[i])
        order[i] = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        least = min(least, order[i])
    low, high = np.int64(least), np.int64(order[best])  # the k-th largest lies in [low, high]
    if top_k < size:
        while low < high:
            middle = (low + high + 1) >> 1
            limit, count = np.int32(middle), np.int32(0)
            for i in range(size):
                count += order[i] >= limit
            if count >= top_k:
                low = middle
                if count == top_k:
                    break
            else:
                high = middle - 1
    kept = np.int32(low)
    for i in range(size):
        mass[i] = exponential((logits[i] - peak) * scale) if order[i] >= kept else np.float32(0)
        total += mass[i]
    if top_p < 1:
        low, high = np.int64(kept), np.int64(order[best])  # the least value whose larger ones weigh less than top_p
        while low < high:
            middle = (low + high) >> 1
            limit, above = np.int32(middle), np.float32(0)
            for i in range(size):
                if order[i] > limit:
                    above += mass[i]
            if above < top_p * total:
                high = middle
            else:
                low = middle + 1
        kept, total = np.int32(low), np.float32(0)
        for i in range(size):
            if order[i] < kept:
                mass[i] = np.float32(0)
            total += mass[i]
    target, reached, last = draw * total, np.float32(0), best
    for i in range(size):
        if mass[i] > 0:
            last = i
            reached += mass[i]
            if reached > target:
                break
    return last


@jit
def attend(query, keys, values, last, scale, scores, out, start):
    """One head's attention over positions 0 .. last: query [d], keys and values [P, d] to out[start : start + d]."""
    dim, peak, total = query.shape[0], np.float32(-np.inf), np.float32(0)
    for t in range(last + 1):
        row, score = keys[t], np.float32(0)
        for k in range(dim):
            score += query[k] * row[k]
        scores[t] = score * scale
        peak = max(peak, scores[t])
    for k in range(dim):
        out[start + k] = np.float32(0)
    for t in range(last + 1):
        row, weight = values[t], exponential(scores[t] - peak)
        total += weight
        for k in range(dim):
            out[start + k] += weight * row[k]
    for k in range(dim):
        out[start + k] /= total


@jit
def predict(hidden, count, first, slot, frame, slots, p, scratch, eps, codes):
    """As predictor.CodePredictor.forward: fills the first `count` rows of codes [R, G] from hidden [R, H], first [R].

    Array shapes carry the sizes: scratch.query [2R, heads, d], scratch.key [2R, kv_heads, d].
    """
    groups, width = codes.shape[1], p.norm.shape[0]
    heads, kv_heads, dim = scratch.query.shape[1], scratch.key.shape[1], p.layers.key_norm.shape[1]
    repeat, layers = heads // kv_heads, p.layers.qkv.shape[0]
    x, start = np.empty((2 * count, width), np.float32), np.empty((count, width), np.float32)
    keys = np.empty((layers, count, kv_heads, groups, dim), np.float32)
    values = np.empty((layers, count, kv_heads, groups, dim), np.float32)
    attended, scores = np.empty((2 * count, heads * dim), np.float32), np.empty(groups, np.float32)
    positions = np.empty(2 * count, np.int64)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    projected = p.projection.shape[0] > 0
    if projected:
        linear(hidden, count, p.projection, start)
    for r in range(count):  # first pass: positions 0 and 1 of each row, side by side
        codes[r, 0] = first[r]
        copy(start[r] if projected else hidden[r], x[2 * r])
        if projected:
            add(p.projection_bias, x[2 * r])
        copy(p.projected_first[first[r]], x[2 * r + 1])
    for group in range(groups - 1):
        per = 2 if group == 0 else 1
        n = per * count
        for i in range(n):
            positions[i] = i % 2 if group == 0 else group + 1
        for index in range(layers):
            layer = LayerArrays(
                p.layers.input_norm[index], p.layers.qkv[index], p.layers.query_norm[index], p.layers.key_norm[index],
                p.layers.output[index], p.layers.post_norm[index], p.layers.gate_up[index], p.layers.down[index],
            )  # fmt: skip
            before_attention(x, n, layer, p.rotary, positions, eps, scratch.query, scratch.key, scratch.value)
            for i in range(n):
                for h in range(kv_heads):
                    copy(scratch.key[i, h], keys[index, i // per, h, positions[i]])
                    copy(scratch.value[i, h], values[index, i // per, h, positions[i]])
            for i in range(n):
                for h in range(heads):
                    known, held = keys[index, i // per, h // repeat], values[index, i // per, h // repeat]
                    attend(scratch.query[i, h], known, held, positions[i], scale, scores, attended[i], h * dim)
            after_attention(x, n, attended, layer, eps)
        if group == 0:
            for r in range(count):
                copy(x[2 * r + 1], x[r])
        rms_norm(x, count, p.norm, eps, start)
        linear(start, count, p.heads[group], scratch.logits)
        for r in range(count):
            s = slot[r]
            codes[r, group + 1] = draw_code(
                scratch.logits[r],
                uniform(slots.integers[s, SEED], frame[r], group + 1),
                slots.reals[s, SUB_TEMPERATURE],
                slots.integers[s, SUB_TOP_K],
                slots.reals[s, SUB_TOP_P],
                scratch.order,
                scratch.mass,
            )
            if group + 2 < groups:
                copy(p.projected[group, codes[r, group + 1]], x[r])


@jit
def first_codes(hidden, count, slot, frame, slots, head, spoken, eos, scratch, first):
    """Code 0 of each row: head, repetition penalty, blocked end, then a draw. Fills first [:count] int64.

    head: [spoken + 1, H], the ids that may be spoken and, last, the end; ids from `spoken` on are never drawn, so
    their logits are not computed. The end's id is larger than theirs, so the order of the draw is that of the ids.
    """
    linear(hidden, count, head, scratch.first_logits)
    for r in range(count):
        s, row = slot[r], scratch.first_logits[r]
        penalty = slots.reals[s, PENALTY]
        for code in range(spoken + 1):
            if slots.seen_at[s, code if code < spoken else eos] < frame[r]:
                row[code] = row[code] * penalty if row[code] < 0 else row[code] / penalty
        if frame[r] < slots.integers[s, MIN_FRAMES]:
            row[spoken] = -np.inf
        code = draw_code(
            row,
            uniform(slots.integers[s, SEED], frame[r], 0),
            slots.reals[s, TEMPERATURE],
            slots.integers[s, TOP_K],
            slots.reals[s, TOP_P],
            scratch.order,
            scratch.mass,
        )
        first[r] = code if code < spoken else eos
