# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Triton kernels of attention_decode: programs share the positions of a row, a second kernel merges their parts."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.attention_decode import MAX_SPLITS
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if, weighted

# Programs for 132 multiprocessors, those of the largest Hopper cards. Where a program has few blocks of positions, one
# more at work on a multiprocessor hides what another waits for; where it has many, its own loads run ahead.
FEW_PROGRAMS, MANY_PROGRAMS = 132, 3 * 132
MANY_BLOCKS = 5
# Of a block of threads, where four blocks of keys and values are to be under way.
DEEP_SHARED_BYTES = 160 * 1024
# Values of splits that a program of the second kernel has in its registers.
MOST_COMBINED = 4096
# The tensor cores' smallest tile.
MIN_TILE = 16


@triton.jit
def _norm_and_rotate(
    heads,
    present,
    weight,
    cos,
    sin,
    norm_offset,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Heads as the scores need them, [ROWS, BLOCK_D] fp32; ``heads`` are [ROWS, 1] pointers to their first values."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = R // 2
    dtype: tl.constexpr = heads.dtype.element_ty
    # Rotation mixes a value with its partner half a rotary width away. Each is read twice, so that no two threads have
    # to exchange values.
    partner = tl.where(dims < half, dims + half, dims - half)
    own = tl.load(heads + dims, mask=present & (dims < D), other=0.0).to(tl.float32)
    other = tl.load(heads + partner, mask=present & (dims < R), other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / D + eps)[:, None]
        gain = tl.load(weight + dims, mask=dims < D, other=0.0)
        others = tl.load(weight + partner, mask=dims < R, other=0.0)
        own = rounded(weighted(own * scale, gain, norm_offset, dtype), dtype)
        other = rounded(weighted(other * scale, others, norm_offset, dtype), dtype)
    c = tl.load(cos + dims, mask=dims < R, other=1.0).to(tl.float32)
    s = tl.load(sin + dims, mask=dims < R, other=0.0).to(tl.float32)
    by_cos = rounded_if(cos.dtype.element_ty == dtype, own * c, dtype)
    by_sin = rounded_if(sin.dtype.element_ty == dtype, tl.where(dims < half, -other, other) * s, dtype)
    return by_cos + by_sin


@triton.jit
def _attend(
    projected,
    cos,
    sin,
    keys,
    values,
    position,
    parked,
    q_norm,
    k_norm,
    out,
    partial,
    peaks,
    totals,
    projected_stride,
    cos_stride,
    sin_stride,
    capacity,
    norm_offset,
    eps,
    scale,
    lanes,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    GATED: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    WRITTEN: tl.constexpr,
    DIRECT: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of one key/value head of one row, for all query heads that share it.

    ``scale`` includes log2(e): exponentials are powers of two. WRITTEN is of a block's tokens, in rows token by token,
    of which the cache has all keys and values already.
    """
    announce(PDL)
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    members = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    inside = (members < GROUP)[:, None] & (dims < D)[None, :]
    result = out + (row * HKV * GROUP + heads[:, None]) * D + dims[None, :]

    if tl.load(parked + row):
        wait(PDL)
        if DIRECT:
            tl.store(result, tl.zeros([GROUP_TILE, BLOCK_D], tl.float32), mask=inside)
        return
    # What lies in the cache; the new token comes on top. Blocks are dealt out in turn, so that the splits share the
    # valid length evenly, and only the first splits of a short row have any.
    cached = tl.load(position + row).to(tl.int32)
    if split * BLOCK > cached:
        return
    wait(PDL)

    PER_HEAD: tl.constexpr = 2 * D if GATED else D
    projected += row * projected_stride
    cos += row * cos_stride
    sin += row * sin_stride
    queries = projected + heads[:, None] * PER_HEAD
    q = _norm_and_rotate(
        queries, (members < GROUP)[:, None], q_norm, cos, sin, norm_offset, eps, D, R, BLOCK_D, NORM_Q
    ).to(keys.dtype.element_ty)

    slot = row
    if WRITTEN:
        slot = row % lanes
        cached += 1
    head_start = (slot * HKV + kv_head) * capacity * D
    keys += head_start
    values += head_start
    peak = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, BLOCK_D], tl.float32)
    if not WRITTEN:
        if split == (cached // BLOCK) % splits:
            # The split whose turn it is at the block of the new token. It is the only one that touches this position:
            # the others, and its own loop below, read positions before it. So nobody waits for the write, and the
            # values are taken from registers, rounded as the cache holds them.
            new = projected + GROUP * HKV * PER_HEAD + kv_head * D
            one = tl.arange(0, 1)[:, None]
            k_new = _norm_and_rotate(
                new + one, one == 0, k_norm, cos, sin, norm_offset, eps, D, R, BLOCK_D, NORM_K
            ).to(keys.dtype.element_ty)
            v_new = tl.load(new + HKV * D + one + dims[None, :], mask=dims[None, :] < D, other=0.0)
            place = cached.to(tl.int64) * D + one + dims[None, :]
            tl.store(keys + place, k_new, mask=dims[None, :] < D)
            tl.store(values + place, v_new, mask=dims[None, :] < D)
            peak = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
            total += 1.0
            acc += v_new.to(tl.float32)

    for block in range(split, tl.cdiv(cached, BLOCK), splits):
        index = block * BLOCK + tl.arange(0, BLOCK)
        # Masked loads give zeros, so what lies beyond the row's position cannot spread, not even a NaN.
        valid = index < cached
        k = tl.load(keys + index[None, :] * D + dims[:, None], mask=valid[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(values + index[:, None] * D + dims[None, :], mask=valid[:, None] & (dims < D)[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # Every block of the loop has a valid position: the new peak is finite, and a first peak of -inf weighs 0.
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        faded = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * faded + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
        peak = new_peak

    if DIRECT:
        mixed = acc / total[:, None]
        if GATED:
            gate = tl.load(queries + D + dims[None, :], mask=inside, other=0.0)
            mixed = rounded(mixed, gate.dtype) * rounded(tl.sigmoid(gate.to(tl.float32)), gate.dtype)
        tl.store(result, mixed, mask=inside)
    else:
        part = (row * HKV * GROUP + heads) * splits + split
        tl.store(peaks + part, peak, mask=members < GROUP)
        tl.store(totals + part, total, mask=members < GROUP)
        tl.store(partial + part[:, None] * D + dims[None, :], acc, mask=inside)


@triton.jit
def _combine(
    projected,
    position,
    parked,
    out,
    partial,
    peaks,
    totals,
    projected_stride,
    splits,
    D: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one query head of one row, for BLOCK_D of its dimensions, and apply its gate.

    Everything is asked for at once: there is little of it, and each wait is a microsecond.
    """
    announce(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    entry = row * tl.num_programs(1) + head
    result = out + entry * D + dims
    if tl.load(parked + row):
        wait(PDL)
        tl.store(result, tl.zeros([BLOCK_D], tl.float32), mask=dims < D)
        return
    # Splits without a block wrote nothing: what lies at their places is not theirs.
    active = tl.minimum((tl.load(position + row) // BLOCK).to(tl.int32) + 1, splits)
    wait(PDL)
    peaks += entry * splits
    totals += entry * splits
    partial += entry * splits * D

    if GATED:
        gate = tl.load(projected + row * projected_stride + (2 * head + 1) * D + dims, mask=dims < D, other=0.0)
    index = tl.arange(0, SPLIT_TILE)
    is_active = index < active
    peak = tl.load(peaks + index, mask=is_active, other=float("-inf"))
    totals = tl.load(totals + index, mask=is_active, other=0.0)
    part_mask = is_active[:, None] & (dims < D)[None, :]
    parts = tl.load(partial + index[:, None] * D + dims[None, :], mask=part_mask, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * totals, axis=0)
    mixed = tl.sum(weight[:, None] * parts, axis=0)
    mixed /= total
    if GATED:
        mixed = rounded(mixed, gate.dtype) * rounded(tl.sigmoid(gate.to(tl.float32)), gate.dtype)
    tl.store(result, mixed, mask=dims < D)


def choose_splits(rows: int, kv_heads: int, capacity: int, block: int) -> int:
    """As many as fill the card; 1, which saves the second launch, where the rows alone do."""
    blocks = triton.cdiv(capacity, block)
    splits = max(1, MANY_PROGRAMS // (rows * kv_heads))
    if triton.cdiv(blocks, splits) >= MANY_BLOCKS:
        splits = max(1, FEW_PROGRAMS // (rows * kv_heads))
    return min(splits, blocks, MAX_SPLITS)


def _holds_more(keys: torch.Tensor) -> bool:
    if not keys.is_cuda:
        return False
    return torch.cuda.get_device_properties(keys.device).shared_memory_per_block_optin >= DEEP_SHARED_BYTES


def launch(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    splits: int = 0,
    *,
    lanes: int = 0,
    block: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
) -> torch.Tensor:
    """Run the kernels on arguments that the op has checked.

    Args:
        splits: programs that share a row's positions; 0 chooses by batch size and capacity. Another number is another
            order of a row's sums, so rows have the same bits in batches of different sizes only at a fixed one.
        lanes: rows are tokens of so many slots, token by token, whose keys and values are there; 0: one of each slot.
        block: positions taken at once, a power of two from 16; 0 chooses.
        num_warps, num_stages: of the first kernel; 0 chooses.
    """
    (rows, _), (_, kv_heads, capacity, head_dim) = projected.shape, keys.shape
    out = projected.new_empty(rows, query_heads * head_dim)
    if rows == 0:
        return out
    group = query_heads // kv_heads
    block_d = max(MIN_TILE, triton.next_power_of_2(head_dim))
    block = block or (32 if block_d >= 256 else 64)
    # The tensor cores do not take fp32 as it is: there the products need more registers, and the tiles more memory.
    wide = keys.dtype == torch.float32
    num_warps = num_warps or (8 if wide and block_d >= 256 else 4)
    splits = splits or choose_splits(rows, kv_heads, capacity, block)
    direct = splits == 1
    num_stages = num_stages or (2 if wide else 4 if direct and _holds_more(keys) else 3)
    partial = peaks = totals = None
    if not direct:
        partial = out.new_empty(rows, query_heads, splits, head_dim, dtype=torch.float32)
        peaks, totals = (out.new_empty(rows, query_heads, splits, dtype=torch.float32) for _ in range(2))

    with torch.cuda.device_of(projected):  # Triton launches on the current device
        _attend[(rows, kv_heads, splits)](
            projected,
            cos,
            sin,
            keys,
            values,
            position,
            parked,
            q_norm,
            k_norm,
            out,
            partial,
            peaks,
            totals,
            projected.stride(0),
            cos.stride(0),
            sin.stride(0),
            capacity,
            float(norm_offset),
            float(eps),
            scaling * 1.4426950408889634,
            lanes,
            HKV=kv_heads,
            GROUP=group,
            D=head_dim,
            R=cos.shape[1],
            GATED=gated,
            NORM_Q=q_norm is not None,
            NORM_K=k_norm is not None,
            WRITTEN=lanes > 0,
            DIRECT=direct,
            GROUP_TILE=max(MIN_TILE, triton.next_power_of_2(group)),
            BLOCK_D=block_d,
            BLOCK=block,
            num_warps=num_warps,
            num_stages=num_stages,
            **pdl(projected),
        )
        if not direct:
            split_tile = triton.next_power_of_2(splits)
            part_d = min(block_d, max(MIN_TILE, MOST_COMBINED // split_tile))
            _combine[(rows, query_heads, block_d // part_d)](
                projected,
                position,
                parked,
                out,
                partial,
                peaks,
                totals,
                projected.stride(0),
                splits,
                D=head_dim,
                GATED=gated,
                BLOCK_D=part_d,
                BLOCK=block,
                SPLIT_TILE=split_tile,
                num_warps=4,
                **pdl(projected),
            )
    return out
