# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of keep_tokens, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

TILE = 2048  # elements of a program, of keys and of values


# How many tokens there are, and how long a slot is, is no reason to compile again.
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _keep(
    keys,
    values,
    key,
    value,
    slots,
    positions,
    tokens,
    capacity,
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
    PDL: tl.constexpr,
):
    """Grid (tiles of tokens, heads, rows)."""
    announce(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    real = token < tokens
    inside = real[:, None] & (d < D)
    wait(PDL)
    slot = tl.load(slots + row)
    position = tl.load(positions + row * tokens + token, mask=real, other=0)
    target = (((slot * H + head) * capacity + position) * D)[:, None] + d
    token = token.to(tl.int64)[:, None]
    source = row * key_row_stride + head * key_head_stride + token * key_token_stride + d
    tl.store(keys + target, tl.load(key + source, mask=inside, other=0.0), mask=inside)
    source = row * value_row_stride + head * value_head_stride + token * value_token_stride + d
    tl.store(values + target, tl.load(value + source, mask=inside, other=0.0), mask=inside)


def launch(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Run the kernel on arguments that the op has checked."""
    rows, heads, tokens, size = key.shape
    if key.numel() == 0:
        return
    block_d = triton.next_power_of_2(size)
    block_t = max(1, TILE // max(block_d, 32))
    with torch.cuda.device_of(keys):  # Triton launches on the current device
        _keep[(triton.cdiv(tokens, block_t), heads, rows)](
            keys,
            values,
            key,
            value,
            slots,
            positions,
            tokens,
            keys.shape[2],
            *key.stride()[:3],
            *value.stride()[:3],
            H=heads,
            D=size,
            BLOCK_D=block_d,
            BLOCK_T=block_t,
            num_warps=4,
            **pdl(keys),
        )
