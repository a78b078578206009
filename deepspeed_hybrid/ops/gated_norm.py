# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The gated RMSNorm behind a GatedDeltaNet layer's scan, over the tokens of a prompt."""

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.gdn_decode import MODEL_DTYPES, WEIGHT_DTYPES
from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.rounding import rounded, rounded_product

# Shapes: B rows, T tokens, HV value heads, DV their dimensions.


def gated_norm_reference(core: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What :func:`gated_norm` does, in plain torch on any device."""
    _check(core, gate, weight)
    wide = core.float()
    normed = rounded(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), core.dtype)
    normed = rounded_product(normed, weight, core.dtype)
    return (normed * F.silu(gate.float().view(core.shape))).to(core.dtype).flatten(2)


@torch.library.custom_op("deepspeed_hybrid::gated_norm", mutates_args=(), device_types="cuda")
def gated_norm(core: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of every head, times its weight and the gate's SiLU.

    Math is fp32. Rounded to core's dtype are, as in transformers, what meets the weight, what comes of it where the
    weight has that dtype too, and the result.

    On CUDA this is one launch, without a host sync; the first call for a set of sizes and dtypes compiles it. On a CPU
    it is :func:`gated_norm_reference`. There is no gradient.

    Args:
        core: [B, T, HV, DV] fp32, bf16 or fp16, contiguous.
        gate: [B, T, HV * DV] in core's dtype, contiguous in the last dimension; columns of a wider tensor will do.
        weight: [DV] of any float dtype.
        eps: of the norm.

    Returns:
        [B, T, HV * DV] in core's dtype, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(core, gate, weight)
    from deepspeed_hybrid.ops.triton.gated_norm import launch  # here, because a torch for CPUs has no Triton

    return launch(core, gate, weight, eps)


@gated_norm.register_fake
def _(core, gate, weight, eps):
    return core.new_empty(gate.shape)


gated_norm.register_kernel("cpu")(gated_norm_reference)
refuse_gradients(gated_norm, "gated_norm")


def _check(core: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> None:
    if core.dim() != 4 or core.dtype not in MODEL_DTYPES or not core.is_contiguous():
        raise RuntimeError(
            f"core must be contiguous [B, T, HV, DV] float32, bfloat16 or float16, got {list(core.shape)} {core.dtype}"
        )
    rows, tokens, heads, size = core.shape
    if tuple(gate.shape) != (rows, tokens, heads * size) or gate.dtype != core.dtype:
        raise RuntimeError(
            f"gate must be {[rows, tokens, heads * size]} {core.dtype}, got {list(gate.shape)} {gate.dtype}"
        )
    if gate.stride(2) != 1 and gate.shape[2] > 1:
        raise RuntimeError(f"the last dimension of gate must be contiguous, got strides {gate.stride()}")
    if tuple(weight.shape) != (size,) or weight.dtype not in WEIGHT_DTYPES or not weight.is_contiguous():
        raise RuntimeError(f"weight must be contiguous [{size}], got {list(weight.shape)} {weight.dtype}")
    for name, tensor in (("gate", gate), ("weight", weight)):
        if tensor.device != core.device:
            raise RuntimeError(f"{name} is on {tensor.device}, core on {core.device}")
