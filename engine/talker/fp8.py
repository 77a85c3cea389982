"""The code predictor's matrices in eight bits: float8_e4m3fn with one scale per output row.

Scales are powers of two: a rounded weight is then exact in bfloat16 (and float32), so kernels that read eight bits and
every other way to run the predictor, the CPU's included, compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from engine.talker.layers import decoder_layers

if TYPE_CHECKING:
    from engine.talker.predictor import CodePredictor

MATRICES = ("qkv", "output", "gate_up", "down")
LARGEST = 448.0  # of float8_e4m3fn


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] to float8_e4m3fn [..., N, K] and scales [..., N] float32.

    A scale is absmax / 448 of its row, rounded up to a power of two; 1 for a row of zeros. Being floating point, eight
    bits lose no precision to a scale up to twice as large, only range below a 2**14th of the largest.
    """
    wide = weight.float()
    peak = wide.abs().amax(-1)
    fraction, exponent = torch.frexp(peak / LARGEST)  # fraction in [0.5, 1)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)  # a power of two already
    exponent = torch.where(peak > 0, exponent.clamp(-100, 100), 0).to(torch.int32)
    scale = ((exponent + 127) << 23).view(torch.float32)  # 2 ** exponent, exact on any device
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, [..., N, K] in `dtype`; exact in bfloat16 and float32."""
    return (weight.float() * scale[..., None]).to(dtype)


def matrices(predictor: CodePredictor) -> Iterator[torch.Tensor]:
    """Everything that is held in eight bits: the layers' matrices and each group's head."""
    for layer in decoder_layers(predictor.layers):
        for name in MATRICES:
            yield getattr(layer, name)
    yield from predictor.heads


@torch.no_grad()
def round_weights(predictor: CodePredictor) -> None:
    """Give the matrices, in place, the values that eight bits hold. A second time changes nothing."""
    for weight in matrices(predictor):
        weight.copy_(dequantize(*quantize(weight), weight.dtype))
