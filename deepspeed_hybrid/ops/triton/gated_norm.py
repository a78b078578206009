# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The gated RMSNorm of heads, over all tokens of a prompt or of a draft's block."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if

TILE, WARPS = 2048, 8  # elements and warps of a program


# How many tokens there are is no reason to compile again.
@triton.jit(do_not_specialize=["heads_in_all", "tokens"])
def _gate_and_normalise(
    core,
    gate,
    weight,
    counts,
    out,
    heads_in_all,
    tokens,
    row_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_HEADS heads, of one token or several.

    Where there are counts, a column of T has so many rows of B at its top, and zeros come of the others, whatever they
    hold.
    """
    announce(PDL)
    head = tl.program_id(0).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads_in_all)[:, None] & (d < D)
    token = head // HEADS
    place = (token // tokens) * row_stride + (token % tokens) * token_stride + (head % HEADS) * D
    gain = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    wait(PDL)
    there = inside
    if counts is not None:
        count = tl.load(counts + token % tokens, mask=head < heads_in_all, other=0)
        there = inside & (token // tokens < count)[:, None]
    gating = tl.load(gate + place[:, None] + d, mask=there, other=0.0).to(tl.float32)
    value = tl.load(core + head[:, None] * D + d, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    dtype: tl.constexpr = core.dtype.element_ty
    value = rounded_if(weight.dtype.element_ty == dtype, rounded(value * scale, dtype) * gain, dtype)
    value *= gating * tl.sigmoid(gating)
    tl.store(out + head[:, None] * D + d, value.to(out.dtype.element_ty), mask=inside)


def launch(
    core: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the kernel on arguments that the op has checked: core [B, T, HV, DV], gate and result [B, T, HV * DV].

    Args:
        counts: [T] int64, of each column the first rows that there are; the others come out as zeros. None: all are.
    """
    out = core.new_empty(gate.shape)
    rows, tokens, heads, size = core.shape
    block_d = triton.next_power_of_2(size)
    block_heads = max(1, TILE // max(block_d, 32))
    heads_in_all = rows * tokens * heads
    if heads_in_all == 0:
        return out
    with torch.cuda.device_of(core):  # Triton launches on the current device
        _gate_and_normalise[(triton.cdiv(heads_in_all, block_heads),)](
            core,
            gate,
            weight,
            counts,
            out,
            heads_in_all,
            tokens,
            gate.stride(0),
            gate.stride(1),
            eps,
            HEADS=heads,
            D=size,
            BLOCK_D=block_d,
            BLOCK_HEADS=block_heads,
            num_warps=WARPS,
            **pdl(core),
        )
    return out
