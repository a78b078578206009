# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_conv, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_conv import checked_sizes
from deepspeed_hybrid.ops.gdn_decode import L2_EPS
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.hopper_math import rounded_in_pairs, silu

# A program has RUNS runs of RUN tokens side by side. A row of its tile is a whole cache line of 16-bit channels, or a
# head, which is normalised; of what a run reads, only the few tokens before it are read by another one too.
RUN, RUNS, AHEAD, BLOCK_C = 8, 8, 4, 64
L2 = tl.constexpr(L2_EPS)


@triton.jit
def _column(tile, index: tl.constexpr):
    """Of [C, K]: the sum over the others' zeros."""
    return tl.sum(tl.where((tl.arange(0, tile.shape[1]) == index)[None, :], tile, 0.0), axis=1)


# A length is no reason to compile again: prompts have any.
@triton.jit(do_not_specialize=["length"])
def gdn_conv_kernel(
    qkv,
    row_stride,
    token_stride,
    length,
    window,
    conv_weight,
    conv_bias,
    ring,
    slots,
    lengths,
    query,
    key,
    value,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of channels, tiles of tokens, B). A tile of channels lies in one of q, k and v.

    A run goes from token to token, with the last few in registers, and asks for AHEAD of them at once. Tokens before
    the first come from the window, or are zeros; the last tile writes the ring. Sums run from the newest token to the
    oldest, so that they are the same wherever a sequence is cut.
    """
    announce(PDL)
    followed: tl.constexpr = conv_weight.dtype.element_ty == qkv.dtype.element_ty
    KEY_TILES: tl.constexpr = (KEY_DIM + BLOCK_C - 1) // BLOCK_C
    CHANNELS: tl.constexpr = 2 * KEY_DIM + VALUE_DIM

    tile = tl.program_id(0)
    start = tl.program_id(1) * (RUN * RUNS)
    row = tl.program_id(2).to(tl.int64)  # a row times its size can pass 2^31, as a token times its can
    part = tl.minimum(tile // KEY_TILES, 2)
    column = (tile - part * KEY_TILES) * BLOCK_C + tl.arange(0, BLOCK_C)
    present = column < tl.where(part == 2, VALUE_DIM, KEY_DIM)
    channel = part * KEY_DIM + column

    qkv += row * row_stride + start.to(tl.int64) * token_stride
    if window is not None:
        window += row * (CHANNELS * CONV_KERNEL)
    tap = tl.arange(0, TAPS)
    tap_place = channel[:, None] * CONV_KERNEL + tap[None, :]
    tap_mask = present[:, None] & (tap < CONV_KERNEL)[None, :]

    taps = tl.load(conv_weight + tap_place, mask=tap_mask, other=0.0).to(tl.float32)
    weights = ()
    for back in tl.static_range(CONV_KERNEL):
        weights += (_column(taps, CONV_KERNEL - 1 - back)[None, :],)  # type: ignore[assignment]

    wait(PDL)
    first = tl.arange(0, RUNS)[:, None] * RUN  # of each run, from ``start``
    here = present[None, :]
    known = ()  # the latest token first
    for back in tl.static_range(1, CONV_KERNEL):
        before = start + first - back
        wanted = (before >= 0) & (before < length) & here
        value_before = tl.load(qkv + (first - back) * token_stride + channel[None, :], mask=wanted, other=0.0)
        if window is not None:
            past = window + channel[None, :] * CONV_KERNEL + CONV_KERNEL + before
            value_before += tl.load(past, mask=(before < 0) & here, other=0.0)
        known += (value_before.to(tl.float32),)  # type: ignore[assignment]
    if conv_bias is not None:
        bias = tl.load(conv_bias + channel, mask=present, other=0.0).to(tl.float32)[None, :]
    width = tl.where(part == 2, VALUE_DIM, KEY_DIM)
    out = tl.where(part == 0, query, tl.where(part == 1, key, value))
    out += (row * length + start) * width + column[None, :]

    for step in tl.static_range(0, RUN, AHEAD):
        coming = ()
        for ahead in tl.static_range(AHEAD):
            token = first + step + ahead
            wanted = (start + token < length) & here
            entering = tl.load(qkv + token * token_stride + channel[None, :], mask=wanted, other=0.0)
            coming += (entering,)  # type: ignore[assignment]
        for ahead in tl.static_range(AHEAD):
            token = first + step + ahead
            known = (coming[ahead].to(tl.float32),) + known[: CONV_KERNEL - 1]  # type: ignore[assignment]
            total = known[0] * weights[0]
            for back in tl.static_range(1, CONV_KERNEL):
                total = tl.fma(known[back], weights[back], total)
            if conv_bias is not None:
                total += bias
            total = rounded_in_pairs(followed, total, qkv.dtype.element_ty, PDL)
            total = rounded_in_pairs(followed, silu(total, PDL), qkv.dtype.element_ty, PDL)
            if NORMED:
                if part < 2:  # the half that values are does without
                    total *= tl.rsqrt(tl.sum(total * total, axis=1) + L2)[:, None]
            tl.store(out + token * width, total.to(out.dtype.element_ty), mask=(start + token < length) & here)

    if start + RUN * RUNS >= length:
        last = length - CONV_KERNEL + tap  # in the order of time, as places among the tokens
        latest = tl.load(
            qkv + (last - start)[None, :] * token_stride + channel[:, None],
            mask=tap_mask & (last >= 0)[None, :],
            other=0.0,
        )
        if window is not None:
            kept = tl.load(
                window + channel[:, None] * CONV_KERNEL + (CONV_KERNEL + last)[None, :],
                mask=tap_mask & (last < 0)[None, :],
                other=0.0,
            )
            latest = tl.where((last >= 0)[None, :], latest, kept)
        ring += tl.load(slots + row) * (CHANNELS * CONV_KERNEL)
        column_of = (tl.load(lengths + row) + tap) % CONV_KERNEL
        tl.store(ring + channel[:, None] * CONV_KERNEL + column_of[None, :], latest, mask=tap_mask)


def launch(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    ring: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``gdn_conv`` through the kernel, on CUDA or in Triton's interpreter.

    Arguments, results and what is raised are those of :func:`deepspeed_hybrid.ops.gdn_conv.gdn_conv`.
    """
    sizes = checked_sizes(qkv, window, conv_weight, conv_bias, ring, slots, lengths, key_dim, value_dim, head_dim)
    query, key, value = (qkv.new_empty(sizes.rows, sizes.tokens, width) for width in (key_dim, key_dim, value_dim))
    if sizes.rows == 0:
        return query, key, value
    block_c = head_dim or BLOCK_C
    tiles = 2 * triton.cdiv(key_dim, block_c) + triton.cdiv(value_dim, block_c)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        gdn_conv_kernel[(tiles, triton.cdiv(sizes.tokens, RUN * RUNS), sizes.rows)](
            qkv,
            qkv.stride(0),
            qkv.stride(1),
            sizes.tokens,
            window,
            conv_weight,
            conv_bias,
            ring,
            slots,
            lengths,
            query,
            key,
            value,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            CONV_KERNEL=sizes.kernel,
            TAPS=triton.next_power_of_2(sizes.kernel),
            RUN=RUN,
            RUNS=RUNS,
            AHEAD=min(AHEAD, RUN),
            BLOCK_C=block_c,
            NORMED=head_dim is not None,
            num_warps=max(1, RUNS * block_c // 256),  # 8 channels a thread
            **pdl(qkv),
        )
    return query, key, value
