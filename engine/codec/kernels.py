"""The Snake activation as one Triton kernel, with what surrounds it in the decoder. CUDA only.

Plain torch takes four passes over memory for one Snake, and the convolution before it another for its bias, the sum
with the residual another, the history in front of the next convolution another. All of it is one pass here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements per program


@triton.jit
def _snake(
    x,  # [B, C, T], rows x_batch and x_row apart
    bias,  # [C]
    residual,  # [B, C, T], rows residual_batch and residual_row apart
    frequency,  # [C]
    gain,  # [C]
    history,  # [B, C, H], contiguous
    total,  # [B, C, T] out: x + bias + residual
    out,  # [B, C, H + T] out: history, then the activation
    rows,
    channels,
    steps,
    x_batch,
    x_row,
    residual_batch,
    residual_row,
    HISTORY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    STORE_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (rows / ROWS, (HISTORY + steps) / COLUMNS)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    at = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    batch, channel = row // channels, row % channels
    step = at - HISTORY
    there = row < rows
    new = there & (step >= 0) & (step < steps)
    value = tl.load(x + batch * x_batch + channel * x_row + step, mask=new, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + batch * residual_batch + channel * residual_row + step
        value += tl.load(place, mask=new, other=0.0).to(tl.float32)
    if STORE_TOTAL:
        tl.store(total + row * steps + step, value, mask=new)
    wave = tl.sin(value * tl.load(frequency + channel, mask=there, other=0.0).to(tl.float32))
    value += tl.load(gain + channel, mask=there, other=0.0).to(tl.float32) * wave * wave
    if HISTORY > 0:
        old = there & (step < 0)
        if HAS_HISTORY:
            before = tl.load(history + row * HISTORY + at, mask=old, other=0.0).to(tl.float32)
        else:
            before = 0.0
        value = tl.where(step < 0, before, value)
    tl.store(out + row * (HISTORY + steps) + at, value, mask=there & (step < steps))


def snake(
    x: Tensor,
    frequency: Tensor,
    gain: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    history: Tensor | None = None,
    pad: int = 0,
    keep_total: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """t + gain * sin²(frequency * t) with t = x + bias + residual, computed in float32.

    Args:
        x: [B, C, T] of any float dtype, steps next to each other.
        frequency, gain: [C] or [C, 1].
        bias: [C]. residual: like x. history: [B, C, H], put before the result. pad: H zeros instead.
        keep_total: also return t.
        dtype: of the result; None: of x.

    Returns:
        [B, C, H + T], and t like x or None.
    """
    batch, channels, steps = x.shape
    assert x.stride(2) == 1 or steps == 1
    if residual is not None:
        assert residual.shape == x.shape and (residual.stride(2) == 1 or steps == 1)
    if history is not None:
        history = history.contiguous()
        pad = history.shape[2]
    out = torch.empty((batch, channels, pad + steps), dtype=dtype or x.dtype, device=x.device)
    total = torch.empty((batch, channels, steps), dtype=x.dtype, device=x.device) if keep_total else None
    columns = min(TILE, max(16, triton.next_power_of_2(pad + steps)))
    height = TILE // columns
    rows = batch * channels
    _snake[(triton.cdiv(rows, height), triton.cdiv(pad + steps, columns))](
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        frequency,
        gain,
        x if history is None else history,
        x if total is None else total,
        out,
        rows,
        channels,
        steps,
        x.stride(0),
        x.stride(1),
        0 if residual is None else residual.stride(0),
        0 if residual is None else residual.stride(1),
        HISTORY=pad,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_HISTORY=history is not None,
        STORE_TOTAL=total is not None,
        ROWS=height,
        COLUMNS=columns,
    )
    return out, total
