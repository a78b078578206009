# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""RMSNorm of rows, for the products that do not fold it in."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait


@triton.jit
def _normalise(x, weight, out, x_stride, offset, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """One program for a row, which stays in registers."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    value = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / K + eps)
    value *= scale * (tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32) + offset)
    tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=k < K)


def launch(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """[M, K] -> [M, K] in x's dtype: x * rsqrt(mean(x^2) + eps) * (weight + offset), rounded once."""
    out = x.new_empty(x.shape)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _normalise[(x.shape[0],)](
            x,
            weight,
            out,
            x.stride(0),
            offset,
            eps,
            K=x.shape[1],
            BLOCK_K=triton.next_power_of_2(x.shape[1]),
            num_warps=4 if x.shape[1] <= 4096 else 8,
            **pdl(x),
        )
    return out
