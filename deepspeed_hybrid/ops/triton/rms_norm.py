# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""RMSNorm of rows, for the products that do not fold it in."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

TILE = 2048  # elements of a program: rows of a head are short, and a program for each would have idle warps


# How many rows there are is no reason to compile again.
@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x,
    weight,
    out,
    rows,
    x_stride,
    offset,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_ROWS rows, which stay in registers."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = (row < rows) & (k < K)
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / K + eps)[:, None]
    value *= scale * (tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32) + offset)
    tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=inside)


def launch(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """[M, K] -> [M, K] in x's dtype: x * rsqrt(mean(x^2) + eps) * (weight + offset), rounded once.

    The shape of a program follows from K alone, so that a row has the same bits among any others.
    """
    rows, k = x.shape
    out = x.new_empty(x.shape)
    block_k = triton.next_power_of_2(k)
    block_rows = max(1, TILE // max(block_k, 32))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _normalise[(triton.cdiv(rows, block_rows),)](
            x,
            weight,
            out,
            rows,
            x.stride(0),
            offset,
            eps,
            K=k,
            BLOCK_K=block_k,
            BLOCK_ROWS=block_rows,
            num_warps=4 if k <= 4096 else 8,
            **pdl(x),
        )
    return out
