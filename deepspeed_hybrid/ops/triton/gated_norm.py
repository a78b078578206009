# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The gated RMSNorm of heads, over all tokens of a prompt or of a draft's block."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.hopper_math import rounded_in_pairs, sigmoid

TILE, WARPS = 2048, 8  # elements and warps of a program


# How many tokens there are is no reason to compile again.
@triton.jit(do_not_specialize=["tokens", "tiles"])
def _gate_and_normalise(
    core,
    gate,
    weight,
    counts,
    out,
    tokens,
    tiles,
    row_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * tiles of a row's heads). One program for BLOCK_HEADS heads, of one token or several of a row.

    Where there are counts, a column of T has so many rows of B at its top, and zeros come of the others, whatever they
    hold.
    """
    announce(PDL)
    row = tl.program_id(0) // tiles
    head = (tl.program_id(0) - row * tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    real = head < tokens * HEADS
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = real[:, None] & (d < D)
    token = head // HEADS
    gate += row.to(tl.int64) * row_stride
    core += row.to(tl.int64) * tokens * (HEADS * D)
    out += row.to(tl.int64) * tokens * (HEADS * D)
    place = head.to(tl.int64)[:, None] * D + d
    place_of_gate = (token.to(tl.int64) * token_stride + (head - token * HEADS) * D)[:, None] + d
    gain = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    wait(PDL)
    there = inside
    if counts is not None:
        there = inside & (row < tl.load(counts + token, mask=real, other=0))[:, None]
    gating = tl.load(gate + place_of_gate, mask=there, other=0.0).to(tl.float32)
    value = tl.load(core + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    dtype: tl.constexpr = core.dtype.element_ty
    value = rounded_in_pairs(True, value * scale, dtype, PDL) * gain
    value = rounded_in_pairs(weight.dtype.element_ty == dtype, value, dtype, PDL)
    value *= gating * sigmoid(gating, PDL)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


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
    tiles = triton.cdiv(tokens * heads, block_heads)
    if rows * tiles == 0:
        return out
    with torch.cuda.device_of(core):  # Triton launches on the current device
        _gate_and_normalise[(rows * tiles,)](
            core,
            gate,
            weight,
            counts,
            out,
            tokens,
            tiles,
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
