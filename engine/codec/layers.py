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
    """Convolution whose output t sees inputs up to t. [B, in, T] -> [B, out, T]."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self.history = (kernel - 1) * dilation
        self.history_channels = in_channels

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        if self.history:
            x = walk.extend(x) if walk else F.pad(x, (self.history, 0))
        return self.conv(x)


class CausalUpsample(nn.Module):
    """Transposed convolution cut to its causal part. [B, in, T] -> [B, out, T * stride].

    The reference drops the last kernel - stride outputs, those that later inputs would still change. A chunk repeats
    the few inputs that reach into it instead of keeping an output tail: the bias is then added exactly once.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride=stride)
        self.stride = stride
        self.history = -(-kernel // stride) - 1
        self.history_channels = in_channels

    def forward(self, x: Tensor, walk: StateWalk | None = None) -> Tensor:
        length, skip = x.shape[-1] * self.stride, 0
        if self.history and walk:
            x = walk.extend(x)
            skip = self.history * self.stride
        return self.conv(x)[..., skip : skip + length]


class SnakeBeta(nn.Module):
    """x + sin²(αx) / β per channel, α and β stored as logarithms (arXiv 2006.08195, as in BigVGAN)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha.exp()[:, None]
        gain = 1.0 / (self.beta.exp() + 1e-9)[:, None]
        return torch.addcmul(x, gain, torch.sin(x * alpha).square())


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
        return x + self.conv2(self.act2(self.conv1(self.act1(x), walk)))


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
