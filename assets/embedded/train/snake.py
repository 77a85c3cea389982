"""The snake activation as one kernel each way, for training: the engine's forward, and its gradient in Triton.

y = x + sin²(αx) / β by channel, α and β stored as logarithms. Plain torch takes five kernels forward and a dozen
backward, and the codec's time is mostly in them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.codec.kernels import snake

BLOCK = 2048


@triton.jit
def _backward(x, alpha, beta, dy, dx, dalpha, dbeta, channels, length, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    channel = row % channels
    a = tl.exp(tl.load(alpha + channel).to(tl.float32))
    b = tl.exp(tl.load(beta + channel).to(tl.float32))
    gain = 1.0 / (b + 1e-9)
    v = tl.load(x + row * length + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * length + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sin(v * a)
    slope = 2.0 * s * tl.cos(v * a)
    tl.store(dx + row * length + at, g * (1.0 + gain * a * slope), mask=inside)
    tl.atomic_add(dalpha + channel, tl.sum(g * gain * slope * v * a, axis=0))
    tl.atomic_add(dbeta + channel, tl.sum(-g * s * s * gain * gain * b, axis=0))


class Snake(torch.autograd.Function):
    """x [B, C, T] of any float dtype, alpha and beta [C] float32 -> like x."""

    @staticmethod
    def forward(ctx, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, alpha, beta)
        return snake(x, alpha.exp(), 1.0 / (beta.exp() + 1e-9))[0]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, alpha, beta = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        dalpha, dbeta = (torch.zeros_like(p, dtype=torch.float32) for p in (alpha, beta))
        grid = (x.shape[0] * x.shape[1], triton.cdiv(x.shape[2], BLOCK))
        _backward[grid](x, alpha, beta, dy, dx, dalpha, dbeta, x.shape[1], x.shape[2], BLOCK=BLOCK)
        return dx, dalpha.to(alpha.dtype), dbeta.to(beta.dtype)


def fuse(snake_class: type) -> None:
    """Every module of `snake_class` (attributes alpha and beta) uses the kernels from here on."""
    snake_class.forward = lambda self, x: Snake.apply(x, self.alpha, self.beta)
