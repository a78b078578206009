# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of rotary_tables, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

BLOCK = 128  # angles of a program


# How many tokens there are, and where their positions lie, is no reason to compile again.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions"])
def _tables(
    positions,
    inv_freq,
    cos,
    sin,
    tokens,
    scaling,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK angles, of which a token has HALF; each is written twice."""
    announce(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, dim = index // HALF, index % HALF
    inside = token < tokens
    rate = tl.load(inv_freq + dim, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    angle = tl.load(positions + token, mask=inside, other=0).to(tl.float32) * rate
    place = token * (2 * HALF) + dim
    c = (tl.cos(angle) * scaling).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    tl.store(cos + place, c, mask=inside)
    tl.store(cos + place + HALF, c, mask=inside)
    tl.store(sin + place, s, mask=inside)
    tl.store(sin + place + HALF, s, mask=inside)


def launch(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rotary_tables`` through the kernel, on arguments that the op has checked."""
    half = inv_freq.shape[0]
    shape = (*positions.shape, 2 * half)
    cos, sin = (positions.new_empty(shape, dtype=dtype) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    tokens = positions.numel()
    with torch.cuda.device_of(positions):  # Triton launches on the current device
        _tables[(triton.cdiv(tokens * half, BLOCK),)](
            positions,
            inv_freq,
            cos,
            sin,
            tokens,
            float(scaling),
            HALF=half,
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,
            **pdl(positions),
        )
    return cos, sin
