# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The sigmoid gate of heads, over all tokens of a prompt."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded

TILE = 4096  # elements of a program


# How many tokens there are is no reason to compile again.
@triton.jit(do_not_specialize=["heads_in_all", "tokens"])
def _gate(
    mixed,
    gate,
    out,
    heads_in_all,
    tokens,
    mixed_row_stride,
    mixed_token_stride,
    mixed_head_stride,
    gate_row_stride,
    gate_token_stride,
    gate_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_HEADS heads, of one token or several."""
    announce(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (at < heads_in_all)[:, None] & (d < D)
    head, token, row = at % HEADS, (at // HEADS) % tokens, at // HEADS // tokens
    of_mixed = row * mixed_row_stride + token * mixed_token_stride + head * mixed_head_stride
    of_gate = row * gate_row_stride + token * gate_token_stride + head * gate_head_stride
    wait(PDL)
    value = tl.load(mixed + of_mixed[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + of_gate[:, None] + d, mask=inside, other=0.0).to(tl.float32))
    value *= rounded(opened, gate.dtype.element_ty)
    tl.store(out + at[:, None] * D + d, value.to(out.dtype.element_ty), mask=inside)


def launch(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run the kernel on arguments that the op has checked: mixed and gate [B, T, H, D], the result [B, T, H * D]."""
    rows, tokens, heads, size = mixed.shape
    out = mixed.new_empty(rows, tokens, heads * size)
    block_d = triton.next_power_of_2(size)
    block_heads = max(1, TILE // max(block_d, 32))
    heads_in_all = rows * tokens * heads
    if heads_in_all == 0:
        return out
    with torch.cuda.device_of(mixed):  # Triton launches on the current device
        _gate[(triton.cdiv(heads_in_all, block_heads),)](
            mixed,
            gate,
            out,
            heads_in_all,
            tokens,
            *mixed.stride()[:3],
            *gate.stride()[:3],
            HEADS=heads,
            D=size,
            BLOCK_D=block_d,
            BLOCK_HEADS=block_heads,
            num_warps=4,
            **pdl(mixed),
        )
    return out
