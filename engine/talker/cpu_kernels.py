"""Everything of a step on the CPU except attention over the paged cache, compiled by Numba.

At batch 1 a frame of a small talker is some 500 torch operations of a few microseconds each, most of it dispatch.
Here it is a handful of calls, each without the interpreter lock. Rows of a batch are computed independently of each
other and always in the same order, so a row's result does not depend on what else is in the batch.

All functions live in one file on purpose: Numba's on-disk cache notices changes of a function's own file only.
Arrays are C-contiguous float32 unless said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

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
    """One decoder layer, as in layers.DecoderLayer."""

    input_norm: np.ndarray
    qkv: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    output: np.ndarray
    post_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


class PredictorArrays(NamedTuple):
    """The code predictor, as in predictor.CodePredictor; the arrays of `layers` are stacked over layers."""

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


@jit
def linear(x, weight, out):
    """out [M, N] = x [M, K] @ weight [N, K].T; four outputs at a time share the loads of x."""
    count, inner = x.shape
    width = weight.shape[0]
    whole = width - width % 4
    for n in range(0, whole, 4):
        w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
        for m in range(count):
            row = x[m]
            a = b = c = d = np.float32(0)
            for k in range(inner):
                value = row[k]
                a += value * w0[k]
                b += value * w1[k]
                c += value * w2[k]
                d += value * w3[k]
            out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = a, b, c, d
    for n in range(whole, width):
        for m in range(count):
            a = np.float32(0)
            for k in range(inner):
                a += x[m, k] * weight[n, k]
            out[m, n] = a


@jit
def rms_norm(x, weight, eps, out):
    for m in range(x.shape[0]):
        row, total = x[m], np.float32(0)
        for k in range(row.shape[0]):
            total += row[k] * row[k]
        scale = np.float32(1) / np.sqrt(total / np.float32(row.shape[0]) + np.float32(eps))
        for k in range(row.shape[0]):
            out[m, k] = row[k] * scale * weight[k]


@jit
def swiglu(gate_up, out, powers):
    """out [M, I] = silu(gate) * up. exp is a polynomial times a power of two built from its bits, which vectorises;
    relative error below 1e-7. powers: scratch of I int32."""
    width = out.shape[1]
    scale = powers.view(np.float32)
    for m in range(out.shape[0]):
        row, result = gate_up[m], out[m]
        for i in range(width):
            t = min(max(-row[i] * LOG2_E, np.float32(-126)), np.float32(126))
            whole = np.floor(t + np.float32(0.5))
            r = (t - whole) * LN_2
            result[i] = np.float32(1) + r * (
                np.float32(1)
                + r * (np.float32(1 / 2) + r * (np.float32(1 / 6) + r * (np.float32(1 / 24)
                + r * (np.float32(1 / 120) + r * (np.float32(1 / 720) + r * np.float32(1 / 5040))))))
            )  # fmt: skip
            powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        for i in range(width):
            result[i] = row[i] / (np.float32(1) + result[i] * scale[i]) * row[width + i]


@jit
def norm_rotate(head, weight, cos_sin, eps, out):
    """RMSNorm and rotary embedding of one head [d]; cos_sin [d]."""
    half = head.shape[0] // 2
    total = np.float32(0)
    for k in range(2 * half):
        total += head[k] * head[k]
    scale = np.float32(1) / np.sqrt(total / np.float32(2 * half) + np.float32(eps))
    for k in range(half):
        first, second = head[k] * scale * weight[k], head[half + k] * scale * weight[half + k]
        out[k] = first * cos_sin[k] - second * cos_sin[half + k]
        out[half + k] = second * cos_sin[k] + first * cos_sin[half + k]


@jit
def before_attention(x, layer, table, positions, eps, query, key, value):
    """x [M, H] to query [M, heads, d], key and value [M, kv_heads, d]; table [P, d] is read at positions [M]."""
    count, heads, dim = query.shape
    groups = key.shape[1]
    normed = np.empty_like(x)
    rms_norm(x, layer.input_norm, eps, normed)
    qkv = np.empty((count, (heads + 2 * groups) * dim), np.float32)
    linear(normed, layer.qkv, qkv)
    for m in range(count):
        parts, cos_sin = qkv[m].reshape(heads + 2 * groups, dim), table[positions[m]]
        for h in range(heads):
            norm_rotate(parts[h], layer.query_norm, cos_sin, eps, query[m, h])
        for h in range(groups):
            norm_rotate(parts[heads + h], layer.key_norm, cos_sin, eps, key[m, h])
            value[m, h] = parts[heads + groups + h]


@jit
def after_attention(x, attended, layer, eps):
    """Adds attention's output projection and the SwiGLU block to x [M, H], in place. attended [M, heads * d]."""
    count, hidden = x.shape
    inner = layer.down.shape[1]
    added, normed = np.empty((count, hidden), np.float32), np.empty((count, hidden), np.float32)
    linear(attended, layer.output, added)
    for m in range(count):
        for k in range(hidden):
            x[m, k] += added[m, k]
    rms_norm(x, layer.post_norm, eps, normed)
    gate_up, active = np.empty((count, 2 * inner), np.float32), np.empty((count, inner), np.float32)
    linear(normed, layer.gate_up, gate_up)
    swiglu(gate_up, active, np.empty(inner, np.int32))
    linear(active, layer.down, added)
    for m in range(count):
        for k in range(hidden):
            x[m, k] += added[m, k]


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
        x[n] = slots.rows[s, min(positions[n], slots.integers[s, LAST_ROW])]
        if s > 0 and consumed >= 0:
            codes = slots.codes[s, min(consumed, slots.codes.shape[1] - 1)]
            if codes[0] >= 0:
                x[n] += first_embedding[codes[0]]
                for g in range(1, groups):
                    x[n] += embeddings[g - 1, codes[g]]


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
def draw_code(logits, draw, temperature, top_k, top_p, keys, mass):
    """As sampler.sample, for one row [V]. Thresholds are found by bisection over the bits of the logits, read as
    integers of the same order, so nothing is sorted. keys [V] int32 and mass [V] are scratch."""
    size = logits.shape[0]
    best = np.argmax(logits)
    if temperature <= 0:
        return best
    bits = logits.view(np.int32)
    for i in range(size):
        keys[i] = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
    low, high = np.int64(-(1 << 31)), np.int64(keys[best])  # the k-th largest key lies in [low, high]
    if top_k < size:
        while low < high:
            middle = (low + high + 1) >> 1
            limit, count = np.int32(middle), np.int32(0)
            for i in range(size):
                count += keys[i] >= limit
            if count >= top_k:
                low = middle
                if count == top_k:
                    break
            else:
                high = middle - 1
    kept = np.int32(low)
    peak, total, scale = logits[best], np.float32(0), np.float32(1) / max(temperature, COLDEST)
    for i in range(size):
        mass[i] = np.exp((logits[i] - peak) * scale) if keys[i] >= kept else np.float32(0)
        total += mass[i]
    if top_p < 1:
        low, high = np.int64(kept), np.int64(keys[best])  # the least key whose larger values weigh less than top_p
        while low < high:
            middle = (low + high) >> 1
            limit, above = np.int32(middle), np.float32(0)
            for i in range(size):
                if keys[i] > limit:
                    above += mass[i]
            if above < top_p * total:
                high = middle
            else:
                low = middle + 1
        kept, total = np.int32(low), np.float32(0)
        for i in range(size):
            if keys[i] < kept:
                mass[i] = np.float32(0)
            total += mass[i]
    target, reached, last = draw * total, np.float32(0), np.int64(best)
    for i in range(size):
        if mass[i] > 0:
            last = np.int64(i)
            reached += mass[i]
            if reached > target:
                break
    return last


@jit
def predict(hidden, first, integers, reals, frame, p, eps, heads, codes):
    """As predictor.CodePredictor.forward: fills codes [R, G] from hidden [R, H] and first [R]."""
    count, groups = codes.shape
    width, dim = p.norm.shape[0], p.layers.key_norm.shape[1]
    layers, kv_heads = p.layers.qkv.shape[0], (p.layers.qkv.shape[1] // dim - heads) // 2
    repeat, size = heads // kv_heads, p.heads.shape[1]
    keys = np.empty((layers, count, kv_heads, groups, dim), np.float32)
    values = np.empty_like(keys)
    x = np.empty((2 * count, width), np.float32)  # first pass: positions 0 and 1 of each row, side by side
    start = np.empty((count, width), np.float32)
    if p.projection.shape[0] > 0:
        linear(hidden, p.projection, start)
        for r in range(count):
            x[2 * r] = start[r] + p.projection_bias
    else:
        for r in range(count):
            x[2 * r] = hidden[r]
    for r in range(count):
        codes[r, 0] = first[r]
        x[2 * r + 1] = p.projected_first[first[r]]
    positions = np.empty(2 * count, np.int64)
    query = np.empty((2 * count, heads, dim), np.float32)
    key, value = np.empty((2 * count, kv_heads, dim), np.float32), np.empty((2 * count, kv_heads, dim), np.float32)
    attended, scores = np.empty((2 * count, heads * dim), np.float32), np.empty(groups, np.float32)
    last, logits = np.empty((count, width), np.float32), np.empty((count, size), np.float32)
    order, mass = np.empty(size, np.int32), np.empty(size, np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
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
            before_attention(x[:n], layer, p.rotary, positions[:n], eps, query[:n], key[:n], value[:n])
            for i in range(n):
                keys[index, i // per, :, positions[i]] = key[i]
                values[index, i // per, :, positions[i]] = value[i]
            for i in range(n):
                for h in range(heads):
                    known, held = keys[index, i // per, h // repeat], values[index, i // per, h // repeat]
                    peak = np.float32(-np.inf)
                    for t in range(positions[i] + 1):
                        score = np.float32(0)
                        for k in range(dim):
                            score += query[i, h, k] * known[t, k]
                        scores[t] = score * scale
                        peak = max(peak, scores[t])
                    total, target = np.float32(0), attended[i, h * dim : (h + 1) * dim]
                    for k in range(dim):
                        target[k] = 0
                    for t in range(positions[i] + 1):
                        weight = np.exp(scores[t] - peak)
                        total += weight
                        for k in range(dim):
                            target[k] += weight * held[t, k]
                    for k in range(dim):
                        target[k] /= total
            after_attention(x[:n], attended[:n], layer, eps)
        if group == 0:
            for r in range(count):
                x[r] = x[2 * r + 1]
        rms_norm(x[:count], p.norm, eps, last)
        linear(last, p.heads[group], logits)
        for r in range(count):
            draw = uniform(integers[r, SEED], frame[r], group + 1)
            code = draw_code(
                logits[r], draw, reals[r, SUB_TEMPERATURE], integers[r, SUB_TOP_K], reals[r, SUB_TOP_P], order, mass
            )
            codes[r, group + 1] = code
            if group + 2 < groups:
                x[r] = p.projected[group, code]


@jit
def first_codes(hidden, slot, frame, slots, head, spoken, eos, first):
    """Code 0 of each row: head, repetition penalty, blocked end, then a draw. Fills first [R] int64.

    head: [spoken + 1, H], the ids that may be spoken and, last, the end; ids from `spoken` on are never drawn, so
    their logits are not computed. The end's id is larger than theirs, so the order of the draw is that of the ids.
    """
    size = spoken + 1
    logits = np.empty((hidden.shape[0], size), np.float32)
    order, mass = np.empty(size, np.int32), np.empty(size, np.float32)
    linear(hidden, head, logits)
    for r in range(hidden.shape[0]):
        s, row = slot[r], logits[r]
        penalty = slots.reals[s, PENALTY]
        for code in range(size):
            if slots.seen_at[s, code if code < spoken else eos] < frame[r]:
                row[code] = row[code] * penalty if row[code] < 0 else row[code] / penalty
        if frame[r] < slots.integers[s, MIN_FRAMES]:
            row[spoken] = -np.inf
        draw = uniform(slots.integers[s, SEED], frame[r], 0)
        code = draw_code(
            row, draw, slots.reals[s, TEMPERATURE], slots.integers[s, TOP_K], slots.reals[s, TOP_P], order, mass
        )
        first[r] = code if code < spoken else eos


@jit
def speak(hidden, slot, frame, valid, slots, head, spoken, eos, p, eps, heads, end_token, tokens, report):
    """From the talker's hidden states [R, H] to codes: draws, predicts and stores them.

    Fills tokens [R] int64 (what vLLM is told) and report [R, 2 + G] int64 (ticket, frame, codes).
    Returns the number of report rows: rows that are valid and not the end. A frame that is already stored is kept:
    a step repeated after a preemption must not change what was heard.
    """
    groups = slots.codes.shape[2]
    rows = np.empty(hidden.shape[0], np.int64)
    fresh = 0
    for r in range(hidden.shape[0]):
        tokens[r] = 0
        if valid[r]:
            stored = slots.codes[slot[r], frame[r], 0]
            tokens[r] = end_token if stored == eos else slot[r]
            if stored < 0:
                rows[fresh] = r
                fresh += 1
    rows = rows[:fresh]
    h, s, f = hidden[rows], slot[rows], frame[rows]
    first = np.empty(fresh, np.int64)
    first_codes(h, s, f, slots, head, spoken, eos, first)
    going = np.nonzero(first != eos)[0]
    for i in range(fresh):
        slots.seen_at[s[i], first[i]] = min(slots.seen_at[s[i], first[i]], f[i])
        if first[i] == eos:
            slots.codes[s[i], f[i], 0] = eos
            tokens[rows[i]] = end_token
    codes = np.empty((going.shape[0], groups), np.int64)
    if going.shape[0] > 0:
        predict(h[going], first[going], slots.integers[s[going]], slots.reals[s[going]], f[going], p, eps, heads, codes)
    for i in range(going.shape[0]):
        slots.codes[s[going[i]], f[going[i]]] = codes[i]
        report[i, 0], report[i, 1] = slots.integers[s[going[i]], TICKET], f[going[i]]
        report[i, 2:] = codes[i]
    return going.shape[0]
