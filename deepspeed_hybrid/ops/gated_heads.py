# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The sigmoid gate behind attention, over the tokens of a prompt."""

import torch

from deepspeed_hybrid.ops.gdn_decode import MODEL_DTYPES
from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.rounding import rounded

# Shapes: B rows, T tokens, H heads, D their dimensions.


def gated_heads_reference(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """What :func:`gated_heads` does, in plain torch on any device."""
    _check(mixed, gate)
    return (mixed.float() * rounded(gate.float().sigmoid(), gate.dtype)).to(mixed.dtype).flatten(2)


@torch.library.custom_op("deepspeed_hybrid::gated_heads", mutates_args=(), device_types="cuda")
def gated_heads(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``mixed`` times the sigmoid of ``gate``, heads side by side. Math is fp32; sigmoid and result are rounded.

    On CUDA this is one launch, without a host sync; the first call for a set of sizes and dtypes compiles it. On a CPU
    it is :func:`gated_heads_reference`. There is no gradient.

    Args:
        mixed: [B, T, H, D] fp32, bf16 or fp16, contiguous in the last dimension, as attention leaves it.
        gate: the same shape and dtype, contiguous in the last dimension; columns of a wider tensor will do.

    Returns:
        [B, T, H * D] in that dtype, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(mixed, gate)
    from deepspeed_hybrid.ops.triton.gated_heads import launch  # here, because a torch for CPUs has no Triton

    return launch(mixed, gate)


@gated_heads.register_fake
def _(mixed, gate):
    return mixed.new_empty(mixed.shape).flatten(2)


gated_heads.register_kernel("cpu")(gated_heads_reference)
refuse_gradients(gated_heads, "gated_heads")


def _check(mixed: torch.Tensor, gate: torch.Tensor) -> None:
    if mixed.dim() != 4 or mixed.dtype not in MODEL_DTYPES:
        raise RuntimeError(
            f"mixed must be [B, T, H, D] float32, bfloat16 or float16, got {list(mixed.shape)} {mixed.dtype}"
        )
    if gate.shape != mixed.shape or gate.dtype != mixed.dtype or gate.device != mixed.device:
        raise RuntimeError(
            f"gate must be {list(mixed.shape)} {mixed.dtype} on {mixed.device}, "
            f"got {list(gate.shape)} {gate.dtype} on {gate.device}"
        )
    for name, tensor in (("mixed", mixed), ("gate", gate)):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise RuntimeError(f"the last dimension of {name} must be contiguous, got strides {tensor.stride()}")
