# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Products of a few rows with a large weight, [M, K] x [N, K]^T, whose time is that of reading the weight once.

RMSNorm has no pass of its own. 1 / rms is a factor of a whole row, which the product before does not know yet: it
stores x * (norm weight) and, for every tile of columns, the row's sum of squares. The product behind sums these and
applies the factor at its end, before bias or silu(gate) * up.

One row runs on the CUDA cores, and a program holds all of its weight in registers, loaded before it waits for the
kernel ahead. Several rows run on the tensor cores, whose tile has 16 rows at least. Where N has too few tiles to fill
the card, K is split: partial sums go to memory, and the program that arrives last adds them in their order, so that
the result does not depend on who came first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

MIN_TILE = 16
MULTIPROCESSORS = 132
MOST_SPLIT_TILES = 4096


class Launch(NamedTuple):
    """Columns of a tile, warps; for several rows also elements of K a turn, parts of K, turns loaded ahead."""

    block_n: int
    warps: int
    block_k: int = 0
    split: int = 1
    stages: int = 1


@triton.jit
def _factors(squares, parts, M, m, eps, K: tl.constexpr, CHUNK: tl.constexpr):
    """1 / rms of rows ``m`` from their partial sums of squares [parts, M], added in order."""
    total = tl.zeros(m.shape, tl.float32)
    part = tl.arange(0, CHUNK)
    for start in range(0, parts, CHUNK):
        at = start + part
        total += tl.sum(
            tl.load(squares + at[:, None] * M + m[None, :], mask=(at < parts)[:, None] & (m < M)[None, :], other=0.0),
            axis=0,
        )
    return tl.rsqrt(total / K + eps)


@triton.jit
def _finish(
    product,
    up,
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
    tile,
    m,
    columns,
    M,
    N,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Products of a tile, [rows, BLOCK_N] fp32, into memory, and what the next norm needs of them."""
    inside = (m < M)[:, None] & (columns < N)[None, :]
    place = m.to(tl.int64)[:, None] * N + columns[None, :]
    if NORMED:
        factor = _factors(squares, parts, M, m, eps, K, CHUNK)[:, None]
        product *= factor
        if GLU:
            up *= factor
    if BIASED:
        product += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if GLU:
        product = product / (1.0 + tl.exp(-product)) * up
    if ADDED:
        product += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    rounded = product.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=inside)
    if ADDED:
        hidden = tl.where(inside, rounded.to(tl.float32), 0.0)  # the norm sees what the layer behind it sees
        gain = tl.load(next_norm + columns, mask=columns < N, other=0.0).to(tl.float32) + next_offset
        tl.store(scaled + place, (hidden * gain[None, :]).to(scaled.dtype.element_ty), mask=inside)
        tl.store(next_squares + tile * M + m, tl.sum(hidden * hidden, axis=1), mask=m < M)


@triton.jit
def _one_row(
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
    NORMED: tl.constexpr,
    GLU: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N): BLOCK_N rows of the weight, in two pieces of K since tiles are powers of two."""
    announce(PDL)
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    w_head = tl.load(weight + rows + head[None, :])
    w_tail = tl.load(weight + rows + tail[None, :], mask=(tail < K)[None, :], other=0.0)
    if GLU:
        u_head = tl.load(weight_up + rows + head[None, :])
        u_tail = tl.load(weight_up + rows + tail[None, :], mask=(tail < K)[None, :], other=0.0)
    wait(PDL)
    x_head = tl.load(x + head).to(tl.float32)[None, :]
    x_tail = tl.load(x + tail, mask=tail < K, other=0.0).to(tl.float32)[None, :]
    product = tl.sum(w_head.to(tl.float32) * x_head, axis=1) + tl.sum(w_tail.to(tl.float32) * x_tail, axis=1)
    up = product
    if GLU:
        up = tl.sum(u_head.to(tl.float32) * x_head, axis=1) + tl.sum(u_tail.to(tl.float32) * x_tail, axis=1)
    _finish(
        product[None, :],
        up[None, :],
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
        tile,
        tl.arange(0, 1),
        columns,
        1,
        N,
        K,
        NORMED,
        GLU,
        BIASED,
        ADDED,
        CHUNK,
    )


@triton.jit
def _some_rows(
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
    partial,
    arrivals,
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
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of N, SPLIT): all M rows of x, BLOCK_N rows of the weight, a part of K."""
    announce(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K
    x_rows = x + tl.minimum(m, M - 1)[:, None] * K
    TURNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (TURNS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = PART * SPLIT * BLOCK_K == K
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait(PDL)
    for turn in tl.range(part * PART, part * PART + PART, num_stages=STAGES):
        at = turn * BLOCK_K + k
        if WHOLE:
            w = tl.load(weight + weight_rows + at[:, None])
            value = tl.load(x_rows + at[None, :])
        else:
            w = tl.load(weight + weight_rows + at[:, None], mask=(at < K)[:, None], other=0.0)
            value = tl.load(x_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
        product = tl.dot(value, w, product, input_precision="ieee")
        if GLU:
            if WHOLE:
                w = tl.load(weight_up + weight_rows + at[:, None])
            else:
                w = tl.load(weight_up + weight_rows + at[:, None], mask=(at < K)[:, None], other=0.0)
            up = tl.dot(value, w, up, input_precision="ieee")

    if SPLIT > 1:
        # In memory: products [SPLIT, tiles, BLOCK_M, BLOCK_N], and then those of up.
        tiles = tl.num_programs(0)
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        spread = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_up = partial + SPLIT * tiles * SIZE
        mine = part * tiles + tile
        tl.store(partial + mine * SIZE + spread, product)
        if GLU:
            tl.store(partial_up + mine * SIZE + spread, up)
        tl.debug_barrier()  # all threads have stored before one of them counts the arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrivals + tile, 0)  # as the next launch expects it
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in range(SPLIT):
            theirs = (other * tiles + tile) * SIZE + spread
            product += tl.load(partial + theirs, cache_modifier=".cg")
            if GLU:
                up += tl.load(partial_up + theirs, cache_modifier=".cg")
    _finish(
        product,
        up,
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
        tile,
        m,
        columns,
        M,
        N,
        K,
        NORMED,
        GLU,
        BIASED,
        ADDED,
        CHUNK,
    )


_ARRIVALS: dict[torch.device, torch.Tensor] = {}


def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters at zero, one for a tile, of one address for as long as the process lives: every launch leaves zeros."""
    if device not in _ARRIVALS:
        _ARRIVALS[device] = torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)
    return _ARRIVALS[device]


def choose(m: int, n: int, k: int, glu: bool) -> Launch:
    """A launch for a shape: enough tiles in flight for every multiprocessor, and no more reads of x than need be."""
    if m == 1:
        columns = max(1, 16384 // triton.next_power_of_2(k))
        if n >= 100000:
            columns *= 2
        return Launch(block_n=max(1, columns // 2) if glu else columns, warps=4 if k <= 4096 else 8)
    block_n = 64 if glu or n < 4096 else 128
    tiles, split = triton.cdiv(n, block_n), 1
    while tiles * split < MULTIPROCESSORS and split < 4 and tiles <= MOST_SPLIT_TILES:
        split *= 2
    return Launch(block_n=block_n, warps=4, block_k=128 if m <= 16 else 64, split=split, stages=4)


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
    """Run a kernel on arguments that the op has checked.

    Args:
        x: [M, K], times the norm's weight where ``squares`` [parts, M] are given.
        residual, next_norm: together or not at all; then also returned are the sum times the norm's weight, [M, N],
            and its partial sums of squares, [tiles, M] fp32.
        how: in place of the choice for the shape.
    """
    (m, k), n = x.shape, weight.shape[0] // (2 if glu else 1)
    how = how or choose(m, n, k, glu)
    tiles = triton.cdiv(n, how.block_n)
    out, scaled, next_squares = x.new_empty(m, n), None, None
    if residual is not None:
        scaled, next_squares = x.new_empty(m, n), x.new_empty(tiles, m, dtype=torch.float32)
    operands = (
        x,
        weight,
        weight[n:] if glu else weight,
        squares,
        0 if squares is None else squares.shape[0],
        eps,
        bias,
        residual,
        out,
        next_norm,
        next_offset,
        scaled,
        next_squares,
    )
    flags = {
        "K": k,
        "NORMED": squares is not None,
        "GLU": glu,
        "BIASED": bias is not None,
        "ADDED": residual is not None,
        "BLOCK_N": how.block_n,
        "num_warps": how.warps,
        **pdl(x),
    }
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if m == 1:
            head = 1 << (k.bit_length() - 1)
            tail = max(MIN_TILE, triton.next_power_of_2(k - head))
            _one_row[(tiles,)](*operands, n, HEAD=head, TAIL=tail, CHUNK=1024, **flags)
            return out, scaled, next_squares
        block_m = max(MIN_TILE, triton.next_power_of_2(m))
        partial = arrivals = None
        if how.split > 1:
            size = how.split * tiles * block_m * how.block_n * (2 if glu else 1)
            partial, arrivals = x.new_empty(size, dtype=torch.float32), _arrivals(x.device)
        _some_rows[(tiles, how.split)](
            *operands,
            partial,
            arrivals,
            m,
            n,
            BLOCK_M=block_m,
            BLOCK_K=how.block_k,
            SPLIT=how.split,
            STAGES=how.stages,
            CHUNK=32,
            **flags,
        )
    return out, scaled, next_squares
