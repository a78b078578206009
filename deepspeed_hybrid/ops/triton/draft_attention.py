# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Triton kernels of draft_attention: a program reads keys once for all tokens of a block and all heads that share
them; programs share a lane's context, and a second kernel merges their parts."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.attention_decode import MIN_TILE, _norm_and_rotate, choose_splits
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait


def choose_tiles(wide: bool, block_d: int) -> tuple[int, int]:
    """The most queries of a program, and the places it takes at once: what fits a thread's registers, as compiled for
    Hopper. There are no tensor cores for fp32 as it is."""
    if wide:
        return MIN_TILE, 32 if block_d < 128 else 16
    return (64, 64) if block_d <= 128 else (MIN_TILE, 32)


@triton.jit
def _first_block(start, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The first block of the context that a block's first token sees, and so the first that any of them sees."""
    first = start * 0
    if WINDOW:
        first = tl.maximum(start - WINDOW + 1, 0) // BLOCK
    return first


@triton.jit
def _attend(
    projected,
    cos,
    sin,
    keys,
    values,
    start,
    parked,
    q_norm,
    k_norm,
    out,
    partial,
    peaks,
    totals,
    projected_stride,
    slot_stride,
    place_stride,
    eps,
    scale,
    lanes,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (lanes of every tile of queries, key heads, splits). Queries are token by token the heads that share keys.

    ``scale`` includes log2(e): exponentials are powers of two.
    """
    announce(PDL)
    lane, kv_head, split = tl.program_id(0) % lanes, tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    index = tl.program_id(0) // lanes * ROWS + tl.arange(0, ROWS)
    present = index < TOKENS * GROUP
    token = tl.minimum(index // GROUP, TOKENS - 1)  # those that are none read what is there
    head = kv_head * GROUP + index % GROUP
    row = token.to(tl.int64) * lanes + lane
    dims = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (dims < D)[None, :]
    result = out + (row * HKV * GROUP + head)[:, None] * D + dims[None, :]

    if tl.load(parked + lane):
        wait(PDL)
        if DIRECT:
            tl.store(result, tl.zeros([ROWS, BLOCK_D], tl.float32), mask=inside)
        return
    known = tl.load(start + lane).to(tl.int32)
    # Blocks of the context are dealt out in turn, and then the block's own keys, as one more.
    first = _first_block(known, WINDOW, BLOCK)
    end = tl.cdiv(known, BLOCK)
    if split > end - first:
        return
    wait(PDL)

    queries = projected + row[:, None] * projected_stride + head[:, None] * D
    q = _norm_and_rotate(
        queries,
        present[:, None],
        q_norm,
        cos + row[:, None] * R,
        sin + row[:, None] * R,
        0.0,
        eps,
        D,
        R,
        BLOCK_D,
        True,
    ).to(projected.dtype.element_ty)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    if split == (end - first) % splits:
        other = tl.arange(0, TOKEN_TILE)
        there = (other < TOKENS)[:, None]
        source = tl.minimum(other, TOKENS - 1).to(tl.int64)[:, None] * lanes + lane
        new = projected + source * projected_stride + (HKV * GROUP + kv_head) * D
        k_new = _norm_and_rotate(new, there, k_norm, cos + source * R, sin + source * R, 0.0, eps, D, R, BLOCK_D, True)
        v_new = tl.load(new + HKV * D + dims[None, :], mask=there & (dims < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k_new.to(q.dtype)), input_precision="ieee") * scale
        seen = (other < TOKENS)[None, :]
        if CAUSAL:
            seen = seen & (other[None, :] <= token[:, None])
        if WINDOW:
            seen = seen & (other[None, :] > token[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.max(scores, axis=1)  # a token sees itself
        weights = tl.exp2(scores - peak[:, None])
        total = tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v_new.dtype), v_new, input_precision="ieee")

    keys += lane.to(tl.int64) * slot_stride + kv_head * D
    values += lane.to(tl.int64) * slot_stride + kv_head * D
    for block in range(first + split, end, splits):
        place = block * BLOCK + tl.arange(0, BLOCK)
        # Masked loads give zeros, so what lies beyond the context cannot spread, not even a NaN.
        valid = place < known
        where = place.to(tl.int64) * place_stride
        k = tl.load(keys + where[None, :] + dims[:, None], mask=valid[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(values + where[:, None] + dims[None, :], mask=valid[:, None] & (dims < D)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        seen = valid[None, :]
        if WINDOW:
            seen = seen & (place[None, :] > (known + token)[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # With a window a token may have seen nothing yet, and a difference of infinities is none.
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        faded = tl.exp2(peak - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * faded + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * faded[:, None], input_precision="ieee")
        peak = new_peak

    if DIRECT:
        tl.store(result, acc / total[:, None], mask=inside)
    else:
        part = (row * HKV * GROUP + head) * splits + split
        tl.store(peaks + part, peak, mask=present)
        tl.store(totals + part, total, mask=present)
        tl.store(partial + part[:, None] * D + dims[None, :], acc, mask=inside)


@triton.jit
def _merge(
    start,
    parked,
    out,
    partial,
    peaks,
    totals,
    lanes,
    splits,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of one query head of one row, in their order."""
    announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = row * tl.num_programs(1) + tl.program_id(1)
    lane, dims = row % lanes, tl.arange(0, BLOCK_D)
    if tl.load(parked + lane):
        wait(PDL)
        tl.store(out + entry * D + dims, tl.zeros([BLOCK_D], tl.float32), mask=dims < D)
        return
    known = tl.load(start + lane).to(tl.int32)
    # Splits without a block wrote nothing: what lies at their places is not theirs.
    active = tl.minimum(tl.cdiv(known, BLOCK) - _first_block(known, WINDOW, BLOCK) + 1, splits)
    wait(PDL)
    part = tl.arange(0, SPLIT_TILE)
    written = part < active
    peak = tl.load(peaks + entry * splits + part, mask=written, other=float("-inf"))
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(totals + entry * splits + part, mask=written, other=0.0), axis=0)
    sums = partial + (entry * splits + part)[:, None] * D + dims[None, :]
    mixed = tl.sum(weight[:, None] * tl.load(sums, mask=written[:, None] & (dims < D)[None, :], other=0.0), axis=0)
    tl.store(out + entry * D + dims, mixed / total, mask=dims < D)


def launch(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    query_heads: int,
    scaling: float,
    causal: bool,
    window: int,
    *,
    splits: int = 0,
    block: int = 0,
) -> torch.Tensor:
    """Run the kernels on arguments that the op has checked.

    Args:
        splits: programs that share a lane's context; 0 chooses by lanes and places.
        block: places taken at once, a power of two from 16; 0 chooses.
    """
    (rows, _), (_, places, kv_heads, head_dim), lanes = projected.shape, keys.shape, start.shape[0]
    out = projected.new_empty(rows, query_heads * head_dim)
    if rows == 0:
        return out
    tokens, group = rows // lanes, query_heads // kv_heads
    wide = projected.dtype == torch.float32
    block_d = max(MIN_TILE, triton.next_power_of_2(head_dim))
    most, usual = choose_tiles(wide, block_d)
    block = block or usual
    row_tile = min(most, max(MIN_TILE, triton.next_power_of_2(tokens * group)))
    programs = lanes * triton.cdiv(tokens * group, row_tile)
    splits = splits or choose_splits(programs, kv_heads, places, block)
    direct = splits == 1
    partial = peaks = totals = None
    if not direct:
        partial = out.new_empty(rows, query_heads, splits, head_dim, dtype=torch.float32)
        peaks, totals = (out.new_empty(rows, query_heads, splits, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        _attend[(programs, kv_heads, splits)](
            projected,
            cos,
            sin,
            keys,
            values,
            start,
            parked,
            q_norm,
            k_norm,
            out,
            partial,
            peaks,
            totals,
            projected.stride(0),
            keys.stride(0),
            keys.stride(1),
            float(eps),
            scaling * 1.4426950408889634,
            lanes,
            HKV=kv_heads,
            GROUP=group,
            TOKENS=tokens,
            D=head_dim,
            R=cos.shape[1],
            CAUSAL=causal,
            WINDOW=window,
            DIRECT=direct,
            ROWS=row_tile,
            TOKEN_TILE=max(MIN_TILE, triton.next_power_of_2(tokens)),
            BLOCK_D=block_d,
            BLOCK=block,
            num_warps=4,
            num_stages=2 if wide else 3,
            **pdl(projected),
        )
        if not direct:
            _merge[(rows, query_heads)](
                start,
                parked,
                out,
                partial,
                peaks,
                totals,
                lanes,
                splits,
                D=head_dim,
                WINDOW=window,
                BLOCK_D=block_d,
                BLOCK=block,
                SPLIT_TILE=triton.next_power_of_2(splits),
                num_warps=4,
                **pdl(projected),
            )
    return out
