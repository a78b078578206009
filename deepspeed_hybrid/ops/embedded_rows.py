# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a decode step begins with: the embeddings of its tokens, and the first layer's norm of them."""

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.fused_linear import normed_rows_reference
from deepspeed_hybrid.ops.inference import refuse_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def embedded_rows_reference(
    ids: torch.Tensor, table: torch.Tensor, norm: torch.Tensor, norm_offset: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`embedded_rows` does, in plain torch on any device."""
    _check(ids, table, norm)
    hidden = F.embedding(ids, table)
    return (hidden, *normed_rows_reference(hidden, norm, norm_offset, eps))


@torch.library.custom_op("deepspeed_hybrid::embedded_rows", mutates_args=(), device_types="cuda")
def embedded_rows(
    ids: torch.Tensor, table: torch.Tensor, norm: torch.Tensor, norm_offset: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of an embedding, and the RMSNorm of them that comes next.

    On CUDA this is one launch, without a host sync; the first call for a width and dtype compiles it. A row's bits are
    the same in any batch, and those of :func:`~deepspeed_hybrid.ops.fused_linear.normed_rows`. On a CPU it is
    :func:`embedded_rows_reference`. There is no gradient.

    Args:
        ids: [M] int64, contiguous, rows of ``table``. Any other id gives a row of NaN on CUDA, an IndexError on a CPU.
        table: [V, K] fp32, bf16 or fp16, contiguous.
        norm: [K] weight of the RMSNorm in table's dtype; ``norm_offset`` is added to it: 1.0 for norms that store it
            around zero.
        eps: of the norm.

    Returns:
        hidden [M, K] in table's dtype; scaled [M, K] and squares [0, M] of the norm, as
        :mod:`deepspeed_hybrid.ops.fused_linear` defines them.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(ids, table, norm)
    from deepspeed_hybrid.ops.triton.rms_norm import launch_embedded  # here, because a torch for CPUs has no Triton

    return (*launch_embedded(ids, table, norm, norm_offset, eps), _no_squares(ids))


@embedded_rows.register_fake
def _(ids, table, norm, norm_offset, eps):
    shape = (ids.shape[0], table.shape[1])
    return table.new_empty(shape), table.new_empty(shape), _no_squares(ids)


embedded_rows.register_kernel("cpu")(embedded_rows_reference)
refuse_gradients(embedded_rows, "embedded_rows")


def _no_squares(ids: torch.Tensor) -> torch.Tensor:
    return ids.new_empty(0, ids.shape[0], dtype=torch.float32)


def _check(ids: torch.Tensor, table: torch.Tensor, norm: torch.Tensor) -> None:
    if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise RuntimeError(f"ids must be a contiguous vector of int64, got {list(ids.shape)} {ids.dtype}")
    if table.dim() != 2 or table.dtype not in DTYPES or not table.is_contiguous():
        raise RuntimeError(
            f"table must be contiguous [V, K] float32, bfloat16 or float16, got {list(table.shape)} {table.dtype}"
        )
    if norm.shape != table.shape[1:] or norm.dtype != table.dtype or not norm.is_contiguous():
        raise RuntimeError(
            f"norm must be contiguous [{table.shape[1]}] {table.dtype}, got {list(norm.shape)} {norm.dtype}"
        )
    for name, tensor in (("ids", ids), ("norm", norm)):
        if tensor.device != table.device:
            raise RuntimeError(f"{name} is on {tensor.device}, and table on {table.device}")
