# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Cosines and sines of a rotary embedding for given positions, as Hugging Face's rotary modules compute them."""

import torch

from deepspeed_hybrid.ops.inference import refuse_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Shapes: B rows, T tokens, R rotated dimensions of a head.


def rotary_tables_reference(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`rotary_tables` does, in plain torch on any device."""
    _check(positions, inv_freq, dtype)
    angles = positions[..., None].float() * inv_freq.float()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([sin, sin], dim=-1).to(dtype)


@torch.library.custom_op("deepspeed_hybrid::rotary_tables", mutates_args=(), device_types="cuda")
def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * inv_freq, times ``scaling``, each half of the columns the same.

    Angles, functions and the product with ``scaling`` are fp32, each rounded as torch rounds them; the result is
    rounded once more to ``dtype``. On CUDA this is one launch, without a host sync; the first call for a set of
    sizes and dtypes compiles it. On a CPU it is :func:`rotary_tables_reference`. There is no gradient.

    Args:
        positions: [B, T] int64, contiguous.
        inv_freq: [R / 2] fp32, bf16 or fp16, contiguous.
        scaling: of both tables, a rotary module's ``attention_scaling``.
        dtype: of the tables: fp32, bf16 or fp16.

    Returns:
        cos and sin, [B, T, R] in ``dtype``, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(positions, inv_freq, dtype)
    from deepspeed_hybrid.ops.triton.rotary_tables import launch  # here, because a torch for CPUs has no Triton

    return launch(positions, inv_freq, scaling, dtype)


@rotary_tables.register_fake
def _(positions, inv_freq, scaling, dtype):
    shape = (*positions.shape, 2 * inv_freq.shape[0])
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


rotary_tables.register_kernel("cpu")(rotary_tables_reference)
refuse_gradients(rotary_tables, "rotary_tables")


def _check(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> None:
    if positions.dim() != 2 or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise RuntimeError(
            f"positions must be contiguous [B, T] int64, got {list(positions.shape)} {positions.dtype} "
            f"with strides {positions.stride()}"
        )
    if inv_freq.dim() != 1 or inv_freq.dtype not in DTYPES or not inv_freq.is_contiguous():
        raise RuntimeError(
            "inv_freq must be a contiguous vector of float32, bfloat16 or float16, "
            f"got {list(inv_freq.shape)} {inv_freq.dtype}"
        )
    if inv_freq.device != positions.device:
        raise RuntimeError(f"inv_freq is on {inv_freq.device}, and positions on {positions.device}")
    if dtype not in DTYPES:
        raise RuntimeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
