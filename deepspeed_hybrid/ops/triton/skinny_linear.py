# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Products of a few rows with a large weight, [M, K] x [N, K]^T, whose time is that of reading the weight once.

RMSNorm is folded in without a pass of its own: 1 / rms is a factor of a whole row, so the product runs over
x * (norm weight), the sum of squares is taken on the way, and the factor is applied at the end. Behind the product
come a bias, silu(gate) * up over the two halves of the weight, or the residual.

One row runs on the CUDA cores, several on the tensor cores, whose tile has 16 rows at least. Where N has too few tiles
to fill the card, K is split: partial sums go to memory, and the program that arrives last adds them in their order, so
that the result does not depend on who came first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MIN_TILE = 16


class Launch(NamedTuple):
    """Columns of a tile, elements of K a turn, parts of K, warps, and turns that are loaded ahead."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


@triton.jit
def _finish(
    product,
    up,
    square,
    bias,
    residual,
    out,
    eps,
    place,
    columns,
    inside,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Products of a tile, [rows, BLOCK_N] fp32, into ``out``; ``square`` [rows] are the rows' sums of squares."""
    if NORMED:
        scale = tl.rsqrt(square / K + eps)[:, None]
        product *= scale
        if GLU:
            up *= scale
    if BIASED:
        product += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GLU:
        product = product / (1.0 + tl.exp(-product)) * up
    if ADDED:
        product += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _one_row(
    x,
    weight,
    weight_up,
    norm,
    bias,
    residual,
    out,
    x_stride,
    norm_offset,
    eps,
    N,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of N, rows): one row of x, BLOCK_N rows of the weight."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)
    x += row.to(tl.int64) * x_stride
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + k
        if K % BLOCK_K == 0:
            w = tl.load(weight + weight_rows + at[None, :])
            value = tl.load(x + at).to(tl.float32)
        else:
            w = tl.load(weight + weight_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORMED:
            squares += value * value
            value *= tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32) + norm_offset
        sums += w.to(tl.float32) * value[None, :]
        if GLU:
            if K % BLOCK_K == 0:
                w = tl.load(weight_up + weight_rows + at[None, :])
            else:
                w = tl.load(weight_up + weight_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
            sums_up += w.to(tl.float32) * value[None, :]
    _finish(
        tl.sum(sums, axis=1)[None, :],
        tl.sum(sums_up, axis=1)[None, :],
        tl.sum(squares, axis=0) + tl.zeros([1], tl.float32),
        bias,
        residual,
        out,
        eps,
        row.to(tl.int64) * N + columns[None, :],
        columns[None, :],
        (columns < N)[None, :],
        K,
        NORMED,
        GLU,
        BIASED,
        ADDED,
    )


@triton.jit
def _some_rows(
    x,
    weight,
    weight_up,
    norm,
    bias,
    residual,
    out,
    partial,
    arrivals,
    x_stride,
    norm_offset,
    eps,
    M,
    N,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tiles of N, SPLIT): all M rows of x, BLOCK_N rows of the weight, a part of K."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    TURNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (TURNS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = PART * SPLIT * BLOCK_K == K
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for turn in tl.range(part * PART, part * PART + PART, num_stages=STAGES):
        at = turn * BLOCK_K + k
        if WHOLE:
            w = tl.load(weight + weight_rows + at[:, None])
            value = tl.load(x_rows + at[None, :])
        else:
            w = tl.load(weight + weight_rows + at[:, None], mask=(at < K)[:, None], other=0.0)
            value = tl.load(x_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
        if NORMED:
            wide = value.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            scale = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32) + norm_offset
            value = (wide * scale[None, :]).to(value.dtype)
        product = tl.dot(value, w, product, input_precision="ieee")
        if GLU:
            if WHOLE:
                w = tl.load(weight_up + weight_rows + at[:, None])
            else:
                w = tl.load(weight_up + weight_rows + at[:, None], mask=(at < K)[:, None], other=0.0)
            up = tl.dot(value, w, up, input_precision="ieee")

    if SPLIT > 1:
        # In memory: products [SPLIT, tiles, BLOCK_M, BLOCK_N], then those of up, then squares [SPLIT, tiles, BLOCK_M].
        tiles = tl.num_programs(0)
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        spread = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_up = partial + SPLIT * tiles * SIZE
        squares = partial_up + (SPLIT * tiles * SIZE if GLU else 0)
        mine = part * tiles + tile
        tl.store(partial + mine * SIZE + spread, product)
        if GLU:
            tl.store(partial_up + mine * SIZE + spread, up)
        if NORMED:
            tl.store(squares + mine * BLOCK_M + m, square)
        tl.debug_barrier()  # all threads have stored before one of them counts the arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrivals + tile, 0)  # as the next launch expects it
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        square = tl.zeros([BLOCK_M], tl.float32)
        for other in range(SPLIT):
            theirs = other * tiles + tile
            product += tl.load(partial + theirs * SIZE + spread, cache_modifier=".cg")
            if GLU:
                up += tl.load(partial_up + theirs * SIZE + spread, cache_modifier=".cg")
            if NORMED:
                square += tl.load(squares + theirs * BLOCK_M + m, cache_modifier=".cg")
    _finish(
        product,
        up,
        square,
        bias,
        residual,
        out,
        eps,
        m.to(tl.int64)[:, None] * N + columns[None, :],
        columns[None, :],
        (m < M)[:, None] & (columns < N)[None, :],
        K,
        NORMED,
        GLU,
        BIASED,
        ADDED,
    )


_ARRIVALS: dict[torch.device, torch.Tensor] = {}


def _arrivals(device: torch.device, tiles: int) -> torch.Tensor:
    """Counters at zero, one for a tile, of one address for as long as the process lives: every launch leaves zeros."""
    if device not in _ARRIVALS:
        _ARRIVALS[device] = torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)
    return _ARRIVALS[device]


MOST_SPLIT_TILES = 4096


def choose(m: int, n: int, k: int, glu: bool) -> Launch:
    """A launch for a shape: enough tiles in flight for every multiprocessor, and no more reads of x than need be."""
    if m == 1:
        return Launch(block_n=8 if n >= 8192 else 4, block_k=512, split=1, warps=4, stages=2)
    block_n = 32 if m <= 16 else 64
    if glu:
        block_n //= 2
    tiles = triton.cdiv(n, block_n)
    split = 1
    while tiles * split < 132 and split < 8 and tiles <= MOST_SPLIT_TILES:
        split *= 2
    return Launch(block_n=block_n, block_k=128, split=split, warps=4, stages=4 if m <= 32 else 3)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    glu: bool,
    how: Launch | None = None,
) -> torch.Tensor:
    """Run a kernel on arguments that the op has checked, with ``how`` in place of the choice for the shape."""
    (m, k), n = x.shape, weight.shape[0] // (2 if glu else 1)
    out = x.new_empty(m, n)
    how = how or choose(m, n, k, glu)
    flags = {
        "NORMED": norm is not None,
        "GLU": glu,
        "BIASED": bias is not None,
        "ADDED": residual is not None,
        "BLOCK_N": how.block_n,
        "BLOCK_K": how.block_k,
        "STAGES": how.stages,
        "num_warps": how.warps,
    }
    operands = (x, weight, weight[n:] if glu else weight, norm, bias, residual, out)
    tiles = triton.cdiv(n, how.block_n)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if m == 1:
            _one_row[(tiles, m)](*operands, x.stride(0), norm_offset, eps, n, K=k, **flags)
            return out
        block_m = max(MIN_TILE, triton.next_power_of_2(m))
        partial = arrivals = None
        if how.split > 1:
            size = how.split * tiles * block_m * (how.block_n * (2 if glu else 1) + 1)
            partial, arrivals = x.new_empty(size, dtype=torch.float32), _arrivals(x.device, tiles)
        _some_rows[(tiles, how.split)](
            *operands,
            partial,
            arrivals,
            x.stride(0),
            norm_offset,
            eps,
            m,
            n,
            K=k,
            BLOCK_M=block_m,
            SPLIT=how.split,
            **flags,
        )
    return out
