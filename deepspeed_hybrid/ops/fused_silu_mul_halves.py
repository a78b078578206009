# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The activation of a gated MLP, read from the one output of its fused gate and up projections."""

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.loader import load
from deepspeed_hybrid.ops.rounding import rounded


def half_width(gate_up: torch.Tensor) -> int:
    """Columns of one half.

    Raises:
        ValueError: it has no two halves.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"the last dimension of gate_up must be two halves, got shape {tuple(gate_up.shape)}")
    return gate_up.shape[-1] // 2


def fused_silu_mul_halves_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """What :func:`fused_silu_mul_halves` does, in plain torch on any device."""
    half = half_width(gate_up)
    gate, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return (rounded(F.silu(gate), gate_up.dtype) * up).to(gate_up.dtype).contiguous()


@torch.library.custom_op("deepspeed_hybrid::fused_silu_mul_halves", mutates_args=(), device_types="cuda")
def fused_silu_mul_halves(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half, in fp32; the silu is rounded to the dtype first, as in transformers.

    On CUDA this is one launch; the first call builds it. Rows are read where they lie as long as they are evenly
    spaced, else from a copy. On a CPU it is :func:`fused_silu_mul_halves_reference`. There is no gradient.

    Args:
        gate_up: [..., 2 * I] fp32, bf16 or fp16, contiguous in the last dimension.

    Returns:
        [..., I] in the dtype of ``gate_up``, contiguous.
    """
    return load("fused_silu_mul_halves").fused_silu_mul_halves(gate_up)


@fused_silu_mul_halves.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], half_width(gate_up)))


fused_silu_mul_halves.register_kernel("cpu")(fused_silu_mul_halves_reference)
refuse_gradients(fused_silu_mul_halves, "fused_silu_mul_halves")
