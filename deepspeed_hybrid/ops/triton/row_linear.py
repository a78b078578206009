# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The product of one row with a large weight, [1, K] x [N, K]^T, whose time is that of reading the weight once.

RMSNorm has no pass of its own. 1 / rms is a factor of the whole row, which the product before does not know yet: it
stores x * (norm weight) and, for every tile of columns, the sum of squares. The product behind sums these and applies
the factor at its end, before bias or silu(gate) * up.

A program holds all it needs of the weight in registers, and asks for it before it waits for the kernel ahead.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded

SMALLEST_TILE = 16


class Launch(NamedTuple):
    """Columns of a tile, and warps."""

    block_n: int
    warps: int


@triton.jit
def row_linear_kernel(
    x,
    weight,
    weight_up,
    squares,
    parts,
    eps,
    bias,
    residual,
    out,
    next_norm,
    next_offset,
    scaled,
    next_squares,
    N,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N): BLOCK_N rows of the weight, in two pieces of K because tiles are powers of two."""
    announce(PDL)
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    rows = tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    w_head = tl.load(weight + rows + head[None, :])
    w_tail = tl.load(weight + rows + tail[None, :], mask=(tail < K)[None, :], other=0.0)
    if GLU:
        u_head = tl.load(weight_up + rows + head[None, :])
        u_tail = tl.load(weight_up + rows + tail[None, :], mask=(tail < K)[None, :], other=0.0)
    if BIASED:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        gain = tl.load(next_norm + columns, mask=inside, other=0.0).to(tl.float32) + next_offset

    wait(PDL)
    # Everything that the kernels ahead wrote is asked for before the first of it is used.
    if NORMED:
        part = tl.arange(0, PARTS)
        square = tl.load(squares + part, mask=part < parts, other=0.0)
    if ADDED:
        before = tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
    x_head = tl.load(x + head).to(tl.float32)[None, :]
    x_tail = tl.load(x + tail, mask=tail < K, other=0.0).to(tl.float32)[None, :]

    product = tl.sum(w_head.to(tl.float32) * x_head, axis=1) + tl.sum(w_tail.to(tl.float32) * x_tail, axis=1)
    if GLU:
        up = tl.sum(u_head.to(tl.float32) * x_head, axis=1) + tl.sum(u_tail.to(tl.float32) * x_tail, axis=1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(square) / K + eps)
        product *= factor
        if GLU:
            up *= factor
    if BIASED:
        product += shift
    product = rounded(product, out.dtype.element_ty)
    if GLU:
        product = rounded(product / (1.0 + tl.exp(-product)), out.dtype.element_ty)
        product *= rounded(up, out.dtype.element_ty)
    if ADDED:
        product = rounded(product + before, out.dtype.element_ty)
    tl.store(out + columns, product.to(out.dtype.element_ty), mask=inside)
    if ADDED:
        hidden = tl.where(inside, product, 0.0)  # the next norm sees what its layer sees
        tl.store(scaled + columns, (hidden * gain).to(scaled.dtype.element_ty), mask=inside)
        tl.store(next_squares + tile, tl.sum(hidden * hidden))


def choose(k: int) -> Launch:
    """Measured on an H200 at K from 2560 to 9216: more rows a program read no faster, and fewer left warps idle."""
    return Launch(4, 4) if k <= 4096 else Launch(2, 8)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    next_norm: torch.Tensor | None,
    next_offset: float,
    glu: bool,
    how: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the kernel on arguments that the op has checked.

    Args:
        x: [1, K], times the norm's weight where ``squares`` [parts, 1] are given.
        residual, next_norm: together or not at all; then also returned are the sum times the norm's weight, [1, N],
            and its partial sums of squares, [tiles, 1] fp32.
        how: in place of the choice for K.
    """
    k, n = x.shape[1], weight.shape[0] // (2 if glu else 1)
    how = how or choose(k)
    tiles = triton.cdiv(n, how.block_n)
    parts = 0 if squares is None else squares.shape[0]
    out, scaled, next_squares = x.new_empty(1, n), None, None
    if residual is not None:
        scaled, next_squares = x.new_empty(1, n), x.new_empty(tiles, 1, dtype=torch.float32)
    head = 1 << (k.bit_length() - 1)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        row_linear_kernel[(tiles,)](
            x,
            weight,
            weight[n:] if glu else weight,
            squares,
            parts,
            eps,
            bias,
            residual,
            out,
            next_norm,
            next_offset,
            scaled,
            next_squares,
            n,
            K=k,
            HEAD=head,
            TAIL=max(SMALLEST_TILE, triton.next_power_of_2(k - head)),
            PARTS=triton.next_power_of_2(max(1, parts)),
            NORMED=squares is not None,
            GLU=glu,
            BIASED=bias is not None,
            ADDED=residual is not None,
            BLOCK_N=how.block_n,
            num_warps=how.warps,
            **pdl(x),
        )
    return out, scaled, next_squares
