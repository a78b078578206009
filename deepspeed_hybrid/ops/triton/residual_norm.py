# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What follows a library's product before the next one: residual and RMSNorm, in one pass over the rows."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, weighted


@triton.jit
def _add_and_normalise(
    product,
    residual,
    weight,
    hidden,
    normed,
    offset,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row, which stays in registers."""
    announce(PDL)
    row = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK_N)
    inside = n < N
    gain = tl.load(weight + n, mask=inside, other=0.0)
    wait(PDL)
    value = tl.load(product + row + n, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row + n, mask=inside, other=0.0).to(tl.float32)
    value = rounded(value, hidden.dtype.element_ty)  # the norm sees what its layer sees
    tl.store(hidden + row + n, value.to(hidden.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / N + eps)
    value = weighted(value * scale, gain, offset, normed.dtype.element_ty)
    tl.store(normed + row + n, value.to(normed.dtype.element_ty), mask=inside)


def launch(
    product: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    offset: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """product and residual [M, N] -> their sum, and its RMSNorm with ``weight + offset``: [M, N]."""
    hidden, normed = torch.empty_like(residual), torch.empty_like(residual)
    rows, n = residual.shape
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        _add_and_normalise[(rows,)](
            product,
            residual,
            weight,
            hidden,
            normed,
            offset,
            eps,
            N=n,
            BLOCK_N=triton.next_power_of_2(n),
            num_warps=4 if n <= 4096 else 8,
            **pdl(residual),
        )
    return hidden, normed
