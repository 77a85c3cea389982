"""The decoder's Triton kernels where channels lie next to each other, [B, T, C]. CUDA only.

cuDNN's tensor-core convolutions want this layout; in the other one each of them is wrapped in copies. Here the joined
history and new steps of a stream are one flat stretch of memory, and a transposed convolution's outputs already lie
in order (`layers.CausalUpsample.as_convolution`). All arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements per program
STEPS = 32  # steps per program of the last convolution


@triton.jit
def _snake(
    x,  # [B, T, C]
    bias,  # [C]
    residual,  # [B, T, C]
    frequency,  # [C]
    gain,  # [C]
    history,  # [B, H, C]
    total,  # [B, T, C] out: x + bias + residual
    out,  # [B, H + T, C] out: history, then the activation
    length,  # T * C
    CHANNELS: tl.constexpr,
    PAST: tl.constexpr,  # H * C
    HAS_RESIDUAL: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    STORE_TOTAL: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid ((PAST + length) / SIZE, B)."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    channel = at % CHANNELS
    place = at - PAST
    there = at < PAST + length
    new = there & (place >= 0)
    value = tl.load(x + batch * length + place, mask=new, other=0.0).to(tl.float32)
    value += tl.load(bias + channel).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + batch * length + place, mask=new, other=0.0).to(tl.float32)
    if STORE_TOTAL:
        tl.store(total + batch * length + place, value, mask=new)
    wave = tl.sin(value * tl.load(frequency + channel).to(tl.float32))
    value += tl.load(gain + channel).to(tl.float32) * wave * wave
    if PAST > 0:
        if HAS_HISTORY:
            before = tl.load(history + batch * PAST + at, mask=at < PAST, other=0.0).to(tl.float32)
        else:
            before = 0.0
        value = tl.where(at < PAST, before, value)
    tl.store(out + batch * (PAST + length) + at, value, mask=there)


def snake(
    x: Tensor,
    frequency: Tensor,
    gain: Tensor,
    bias: Tensor,
    *,
    residual: Tensor | None = None,
    history: Tensor | None = None,
    pad: int = 0,
    keep_total: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """t + gain * sin²(frequency * t) with t = x + bias + residual.

    Args:
        x: [B, T, C] of any float dtype, contiguous. residual: like x.
        frequency, gain: [C] or [C, 1]. bias: [C].
        history: [B, H, C], put before the result. pad: H zeros instead.
        keep_total: also return t.
        dtype: of the result; None: of x.

    Returns:
        [B, H + T, C], and t like x or None.
    """
    batch, steps, channels = x.shape
    assert x.is_contiguous() and (residual is None or (residual.is_contiguous() and residual.shape == x.shape))
    if history is not None:
        history = history.contiguous()
        pad = history.shape[1]
    out = torch.empty((batch, pad + steps, channels), dtype=dtype or x.dtype, device=x.device)
    total = torch.empty_like(x) if keep_total else None
    _snake[(triton.cdiv((pad + steps) * channels, TILE), batch)](
        x,
        bias,
        x if residual is None else residual,
        frequency,
        gain,
        x if history is None else history,
        x if total is None else total,
        out,
        steps * channels,
        CHANNELS=channels,
        PAST=pad * channels,
        HAS_RESIDUAL=residual is not None,
        HAS_HISTORY=history is not None,
        STORE_TOTAL=total is not None,
        SIZE=TILE,
    )
    return out, total


@triton.jit
def _snake_taps(
    x,  # [B, T, C]
    bias,  # [C]
    residual,  # [B, T, C]
    frequency,  # [C]
    gain,  # [C]
    history,  # [B, H, C]
    weight,  # [H + 1, C]
    kept,  # [B, H, C] out: the last H inputs of the convolution
    products,  # float32 [B, H + 1, H + T] out
    steps,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The activation of each step times each tap of a convolution to one channel. Grid ((H + T) / ROWS, B)."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, COLUMNS)
    real = channel < CHANNELS
    step = at - HISTORY
    there = (at < HISTORY + steps)[:, None] & real[None, :]
    new = there & (step >= 0)[:, None]
    place = (batch * steps + step)[:, None] * CHANNELS + channel[None, :]
    value = tl.load(x + place, mask=new, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=new, other=0.0).to(tl.float32)
    wave = tl.sin(value * tl.load(frequency + channel, mask=real, other=0.0).to(tl.float32)[None, :])
    value += tl.load(gain + channel, mask=real, other=0.0).to(tl.float32)[None, :] * wave * wave
    old = there & (step < 0)[:, None]
    if HAS_HISTORY:
        before = tl.load(history + (batch * HISTORY + at)[:, None] * CHANNELS + channel[None, :], mask=old, other=0.0)
        value = tl.where(new, value, before.to(tl.float32))
    else:
        value = tl.where(new, value, 0.0)
    late = there & (at >= steps)[:, None]
    tl.store(kept + (batch * HISTORY + at - steps)[:, None] * CHANNELS + channel[None, :], value, mask=late)
    for tap in tl.static_range(HISTORY + 1):
        factor = tl.load(weight + tap * CHANNELS + channel, mask=real, other=0.0).to(tl.float32)
        product = tl.sum(value * factor[None, :], axis=1)
        tl.store(products + (batch * (HISTORY + 1) + tap) * (HISTORY + steps) + at, product, mask=at < HISTORY + steps)


@triton.jit
def _sum_taps(
    products,  # float32 [B, H + 1, H + T]
    bias,  # [1]
    out,  # float32 [B, T] out
    steps,
    HISTORY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Output t is the sum over taps k of products[k, t + k], clamped to [-1, 1]. Grid (T / SIZE, B)."""
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = at < steps
    value = tl.zeros((SIZE,), dtype=tl.float32) + tl.load(bias).to(tl.float32)
    for tap in tl.static_range(HISTORY + 1):
        row = (batch * (HISTORY + 1) + tap) * (HISTORY + steps)
        value += tl.load(products + row + at + tap, mask=there, other=0.0)
    value = tl.minimum(tl.maximum(value, -1.0), 1.0)
    tl.store(out + batch * steps + at, value, mask=there)


def snake_to_samples(
    x: Tensor,
    frequency: Tensor,
    gain: Tensor,
    bias: Tensor,
    weight: Tensor,
    last_bias: Tensor,
    *,
    residual: Tensor | None = None,
    history: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The last activation, the convolution to one channel behind it, and the clamp.

    Libraries run a convolution to one channel on a tile of 32 to 256 channels. Here each step is read once; its
    products with the taps are summed in a second, small kernel.

    Args:
        x, frequency, gain, bias, residual: as in `snake`.
        weight: [H + 1, C], the oldest input first. last_bias: [1].
        history: [B, H, C], the convolution's inputs before the first; None: zeros.

    Returns:
        Samples in [-1, 1], float32 [B, T], and the last H inputs of the convolution [B, H, C] like weight.
    """
    batch, steps, channels = x.shape
    past = weight.shape[0] - 1
    assert x.is_contiguous() and (residual is None or (residual.is_contiguous() and residual.shape == x.shape))
    if history is not None:
        history = history.contiguous()
    kept = torch.empty((batch, past, channels), dtype=weight.dtype, device=x.device)
    products = torch.empty((batch, past + 1, past + steps), dtype=torch.float32, device=x.device)
    out = torch.empty((batch, steps), dtype=torch.float32, device=x.device)
    _snake_taps[(triton.cdiv(past + steps, STEPS), batch)](
        x,
        bias,
        x if residual is None else residual,
        frequency,
        gain,
        x if history is None else history,
        weight,
        kept,
        products,
        steps,
        CHANNELS=channels,
        HISTORY=past,
        HAS_RESIDUAL=residual is not None,
        HAS_HISTORY=history is not None,
        ROWS=STEPS,
        COLUMNS=triton.next_power_of_2(channels),
    )
    _sum_taps[(triton.cdiv(steps, TILE), batch)](products, last_bias, out, steps, HISTORY=past, SIZE=TILE)
    return out, kept


@triton.jit
def _depthwise_norm(
    x,  # [B, T, C]
    history,  # [B, H, C]
    weight,  # [H + 1, C]
    bias,  # [C]
    scale,  # [C]
    shift,  # [C]
    kept,  # [B, H, C] out: the last H inputs
    out,  # [B, T, C] out
    steps,
    epsilon,
    CHANNELS: tl.constexpr,
    HISTORY: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One step of one stream per program. Grid (max(T, H), B)."""
    batch = tl.program_id(1).to(tl.int64)
    step = tl.program_id(0)
    channel = tl.arange(0, COLUMNS)
    real = channel < CHANNELS
    wanted = real & (step < steps)
    value = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    for tap in tl.static_range(HISTORY + 1):
        at = step + tap - HISTORY
        source = tl.load(x + (batch * steps + at) * CHANNELS + channel, mask=wanted & (at >= 0), other=0.0)
        source = source.to(tl.float32)
        if HAS_HISTORY:
            place = history + (batch * HISTORY + HISTORY + at) * CHANNELS + channel
            source += tl.load(place, mask=wanted & (at < 0), other=0.0).to(tl.float32)
        value += source * tl.load(weight + tap * CHANNELS + channel, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / CHANNELS
    centred = tl.where(real, value - mean, 0.0)
    spread = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / CHANNELS + epsilon)
    value = centred * spread * tl.load(scale + channel, mask=real, other=0.0).to(tl.float32)
    value += tl.load(shift + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(out + (batch * steps + step) * CHANNELS + channel, value, mask=wanted)

    late = real & (step < HISTORY)
    at = steps + step - HISTORY  # where kept input `step` comes from; before 0: the old history
    source = tl.load(x + (batch * steps + at) * CHANNELS + channel, mask=late & (at >= 0), other=0.0).to(tl.float32)
    if HAS_HISTORY:
        place = history + (batch * HISTORY + HISTORY + at) * CHANNELS + channel
        source += tl.load(place, mask=late & (at < 0), other=0.0).to(tl.float32)
    tl.store(kept + (batch * HISTORY + step) * CHANNELS + channel, source, mask=late)


def depthwise_norm(
    x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, then a LayerNorm over channels.

    Args:
        x: [B, T, C], contiguous. history: [B, H, C], inputs before the first; None: zeros.
        weight: [H + 1, C], the oldest input first. bias, scale, shift: [C].

    Returns:
        [B, T, C], and the last H inputs [B, H, C].
    """
    batch, steps, channels = x.shape
    past = weight.shape[0] - 1
    assert x.is_contiguous()
    if history is not None:
        history = history.contiguous()
    out = torch.empty_like(x)
    kept = torch.empty((batch, past, channels), dtype=x.dtype, device=x.device)
    _depthwise_norm[(max(steps, past), batch)](
        x,
        x if history is None else history,
        weight,
        bias,
        scale,
        shift,
        kept,
        out,
        steps,
        epsilon,
        CHANNELS=channels,
        HISTORY=past,
        HAS_HISTORY=history is not None,
        COLUMNS=triton.next_power_of_2(channels),
    )
    return out, kept
