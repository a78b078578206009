# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A linear layer of a decode step with what lies around it: the norm before, the activation or the residual behind."""

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves
from deepspeed_hybrid.ops.inference import refuse_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 64  # that one launch of ours takes; the tensor cores have no fp32, of which it takes one row


def fused_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """What :func:`fused_linear` does, in plain torch on any device."""
    _check(x, weight, norm, bias, residual, glu)
    if norm is not None:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x = (wide * scale * (norm.float() + norm_offset)).to(x.dtype)
    product = F.linear(x, weight, bias)
    if glu:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    return product if residual is None else residual + product


@torch.library.custom_op("deepspeed_hybrid::fused_linear", mutates_args=(), device_types="cuda")
def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """RMSNorm, product, and bias, gated SiLU or residual, with one rounding at the end.

    On CUDA a few rows are one Triton launch that reads the weight once; the first call of a shape compiles it. More
    rows are the card's library product with the rest in launches of their own. On a CPU it is
    :func:`fused_linear_reference`. There is no gradient.

    Args:
        x: [M, K] fp32, bf16 or fp16, contiguous in the last dimension.
        weight: [N, K] in x's dtype, contiguous; with ``glu`` N is even, the gate's rows before the up projection's.
        norm: [K] weight of an RMSNorm of x, or None for none.
        norm_offset: is added to it: 1.0 for norms that store their weight around zero.
        eps: of the norm.
        bias: [N] or None; not with ``glu``.
        residual: [M, N] in x's dtype, contiguous, or None; not with ``glu``.
        glu: return silu(first half) * second half of the product.

    Returns:
        [M, N], with ``glu`` [M, N / 2], in x's dtype, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(x, weight, norm, bias, residual, glu)
    # Here, because a torch for CPUs has no Triton.
    from deepspeed_hybrid.ops.triton import rms_norm, skinny_linear

    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0] // (2 if glu else 1))
    if x.shape[0] <= MOST_ROWS and (x.shape[0] == 1 or x.dtype != torch.float32):
        return skinny_linear.launch(x, weight, norm, norm_offset, eps, bias, residual, glu)
    if norm is not None:
        x = rms_norm.launch(x, norm, norm_offset, eps)
    if glu:
        return fused_silu_mul_halves(F.linear(x, weight))
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())
    product = F.linear(x, weight, bias)
    return product if residual is None else residual + product


@fused_linear.register_fake
def _(x, weight, norm, norm_offset, eps, bias, residual, glu) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if glu else 1))


fused_linear.register_kernel("cpu")(fused_linear_reference)
refuse_gradients(fused_linear, "fused_linear")


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    glu: bool,
) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise RuntimeError(f"x must be [M, K] float32, bfloat16 or float16, got {list(x.shape)} {x.dtype}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise RuntimeError(f"the last dimension of x must be contiguous, got strides {x.stride()}")
    if weight.dim() != 2 or (glu and weight.shape[0] % 2):
        raise RuntimeError(f"weight must be [N, {x.shape[1]}]{', N even' if glu else ''}, got {list(weight.shape)}")
    if glu and (bias is not None or residual is not None):
        raise RuntimeError("glu takes neither bias nor residual")
    rows, columns = weight.shape
    expected = {
        "weight": (weight, (rows, x.shape[1])),
        "norm": (norm, (columns,)),
        "bias": (bias, (rows,)),
        "residual": (residual, (x.shape[0], rows)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise RuntimeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != x.dtype:
            raise RuntimeError(f"{name} must be {x.dtype} as x, got {tensor.dtype}")
        if tensor.device != x.device:
            raise RuntimeError(f"{name} is on {tensor.device}, and x on {x.device}")
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")
