# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of draft_context: all heads of one layer of one token a program."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.draft_context import FP8, FP8_LIMIT
from deepspeed_hybrid.ops.triton.attention_decode import _norm_and_rotate
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait


@triton.jit
def _rounded(values, dtype: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT > 0:
        # A NaN stays one.
        values = tl.where(values > LIMIT, LIMIT, tl.where(values < -LIMIT, -LIMIT, values))
    return values.to(dtype)


# How many tokens there are is no reason to compile again.
@triton.jit(do_not_specialize=["lanes"])
def _write(
    product,
    cos,
    sin,
    key_norms,
    keys,
    values,
    slots,
    position,
    idle,
    lanes,
    places,
    eps,
    L: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens, layers)."""
    announce(PDL)
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    if idle is not None:
        if tl.load(idle + row):
            return
    if slots is not None:
        slot = tl.load(slots + row)
    else:
        slot = row % lanes
    head, dims = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (head < G) & (dims < D)
    new = product + (row * L + layer) * 2 * G * D + head * D
    key = _norm_and_rotate(
        new, head < G, key_norms + layer * D, cos + row * R, sin + row * R, 0.0, eps, D, R, BLOCK_D, True
    )
    value = tl.load(new + G * D + dims, mask=inside, other=0.0).to(tl.float32)
    place = ((slot * places + tl.load(position + row)) * L + layer) * G * D + head * D + dims
    tl.store(keys + place, _rounded(key, keys.dtype.element_ty, LIMIT), mask=inside)
    tl.store(values + place, _rounded(value, values.dtype.element_ty, LIMIT), mask=inside)


def launch(
    product: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_norms: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    position: torch.Tensor,
    idle: torch.Tensor | None,
    lanes: int,
    eps: float,
) -> None:
    """Run the kernel on arguments that the op has checked."""
    _, places, layers, heads, head_dim = keys.shape
    if product.shape[0] == 0:
        return
    with torch.cuda.device_of(product):  # Triton launches on the current device
        _write[(product.shape[0], layers)](
            product,
            cos,
            sin,
            key_norms,
            keys,
            values,
            slots,
            position,
            idle,
            lanes,
            places,
            float(eps),
            L=layers,
            G=heads,
            D=head_dim,
            R=cos.shape[1],
            LIMIT=FP8_LIMIT if keys.dtype == FP8 else 0.0,
            BLOCK_G=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=4,
            **pdl(product),
        )
