# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""RMSNorm of rows, for the products that do not fold it in; the rows may be picked from an embedding."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import weighted

TILE = 2048  # elements of a program: rows of a head are short, and a program for each would have idle warps


# How many rows there are, and where the ids lie, is no reason to compile again.
@triton.jit(do_not_specialize=["rows", "table_rows"], do_not_specialize_on_alignment=["ids"])
def _normalise(
    x,
    ids,
    hidden,
    weight,
    out,
    rows,
    table_rows,
    x_stride,
    offset,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_ROWS rows, which stay in registers: those of x, or with ``ids`` the ones that they name,
    which then also go to ``hidden``."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = (row < rows) & (k < K)
    if ids is None:
        value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    else:
        source = tl.load(ids + row, mask=row < rows, other=0)
        known = (source >= 0) & (source < table_rows)
        value = tl.load(x + source * x_stride + k, mask=inside & known, other=0.0).to(tl.float32)
        value = tl.where(known, value, float("nan"))
        tl.store(hidden + row * K + k, value.to(hidden.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / K + eps)[:, None]
    gain = tl.load(weight + k, mask=k < K, other=0.0)
    value = weighted(value * scale, gain, offset, out.dtype.element_ty)
    tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=inside)


def launch(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """[M, K] -> [M, K] in x's dtype: x * rsqrt(mean(x^2) + eps) * (weight + offset).

    The shape of a program follows from K alone, so that a row has the same bits among any others.
    """
    out = x.new_empty(x.shape)
    _launch(x, None, None, weight, out, offset, eps)
    return out


def launch_embedded(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, offset: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``ids`` [M] of ``table`` [V, K], and what :func:`launch` makes of them: [M, K] both."""
    hidden, out = (table.new_empty(ids.shape[0], table.shape[1]) for _ in range(2))
    _launch(table, ids, hidden, weight, out, offset, eps)
    return hidden, out


def _launch(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    offset: float,
    eps: float,
) -> None:
    rows, k = out.shape
    if rows == 0:
        return
    block_k = triton.next_power_of_2(k)
    block_rows = max(1, TILE // max(block_k, 32))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _normalise[(triton.cdiv(rows, block_rows),)](
            x,
            ids,
            hidden,
            weight,
            out,
            rows,
            x.shape[0],
            x.stride(0),
            offset,
            eps,
            K=k,
            BLOCK_K=block_k,
            BLOCK_ROWS=block_rows,
            num_warps=4 if k <= 4096 else 8,
            **pdl(x, first=ids is not None),  # embeddings are what a step begins with
        )
