# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_conv, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_conv import checked_sizes
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded_if

# A row of a tile is a whole cache line of 16-bit channels, and 3 tokens in 64 are read by two programs.
BLOCK_T, BLOCK_C, WARPS = 64, 64, 4


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
    query,
    key,
    value,
    new_window,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of channels, tiles of tokens, B). A tile of channels lies in one of q, k and v.

    The taps' tiles of tokens are one another's, shifted: all but the first are found in the cache. Tokens before the
    first come from the window, which only the first tile reaches; the last tile writes the new one. Sums run from the
    newest token to the oldest, so that they are the same wherever a sequence is cut.
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
    if start == 0:  # what came from before was zeros so far; it is older, and its turn is now
        past = tl.load(window + tap_place, mask=tap_mask, other=0.0).to(tl.float32)
        for back in tl.static_range(1, CONV_KERNEL):
            for ago in tl.static_range(1, back + 1):
                with_past = tl.fma(_column(past, CONV_KERNEL - ago)[None, :], weights[back], total)
                total = tl.where((token == back - ago)[:, None], with_past, total)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, mask=present, other=0.0).to(tl.float32)[None, :]
    total = rounded_if(conv_weight.dtype.element_ty == qkv.dtype.element_ty, total, qkv.dtype.element_ty)
    total = total / (1.0 + tl.exp(-total))

    place = (row * length + start + token)[:, None]
    stored = (start + token < length)[:, None] & present[None, :]
    if part == 0:
        tl.store(query + place * KEY_DIM + column[None, :], total.to(query.dtype.element_ty), mask=stored)
    elif part == 1:
        tl.store(key + place * KEY_DIM + column[None, :], total.to(key.dtype.element_ty), mask=stored)
    else:
        tl.store(value + place * VALUE_DIM + column[None, :], total.to(value.dtype.element_ty), mask=stored)

    if start + BLOCK_T >= length:
        last = length - CONV_KERNEL + tap  # in the new window, as places among the tokens
        entered = tl.load(
            qkv + (last - start)[None, :] * token_stride + channel[:, None],
            mask=tap_mask & (last >= 0)[None, :],
            other=0.0,
        )
        kept = tl.load(
            window + channel[:, None] * CONV_KERNEL + (CONV_KERNEL + last)[None, :],
            mask=tap_mask & (last < 0)[None, :],
            other=0.0,
        )
        new_window += row * (CHANNELS * CONV_KERNEL)
        tl.store(new_window + tap_place, tl.where((last >= 0)[None, :], entered, kept), mask=tap_mask)


def launch(
    qkv: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    key_dim: int,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``gdn_conv`` through the kernel, on CUDA or in Triton's interpreter.

    Arguments, results and what is raised are those of :func:`deepspeed_hybrid.ops.gdn_conv.gdn_conv`.
    """
    sizes = checked_sizes(qkv, window, conv_weight, conv_bias, key_dim, value_dim)
    query, key, value = (qkv.new_empty(sizes.rows, sizes.tokens, width) for width in (key_dim, key_dim, value_dim))
    new_window = window.new_empty(window.shape)
    if sizes.rows == 0:
        return query, key, value, new_window
    tiles = 2 * triton.cdiv(key_dim, BLOCK_C) + triton.cdiv(value_dim, BLOCK_C)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        gdn_conv_kernel[(tiles, triton.cdiv(sizes.tokens, BLOCK_T), sizes.rows)](
            qkv,
            qkv.stride(0),
            qkv.stride(1),
            sizes.tokens,
            window,
            conv_weight,
            conv_bias,
            query,
            key,
            value,
            new_window,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            CONV_KERNEL=sizes.kernel,
            TAPS=triton.next_power_of_2(sizes.kernel),
            BLOCK_T=BLOCK_T,
            BLOCK_C=BLOCK_C,
            num_warps=WARPS,
            **pdl(qkv),
        )
    return query, key, value, new_window
