"""A Triton kernel for linear layers over one or two rows, with the steps around them: RMSNorm before, SwiGLU or the
residual after.

A row against a matrix is bound by reading the matrix, and in the code predictor by the number of kernels. Every
prologue and epilogue is a constant of the kernel:

    NORM   RMSNorm of x. Its weight is applied to x, the inverse of its root mean square to the product: one pass.
    GATED  weight holds N rows of the gate, then N of the up projection; the result is silu(gate) * up.
    ADD    adds `residual`.
    SCALED weight is float8_e4m3fn, one scale per output row.

With PDL (programmatic dependent launch, Hopper) it starts while the kernels before it still run, asks for its part of
the matrix to be brought into L2, and waits: memory stays busy across kernels. Nothing but weights, which no kernel
writes, is read before the wait. Every sum has a fixed order, and no row sees another one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(weight, first, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for the first AHEAD columns of rows first .. first + BLOCK_N of weight [N, K] to be in L2."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements in the 128 bytes of a line
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
    for start in tl.static_range(0, AHEAD, 16 * LINE):
        columns = tl.minimum(start + tl.arange(0, 16) * LINE, AHEAD - 1)
        address = (weight + rows[:, None] * K + columns[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finish(total, up, added, dtype: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr):
    """What follows the product, rounded as the separate steps would round."""
    total = total.to(dtype).to(tl.float32)
    if GATED:
        total = (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if ADD:
        total += added.to(tl.float32)
    return total.to(dtype)


@triton.jit
def row_linear(
    x,  # [rows, K], x_stride apart
    weight,  # [N, K], or [2 * N, K] when GATED
    scales,  # [N] or [2 * N] float32
    norm,  # [K]
    residual,  # [rows, N]
    out,  # [rows, N]
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # columns of the matrix that are asked for before the wait, at most K
    PDL: tl.constexpr,
):
    """One row and BLOCK_N columns a program, sums on the ordinary units. Grid (N / BLOCK_N, rows)."""
    first, row = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch(weight, first, K, N, BLOCK_N, AHEAD)
        if GATED:
            prefetch(weight + N * K, first, K, N, BLOCK_N, AHEAD)
    n, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = n < N
    place = n[:, None] * K + k[None, :]
    every = tl.zeros((BLOCK_N, 1), tl.int32) + k[None, :]  # x is read where the weight is: nothing to exchange
    mask = inside[:, None] & (every < K)
    w = tl.load(weight + place, mask=mask, other=0.0)  # the first block, before the wait
    u = w
    if GATED:
        u = tl.load(weight + N * K + place, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    target = row * N + n
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up, squares, added = total, total, n
    if ADD:
        added = tl.load(residual + target, mask=inside, other=0.0)
    for start in tl.static_range(0, K, BLOCK_K):
        mask = inside[:, None] & (start + every < K)
        if start > 0:
            w = tl.load(weight + place + start, mask=mask, other=0.0)
            if GATED:
                u = tl.load(weight + N * K + place + start, mask=mask, other=0.0)
        values = tl.load(x + row * x_stride + start + every, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values = values * tl.load(norm + start + every, mask=mask, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * values
        if GATED:
            up += u.to(tl.float32) * values
    result = tl.sum(total, 1)
    gated = result
    if GATED:
        gated = tl.sum(up, 1)
    if SCALED:
        result *= tl.load(scales + n, mask=inside, other=0.0)
        if GATED:
            gated *= tl.load(scales + N + n, mask=inside, other=0.0)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)
        result *= inverse
        gated *= inverse
    tl.store(out + target, finish(result, gated, added, out.dtype.element_ty, GATED, ADD), mask=inside)
