# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of keep_tokens, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

TILE = 2048  # elements of a program, of keys and of values
CLEARED = 8  # times as many of a program that writes zeros


# How many tokens there are, and how long a slot is, is no reason to compile again.
@triton.jit(do_not_specialize=["tokens", "capacity", "token_tiles"])
def _keep(
    keys,
    values,
    key,
    value,
    slots,
    positions,
    lengths,
    tokens,
    capacity,
    token_tiles,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CLEARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of tokens, and with lengths tiles of what is behind a row's; heads, rows)."""
    announce(PDL)
    tile = tl.program_id(0)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    wait(PDL)
    base = (tl.load(slots + row) * H + head) * capacity
    if tile < token_tiles:
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        real = token < tokens
        position = tl.load(positions + row * tokens + token, mask=real, other=0)
        if lengths is not None:
            real &= position < tl.load(lengths + row)
        inside = real[:, None] & (d < D)
        target = ((base + position) * D)[:, None] + d
        token = token.to(tl.int64)[:, None]
        source = row * key_row_stride + head * key_head_stride + token * key_token_stride + d
        of_key = tl.load(key + source, mask=inside, other=0.0)
        source = row * value_row_stride + head * value_head_stride + token * value_token_stride + d
        of_value = tl.load(value + source, mask=inside, other=0.0)
        tl.store(keys + target, of_key, mask=inside)
        tl.store(values + target, of_value, mask=inside)
    elif lengths is not None:
        start = tl.load(lengths + row) + (tile - token_tiles) * (BLOCK_T * CLEARED)
        nothing = tl.zeros([BLOCK_T, BLOCK_D], keys.dtype.element_ty)
        end = tl.minimum(capacity, start + BLOCK_T * CLEARED)
        for first in range(start, end, BLOCK_T):
            position = first + tl.arange(0, BLOCK_T)
            inside = (position < end)[:, None] & (d < D)
            target = ((base + position) * D)[:, None] + d
            tl.store(keys + target, nothing, mask=inside)
            tl.store(values + target, nothing, mask=inside)


def launch(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """Run the kernel on arguments that the op has checked."""
    rows, heads, tokens, size = key.shape
    capacity = keys.shape[2]
    if rows * heads * size == 0:
        return
    block_d = triton.next_power_of_2(size)
    block_t = max(1, TILE // max(block_d, 32))
    tiles = token_tiles = triton.cdiv(tokens, block_t)
    if lengths is not None:
        tiles += triton.cdiv(capacity, block_t * CLEARED)
    if tiles == 0:
        return
    with torch.cuda.device_of(keys):  # Triton launches on the current device
        _keep[(tiles, heads, rows)](
            keys,
            values,
            key,
            value,
            slots,
            positions,
            lengths,
            tokens,
            capacity,
            token_tiles,
            *key.stride()[:3],
            *value.stride()[:3],
            H=heads,
            D=size,
            BLOCK_D=block_d,
            BLOCK_T=block_t,
            CLEARED=CLEARED,
            num_warps=4,
            **pdl(keys),
        )
