"""Triton kernels for linear layers over a handful of rows, with the steps around them: RMSNorm before, SwiGLU or the
residual after.

A few rows against a matrix are bound by reading the matrix, and in the code predictor by the number of kernels. Both
kernels take every prologue and epilogue as constants:

    NORM   RMSNorm of x. Its weight is applied to x, the inverse of its root mean square to the product: one pass.
    GATED  weight holds N rows of the gate, then N of the up projection; the result is silu(gate) * up.
    ADD    adds `residual`.
    SCALED weight is float8_e4m3fn, one scale per output row.

With PDL (programmatic dependent launch, Hopper) a kernel starts while those before it still run, asks for its part of
the matrix to be brought into L2, and waits: memory stays busy across kernels. Nothing but weights, which no kernel
writes, is read before the wait. Every sum has a fixed order, and no row sees another one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(weight, first, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask for rows first .. first + BLOCK_N of weight [N, K] to be in L2."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements in the 128 bytes of a line
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
    for start in tl.static_range(0, K, 16 * LINE):
        columns = tl.minimum(start + tl.arange(0, 16) * LINE, K - 1)
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


@triton.jit(do_not_specialize=["rows"])
def row_linear(
    x,  # [rows, K], x_stride apart
    weight,  # [N, K], or [2 * N, K] when GATED
    scales,  # [N] or [2 * N] float32
    norm,  # [K]
    residual,  # [rows, N]
    out,  # [rows, N]
    rows,
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
    PDL: tl.constexpr,
):
    """One row and BLOCK_N columns a program, sums on the ordinary units. Grid (N / BLOCK_N, rows)."""
    first, row = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch(weight, first, K, N, BLOCK_N)
        if GATED:
            prefetch(weight + N * K, first, K, N, BLOCK_N)
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


@triton.jit(do_not_specialize=["rows"])
def tile_linear(
    x,  # as in row_linear
    weight,
    scales,
    norm,
    residual,
    out,
    rows,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # parts of K that are summed side by side, by different warps, and then together
    WIDE: tl.constexpr,  # multiply in float32: for float32, and for Triton's interpreter, which has no bfloat16 dot
    PDL: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns a program, sums on the tensor cores. Grid (N / BLOCK_N, rows / BLOCK_M)."""
    first = tl.program_id(0) * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch(weight, first, K, N, BLOCK_N)
        if GATED:
            prefetch(weight + N * K, first, K, N, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    STEP: tl.constexpr = SPLIT * BLOCK_K
    AXIS: tl.constexpr = 1 if SPLIT == 1 else 2
    m, n = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    part, k = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K, tl.arange(0, BLOCK_K)
    if SPLIT == 1:
        kx, kw, row, column = k[None, :], k[:, None], m[:, None], n[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
    else:
        kx, kw, row, column = part + k[None, None, :], part + k[None, :, None], m[None, :, None], n[None, None, :]
        total = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((SPLIT, BLOCK_M), tl.float32)
    up, added = total, n
    target, target_mask = m[:, None].to(tl.int64) * N + n[None, :], (m[:, None] < rows) & (n[None, :] < N)
    if ADD:
        added = tl.load(residual + target, mask=target_mask, other=0.0)
    x_at, weight_at, norm_at = x + row.to(tl.int64) * x_stride + kx, weight + column * K + kw, norm + kx
    for start in range(0, K, STEP):
        x_mask, weight_mask = row < rows, column < N
        if K % STEP != 0:
            x_mask, weight_mask = x_mask & (start + kx < K), weight_mask & (start + kw < K)
        values = tl.load(x_at + start, mask=x_mask, other=0.0)
        if NORM:
            values = values.to(tl.float32)
            squares += tl.sum(values * values, AXIS)
            if K % STEP != 0:
                values = (values * tl.load(norm_at + start, mask=start + kx < K, other=0.0).to(tl.float32)).to(dtype)
            else:
                values = (values * tl.load(norm_at + start).to(tl.float32)).to(dtype)
        w = tl.load(weight_at + start, mask=weight_mask, other=0.0).to(dtype)
        if WIDE:
            total = tl.dot(values.to(tl.float32), w.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(values, w, total)
        if GATED:
            u = tl.load(weight_at + N * K + start, mask=weight_mask, other=0.0).to(dtype)
            if WIDE:
                up = tl.dot(values.to(tl.float32), u.to(tl.float32), up, input_precision="ieee")
            else:
                up = tl.dot(values, u, up)
    if SPLIT > 1:
        total, squares = tl.sum(total, 0), tl.sum(squares, 0)
        if GATED:
            up = tl.sum(up, 0)
        else:
            up = total
    if SCALED:
        total *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales + N + n, mask=n < N, other=0.0)[None, :]
    if NORM:
        inverse = 1.0 / tl.sqrt(squares / K + eps)
        total *= inverse[:, None]
        if GATED:
            up *= inverse[:, None]
    tl.store(out + target, finish(total, up, added, dtype, GATED, ADD), mask=target_mask)
