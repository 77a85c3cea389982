"""Causal building blocks of the 12 Hz decoder.

Attribute names are the checkpoint's. Each block runs over a whole sequence (`walk` is None: left-padded with zeros)
or over the next chunk of a stream (`walk` brings the inputs that came before); both give the same numbers.
Source of the structure: qwen_tts/core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py of qwen-tts 0.1.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.codec.streaming import StateWalk


class CausalConv(nn.Module):
    """Convolution whose output t sees inputs up to t. [B, in, T] -> [B, out, T].

    Its bias may be wider than its weight (`CodecDecoder.narrow`): inputs are then rounded to the weight's dtype, and
    outputs have the bias's.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation
        self.history_channels = in_channels

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        x = _narrowed(self.conv, x)
        if self.history:
            x = walk.extend(x) if walk else F.pad(x, (self.history, 0))
        bias = _wide_bias(self.conv)
        if bias is None:
            return self.conv(x)
        return F.conv1d(x, self.conv.weight, dilation=self.conv.dilation, groups=self.conv.groups) + bias


class CausalUpsample(nn.Module):
    """Transposed convolution cut to its causal part. [B, in, T] -> [B, out, T * stride].

    The reference drops the last kernel - stride outputs, those that later inputs would still change. A chunk repeats
    the few inputs that reach into it instead of keeping an output tail: the bias is then added exactly once. Dtypes
    as in `CausalConv`.
    """

    taps: Tensor | None

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride=stride)
        self.stride = stride
        self.history = -(-kernel // stride) - 1
        self.history_channels = in_channels
        self.register_buffer("taps", None, persistent=False)

    def as_convolution(self) -> Tensor:
        """Weight [stride * out, in, history + 1] of an ordinary convolution over the history and the new steps.

        Its outputs for one step are `stride` steps of `out` channels each: with channels last in memory they lie in
        order.
        """
        weight = self.conv.weight.detach()  # [in, out, kernel]
        inputs, outputs, kernel = weight.shape
        reach = self.history + 1  # inputs that touch one step's outputs
        padded = F.pad(weight, (0, reach * self.stride - kernel))
        taps = padded.view(inputs, outputs, reach, self.stride).flip(2)  # the oldest input first
        return taps.permute(3, 1, 0, 2).reshape(self.stride * outputs, inputs, reach)

    def fold(self, matrix: bool = True) -> None:
        """The same map as one matrix product, `stride` outputs per step side by side as channels; or not again.

        CPUs have no fast transposed convolution; the product is several times faster.
        """
        if not matrix:
            self.taps = None
            return
        taps = self.as_convolution()
        by_phase = taps.view(self.stride, -1, *taps.shape[1:])  # [stride, out, in, reach]
        self.taps = by_phase.permute(1, 0, 3, 2).reshape(taps.shape[0], -1).contiguous()

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        batch, _, steps = x.shape
        x = _narrowed(self.conv, x)
        known = self.history if walk else 0  # inputs before the first new one
        if known and walk:
            x = walk.extend(x)
        if self.taps is None:
            bias = _wide_bias(self.conv)
            y = self.conv(x) if bias is None else F.conv_transpose1d(x, self.conv.weight, stride=self.stride) + bias
            return y[..., known * self.stride : (known + steps) * self.stride]
        if known != self.history:
            x = F.pad(x, (self.history, 0))
        columns = torch.cat([x[..., i : i + steps] for i in range(self.history + 1)], dim=1)
        side_by_side = torch.matmul(self.taps, columns).view(batch, -1, self.stride, steps)
        y = side_by_side.transpose(2, 3).reshape(batch, -1, steps * self.stride)
        return y + self.conv.bias[:, None] if self.conv.bias is not None else y


def _wide_bias(conv: nn.Conv1d | nn.ConvTranspose1d) -> Tensor | None:
    """The bias [C, 1] if its dtype is not the weight's: no convolution takes both, so it is added behind."""
    return conv.bias[:, None] if conv.bias is not None and conv.bias.dtype != conv.weight.dtype else None


def _narrowed(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor) -> Tensor:
    """x as a convolution with a wide bias takes it; for others as it is, which autocast may have chosen."""
    return x if _wide_bias(conv) is None else x.to(conv.weight.dtype)


class SnakeBeta(nn.Module):
    """x + sin²(αx) / β per channel, α and β stored as logarithms (arXiv 2006.08195, as in BigVGAN)."""

    frequency: Tensor | None
    gain: Tensor | None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("frequency", None, persistent=False)
        self.register_buffer("gain", None, persistent=False)

    def constants(self) -> tuple[Tensor, Tensor]:
        """α and 1 / β, each [C, 1]."""
        return self.alpha.exp()[:, None], 1.0 / (self.beta.exp() + 1e-9)[:, None]

    def fold(self) -> None:
        self.frequency, self.gain = (t.detach().clone() for t in self.constants())

    def forward(self, x: Tensor) -> Tensor:
        if self.frequency is None or self.gain is None:
            frequency, gain = self.constants()
            return torch.addcmul(x, gain, torch.sin(x * frequency).square())
        wave = (x * self.frequency).sin_()  # frozen: no gradient needs the steps between
        return torch.addcmul(x, self.gain, wave.square_())


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then a pointwise MLP. [B, C, T] -> [B, C, T]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        h = self.norm(self.dwconv(x, walk).transpose(1, 2))
        h = self.gamma * self.pwconv2(F.gelu(self.pwconv1(h)))
        return x + h.transpose(1, 2)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        inner = self.conv2(self.act2(self.conv1(self.act1(x), walk)))
        return _narrowed(self.conv1.conv, x) + inner  # kept as narrow as what the convolutions take


class UpsampleBlock(nn.Module):
    """Snake, upsampling by `rate`, three dilated residual units. [B, in, T] -> [B, out, T * rate]."""

    def __init__(self, in_channels: int, out_channels: int, rate: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                SnakeBeta(in_channels),
                CausalUpsample(in_channels, out_channels, 2 * rate, rate),
                *(ResidualUnit(out_channels, dilation) for dilation in (1, 3, 9)),
            ]
        )

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        snake, upsample, *units = self.block
        x = upsample(snake(x), walk)
        for unit in units:
            x = unit(x, walk)
        return x
