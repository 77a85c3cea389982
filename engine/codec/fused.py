"""The decoder's upsampling half for serving on CUDA: the same layers, everything between convolutions in one kernel.

At 24 kHz the element-wise work costs more than the convolutions. A convolution runs without its bias here, and the
kernel after it (`kernels.snake`) adds bias and residual, applies the activation and writes the result behind the
history of the next convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from engine.codec.kernels import snake
from engine.codec.streaming import StateWalk


class FusedTail:
    """Stands for `CodecDecoder.decoder` (its layers, frozen): [B, latent, T] -> [B, 1, T * rates]."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._first, *self._blocks, self._snake, self._last = layers

    def __call__(self, x: Tensor, walk: StateWalk | None) -> Tensor:
        first: Any = self._first
        x, bias, residual = _convolve(first, _extend(x, first.history, walk)), first.conv.bias, None
        for block in self._blocks:
            act, up, *units = block.block  # type: ignore[misc,union-attr]
            steps = x.shape[-1]
            joined, _ = _activate(act, x, bias, residual, up, walk)
            grown = F.conv_transpose1d(joined, up.conv.weight, stride=up.stride)
            x = grown[..., up.history * up.stride : (up.history + steps) * up.stride]
            bias, residual = up.conv.bias, None
            for unit in units:
                joined, total = _activate(unit.act1, x, bias, residual, unit.conv1, walk, keep_total=True)
                inner = _convolve(unit.conv1, joined)
                inner, _ = _activate(unit.act2, inner, unit.conv1.conv.bias, None, unit.conv2, walk)
                x, bias, residual = _convolve(unit.conv2, inner), unit.conv2.conv.bias, total
        last: Any = self._last
        joined, _ = _activate(self._snake, x, bias, residual, last, walk)
        return last.conv(joined)


def _convolve(layer: Any, x: Tensor) -> Tensor:
    """The convolution alone: no history, no bias."""
    return F.conv1d(x, layer.conv.weight, dilation=layer.conv.dilation)


def _extend(x: Tensor, pad: int, walk: StateWalk | None) -> Tensor:
    return walk.extend(x) if walk else F.pad(x, (pad, 0))


def _activate(
    act: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, layer: Any, walk: StateWalk | None,
    keep_total: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The activation of x + bias + residual as `layer`'s convolution takes it, behind its history; and that sum if it
    is wanted."""
    pad, dtype = layer.history, layer.conv.weight.dtype
    given: dict[str, Any] = {"bias": bias, "residual": residual, "keep_total": keep_total, "dtype": dtype}
    if not pad or walk is None:
        return snake(x, act.frequency, act.gain, pad=pad, **given)
    history = walk.next_history()
    if history is None:  # this walk has its own way of joining
        out, total = snake(x, act.frequency, act.gain, **given)
        return walk.extend(out), total
    joined, total = snake(x, act.frequency, act.gain, history=history, **given)
    walk.remember(joined, history.shape[-1])
    return joined, total
