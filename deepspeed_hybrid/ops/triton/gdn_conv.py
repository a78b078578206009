# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_conv, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_conv import checked_sizes
from deepspeed_hybrid.ops.gdn_decode import L2_EPS
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

# A row of a tile is a whole cache line of 16-bit channels, and 3 tokens in 64 are read by two programs. Tiles of
# heads, which are normalised, are as wide as a head and have as many elements.
BLOCK_T, BLOCK_C, WARPS = 64, 64, 4
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
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of channels, tiles of tokens, B). A tile of channels lies in one of q, k and v.

    The taps' tiles of tokens are one another's, shifted: all but the first are found in the cache. Tokens before the
    first come from the window, which only the first tile reaches, or are zeros; the last tile writes the ring. Sums
    run from the newest token to the oldest, so that they are the same wherever a sequence is cut.
    """
    announce(PDL)
    KEY_TILES: tl.constexpr = (KEY_DIM + BLOCK_C - 1) // BLOCK_C
    CHANNELS: tl.constexpr = 2 * KEY_DIM + VALUE_DIM

    tile = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_T
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
    token = tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for back in tl.static_range(CONV_KERNEL):
        source = token - back
        known = (start + source >= 0) & (start + source < length)
        entering = tl.load(
            qkv + source[:, None] * token_stride + channel[None, :],
            mask=known[:, None] & present[None, :],
            other=0.0,
        )
        total = tl.fma(entering.to(tl.float32), weights[back], total)
    if window is not None:
        if start == 0:  # what came from before was zeros so far; it is older, and its turn is now
            past = tl.load(window + tap_place, mask=tap_mask, other=0.0).to(tl.float32)
            for back in tl.static_range(1, CONV_KERNEL):
                for ago in tl.static_range(1, back + 1):
                    with_past = tl.fma(_column(past, CONV_KERNEL - ago)[None, :], weights[back], total)
                    total = tl.where((token == back - ago)[:, None], with_past, total)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, mask=present, other=0.0).to(tl.float32)[None, :]
    total = total / (1.0 + tl.exp(-total))
    if NORMED:
        if part < 2:
            total *= tl.rsqrt(tl.sum(total * total, axis=1) + L2)[:, None]

    place = (row * length + start + token)[:, None]
    stored = (start + token < length)[:, None] & present[None, :]
    if part == 0:
        tl.store(query + place * KEY_DIM + column[None, :], total.to(query.dtype.element_ty), mask=stored)
    elif part == 1:
        tl.store(key + place * KEY_DIM + column[None, :], total.to(key.dtype.element_ty), mask=stored)
    else:
        tl.store(value + place * VALUE_DIM + column[None, :], total.to(value.dtype.element_ty), mask=stored)

    if start + BLOCK_T >= length:
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
    block_t = min(BLOCK_T, BLOCK_T * BLOCK_C // block_c)
    tiles = 2 * triton.cdiv(key_dim, block_c) + triton.cdiv(value_dim, block_c)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        gdn_conv_kernel[(tiles, triton.cdiv(sizes.tokens, block_t), sizes.rows)](
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
            BLOCK_T=block_t,
            BLOCK_C=block_c,
            NORMED=head_dim is not None,
            num_warps=WARPS,
            **pdl(qkv),
        )
    return query, key, value
