"""Triton kernels around the talker's layers and the predictor on CUDA: input rows, the settings of each row, code 0,
and the storing of a frame. Each replaces a dozen and more small operations of torch_step.py: a tenth of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.talker import slots
from engine.talker.kernels import drawn, uniform

PROMPT_LEN, LAST_ROW, SEED, MIN_FRAMES, TICKET, TOP_K = (
    tl.constexpr(column)
    for column in (slots.PROMPT_LEN, slots.LAST_ROW, slots.SEED, slots.MIN_FRAMES, slots.TICKET, slots.TOP_K)
)
TEMPERATURE, TOP_P, PENALTY = (tl.constexpr(column) for column in (slots.TEMPERATURE, slots.TOP_P, slots.PENALTY))


@triton.jit
def input_rows(
    ids,  # [N] slot of each row, anything else counts as slot 0
    positions,  # [N]
    integers,  # [S, INTEGERS] int64
    rows,  # [S, ROWS, WIDTH]
    codes,  # [S, FRAMES + 1, GROUPS] int64
    first,  # [vocabulary, WIDTH] embedding of code 0
    others,  # [GROUPS - 1, VOCAB, WIDTH] embeddings of the other codes
    x,  # [N, WIDTH]: the result
    slot_of,  # [N] int64: the result
    frame_of,  # [N] int64: the result
    count,  # slots
    INTEGERS: tl.constexpr,
    ROWS: tl.constexpr,
    FRAMES: tl.constexpr,
    GROUPS: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As TorchStep.inputs. Grid (N, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < WIDTH
    slot = tl.load(ids + row).to(tl.int64)
    slot = tl.where((slot < 0) | (slot > count), 0, slot)
    position = tl.load(positions + row).to(tl.int64)
    consumed = position - tl.load(integers + slot * INTEGERS + PROMPT_LEN)
    at = tl.minimum(position, tl.load(integers + slot * INTEGERS + LAST_ROW))
    value = tl.load(rows + (slot * ROWS + at) * WIDTH + column, mask=within, other=0.0).to(tl.float32)
    if consumed >= 0:
        frame = codes + (slot * (FRAMES + 1) + tl.minimum(consumed, FRAMES)) * GROUPS
        total = tl.zeros((BLOCK,), tl.float32)
        for group in tl.static_range(GROUPS - 1):
            code = tl.maximum(tl.load(frame + group + 1), 0)
            total += tl.load(others + (group * VOCAB + code) * WIDTH + column, mask=within, other=0.0).to(tl.float32)
        kind = x.dtype.element_ty  # rounded where the separate operations round
        code = tl.maximum(tl.load(frame), 0)
        spoken = tl.load(first + code * WIDTH + column, mask=within, other=0.0).to(tl.float32)
        value += (spoken + total.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(x + row * WIDTH + column, value.to(x.dtype.element_ty), mask=within)
    if tl.program_id(1) == 0:
        tl.store(slot_of + row, slot)
        tl.store(frame_of + row, consumed + 1)


@triton.jit
def settle(
    slot,  # [R] int64
    frame,  # [R] int64
    valid,  # [R] bool
    integers,  # [S, INTEGERS] int64
    reals,  # [S, REALS] float32
    slot_out,  # [R] int64: the slot, 0 for rows that are not valid
    frame_out,  # [R] int64: the frame within 0 .. FRAMES, FRAMES for rows that are not valid
    integers_out,  # [R, INTEGERS]: the slot's settings
    reals_out,  # [R, REALS]
    INTEGERS: tl.constexpr,
    REALS: tl.constexpr,
    FRAMES: tl.constexpr,
):
    """Rows that must leave no trace become rows of the trash slot. Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    good = tl.load(valid + row) != 0
    mine = tl.where(good, tl.load(slot + row), 0)
    number = tl.where(good, tl.minimum(tl.maximum(tl.load(frame + row), 0), FRAMES), FRAMES)
    tl.store(slot_out + row, mine)
    tl.store(frame_out + row, number)
    lane = tl.arange(0, 8)
    whole = tl.load(integers + mine * INTEGERS + lane, mask=lane < INTEGERS, other=0)
    tl.store(integers_out + row * INTEGERS + lane, whole, mask=lane < INTEGERS)
    real = tl.load(reals + mine * REALS + lane, mask=lane < REALS, other=0.0)
    tl.store(reals_out + row * REALS + lane, real, mask=lane < REALS)


@triton.jit
def first_code(
    logits,  # [R, SIZE]
    seen_at,  # [S, SIZE] int32
    suppressed,  # [SIZE] bool
    slot,  # [R] int64
    frame,  # [R] int64
    integers,  # [R, INTEGERS]
    reals,  # [R, REALS]
    codes,  # [R] int64: the result
    eos,
    INTEGERS: tl.constexpr,
    REALS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least SIZE
):
    """As TorchStep.first_code after the product with the head. Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    x = tl.load(logits + row * SIZE + lane, mask=inside, other=float("-inf")).to(tl.float32)
    number, settings, heats = tl.load(frame + row), integers + row * INTEGERS, reals + row * REALS
    seen = tl.load(seen_at + tl.load(slot + row) * SIZE + lane, mask=inside, other=1 << 30) < number
    factor = tl.load(heats + PENALTY)
    x = tl.where(seen, tl.where(x < 0, x * factor, x / factor), x)
    blocked = tl.load(suppressed + lane, mask=inside, other=1) != 0
    blocked = blocked | ((lane == eos) & (number < tl.load(settings + MIN_FRAMES)))
    x = tl.where(blocked, float("-inf"), x)
    draw = uniform(tl.load(settings + SEED), number, number * 0)
    heat, share = tl.load(heats + TEMPERATURE), tl.load(heats + TOP_P)
    tl.store(codes + row, drawn(x, lane, SIZE, 32, draw, heat, share, tl.load(settings + TOP_K)).to(tl.int64))


@triton.jit
def store_frame(
    made,  # [R, GROUPS] int64
    slot,  # [R] int64, as settle leaves it, like frame
    frame,
    valid,  # [R] bool
    integers,  # [R, INTEGERS]
    codes,  # [S, FRAMES + 1, GROUPS]: written
    seen_at,  # [S, SIZE] int32: written
    report,  # [max_rows, 2 + GROUPS] int64: written
    tokens,  # [R] int64: the result
    count,  # R
    eos,
    end_token,
    INTEGERS: tl.constexpr,
    FRAMES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,  # power of two, at least GROUPS
    SIZE: tl.constexpr,
):
    """The end of TorchStep.speak. Grid (max_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GROUPS_BLOCK)
    within = lane < GROUPS
    told = report + row * (2 + GROUPS)
    if row >= count:
        tl.store(told + 2 + lane, tl.zeros((GROUPS_BLOCK,), tl.int64), mask=within)
        tl.store(told, tl.zeros((), tl.int64))
        tl.store(told + 1, tl.zeros((), tl.int64))
    else:
        mine, number, good = tl.load(slot + row), tl.load(frame + row), tl.load(valid + row) != 0
        place = codes + (mine * (FRAMES + 1) + number) * GROUPS
        stored = tl.load(place + lane, mask=within, other=0)
        fresh = tl.load(made + row * GROUPS + lane, mask=within, other=0)
        # A frame that is already stored stays: a step repeated after a preemption must not change what was heard.
        stays = (tl.sum(tl.where(lane == 0, stored, 0), 0) >= 0) & good
        kept = tl.where(stays, stored, fresh)
        first = tl.sum(tl.where(lane == 0, kept, 0), 0)
        tl.store(place + lane, kept, mask=within)
        seen = seen_at + mine * SIZE + first
        tl.store(seen, tl.minimum(tl.load(seen), number.to(tl.int32)))
        ended = good & (first == eos)
        tl.store(told, tl.where(good & (first != eos), tl.load(integers + row * INTEGERS + TICKET), 0))
        tl.store(told + 1, number)
        tl.store(told + 2 + lane, kept, mask=within)
        tl.store(tokens + row, tl.where(ended, end_token, mine))
