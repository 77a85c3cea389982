"""The decoder behind its transformer for serving on CUDA, with channels next to each other from end to end.

Every convolution is one that tensor cores take as it is: a transposed convolution runs as an ordinary one whose
outputs are the steps in order, the depthwise one shares a kernel with the norm behind it, the last one, to a single
channel, with the activation before it and the clamp. Where its weight is float16 (`CodecDecoder.narrow`) a
convolution's inputs and outputs are, and so is a unit's residual; biases and what is between convolutions are float32.
Streams keep their histories as [B, H, C] (`CodecDecoder.freeze` says so to `init_state`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.codec.kernels_channels_last import depthwise_norm, snake, snake_to_samples
from engine.codec.layers import CausalUpsample, ConvNeXtBlock
from engine.codec.streaming import StateWalk


class ChannelsLastTail:
    """`CodecDecoder.upsample` and `.decoder`, frozen: [B, T, latent] -> float32 samples [B, 1, T * rates]."""

    def __init__(self, stages: Iterable[Any], layers: Iterable[nn.Module]) -> None:
        first, *blocks, self._act, last = layers
        self._stages = [(_Conv.of(up), _ConvNeXt(block)) for up, block in stages]
        self._first = _Conv.of(first)
        self._blocks: list[tuple[Any, _Conv, list[tuple[Any, _Conv, Any, _Conv]]]] = []
        for block in blocks:
            act, up, *units = block.block  # type: ignore[misc,union-attr]
            inner = [(u.act1, _Conv.of(u.conv1), u.act2, _Conv.of(u.conv2)) for u in units]
            self._blocks.append((act, _Conv.of(up), inner))
        conv: Any = last.conv
        self._last: Any = conv
        self._last_taps = conv.weight[0].t().contiguous()  # [kernel, C]

    def __call__(self, x: Tensor, walk: StateWalk | None) -> Tensor:
        for up, block in self._stages:
            x = block(up(_join(x.contiguous(), up.history, walk)) + up.bias, walk)
        x, bias, residual = self._first(_join(x, self._first.history, walk)), self._first.bias, None
        for act, up, units in self._blocks:
            joined, _ = _activate(act, x, bias, residual, up, walk)
            x, bias, residual = up(joined), up.bias, None
            for act1, conv1, act2, conv2 in units:
                joined, total = _activate(act1, x, bias, residual, conv1, walk, keep_total=True)
                inner, _ = _activate(act2, conv1(joined), conv1.bias, None, conv2, walk)
                x, bias, residual = conv2(inner), conv2.bias, total
        return self._samples(x, bias, residual, walk)

    def _samples(self, x: Tensor, bias: Tensor, residual: Tensor | None, walk: StateWalk | None) -> Tensor:
        act: Any = self._act
        history = walk.next_history() if walk else None
        if walk and history is None:  # this walk has its own way of joining
            dtype = self._last_taps.dtype
            inputs = snake(x, act.frequency, act.gain, bias, residual=residual, dtype=dtype)[0]
            joined = walk.extend(inputs.transpose(1, 2))
            return self._last(joined).float().clamp(-1, 1)
        samples, kept = snake_to_samples(
            x, act.frequency, act.gain, bias, self._last_taps, self._last.bias, residual=residual, history=history
        )
        if walk:
            walk.keep(kept)
        return samples[:, None]


class _Conv:
    """A convolution without its bias: [B, H + T, in] -> [B, T, out], transposed ones [B, T * stride, out]."""

    def __init__(self, weight: Tensor, bias: Tensor, dilation: int, history: int, channels: int) -> None:
        self._weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
        self.bias, self.history, self.dtype = bias, history, weight.dtype
        self._dilation, self._channels = (1, dilation), channels

    @classmethod
    def of(cls, layer: Any) -> _Conv:
        conv: Any = layer.conv
        if isinstance(layer, CausalUpsample):
            return cls(layer.as_convolution(), conv.bias, 1, layer.history, conv.out_channels)
        return cls(conv.weight, conv.bias, conv.dilation[0], layer.history, conv.out_channels)

    def __call__(self, x: Tensor) -> Tensor:
        batch, steps, channels = x.shape
        image = x.view(batch, 1, steps, channels).permute(0, 3, 1, 2)  # how torch says channels-last
        y = F.conv2d(image, self._weight, dilation=self._dilation)
        return y.permute(0, 2, 3, 1).contiguous().view(batch, -1, self._channels)


class _ConvNeXt:
    def __init__(self, block: ConvNeXtBlock) -> None:
        self._block = block
        self._taps = block.dwconv.conv.weight[:, 0].t().contiguous()  # [kernel, C]

    def __call__(self, x: Tensor, walk: StateWalk | None) -> Tensor:
        past = self._block.dwconv.history
        history = None
        if walk:
            history = walk.next_history()
            if history is None:  # this walk has its own way of joining
                joined = _join(x, past, walk)
                h, _ = self._normed(joined[:, past:].contiguous(), joined[:, :past])
                return self._pointwise(x, h)
        h, kept = self._normed(x, history)
        if walk:
            walk.keep(kept)
        return self._pointwise(x, h)

    def _normed(self, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
        conv, norm = self._block.dwconv.conv, self._block.norm
        assert conv.bias is not None
        return depthwise_norm(x, history, self._taps, conv.bias, norm.weight, norm.bias, norm.eps)

    def _pointwise(self, x: Tensor, h: Tensor) -> Tensor:
        block = self._block
        return torch.addcmul(x, block.gamma, block.pwconv2(F.gelu(block.pwconv1(h))))


def _join(x: Tensor, pad: int, walk: StateWalk | None) -> Tensor:
    """x [B, T, C] behind `pad` steps of history."""
    if not pad:
        return x
    if walk is None:
        return F.pad(x, (0, 0, pad, 0))
    history = walk.next_history()
    if history is None:
        return walk.extend(x.transpose(1, 2)).transpose(1, 2).contiguous()
    joined = torch.cat((history, x), dim=1)
    walk.keep(joined[:, joined.shape[1] - pad :])
    return joined


def _activate(
    act: Any, x: Tensor, bias: Tensor, residual: Tensor | None, conv: _Conv, walk: StateWalk | None,
    keep_total: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The activation of x + bias + residual as `conv` takes it, behind its history; and that sum if it is wanted."""
    pad = conv.history
    given: dict[str, Any] = {"residual": residual, "keep_total": keep_total, "dtype": conv.dtype}
    if not pad or walk is None:
        return snake(x, act.frequency, act.gain, bias, pad=pad, **given)
    history = walk.next_history()
    if history is None:  # this walk has its own way of joining
        out, total = snake(x, act.frequency, act.gain, bias, **given)
        return walk.extend(out.transpose(1, 2)).transpose(1, 2).contiguous(), total
    joined, total = snake(x, act.frequency, act.gain, bias, history=history, **given)
    walk.keep(joined[:, joined.shape[1] - pad :])
    return joined, total
