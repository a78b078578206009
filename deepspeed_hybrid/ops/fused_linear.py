# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The linear layers of a decode step with what lies around them: a norm before, an activation or a residual behind.

A norm is split between the op that writes the hidden state and the op that reads it. The writer also gives ``scaled``,
the hidden state times the norm's weight, and ``squares`` [parts, M], sums of squares of the hidden state that are yet
to be added up; the reader's product runs over ``scaled`` and is divided by the root mean square at its end. With no
parts at all (``squares`` [0, M]) ``scaled`` is the normalised state itself.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from deepspeed_hybrid.ops import few_rows, warpgroup
from deepspeed_hybrid.ops.fused_silu_mul_halves import fused_silu_mul_halves
from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.rounding import normed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------------- normed_rows


def normed_rows_reference(
    hidden: torch.Tensor, norm: torch.Tensor, norm_offset: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of hidden [M, K]: the normalised rows and no partial sums [0, M]."""
    _check_norm(hidden, norm)
    parts = hidden.new_empty(0, hidden.shape[0], dtype=torch.float32)
    return normed(hidden, norm, norm_offset, eps), parts


@torch.library.custom_op("deepspeed_hybrid::normed_rows", mutates_args=(), device_types="cuda")
def normed_rows(
    hidden: torch.Tensor, norm: torch.Tensor, norm_offset: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm in a launch of its own, where no op before it could prepare it.

    Args:
        hidden: [M, K] fp32, bf16 or fp16, contiguous in the last dimension.
        norm: [K] weight of an RMSNorm; ``norm_offset`` is added to it: 1.0 for norms that store it around zero. Where
            it is 0, rows are rounded before they meet the weight, too, as such norms of transformers do.
        eps: of the norm.

    Returns:
        The normalised rows [M, K] in hidden's dtype, and partial sums of squares [0, M].

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check_norm(hidden, norm)
    from deepspeed_hybrid.ops.triton.rms_norm import launch  # here, because a torch for CPUs has no Triton

    return launch(hidden, norm, norm_offset, eps), hidden.new_empty(0, hidden.shape[0], dtype=torch.float32)


@normed_rows.register_fake
def _(hidden, norm, norm_offset, eps):
    return hidden.new_empty(hidden.shape), hidden.new_empty(0, hidden.shape[0], dtype=torch.float32)


# ----------------------------------------------------------------------------------------------------- normed_linear


def normed_linear_reference(
    scaled: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """What :func:`normed_linear` does, in plain torch on any device."""
    _check(scaled, weight, squares, bias, None, None, glu)
    product = F.linear(_normalised(scaled, squares, eps), weight, bias)
    if glu:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    return product


def _launch(x: torch.Tensor, weight: torch.Tensor, glu: bool) -> Callable | None:
    """The kernel that does all of a product's op in one launch, or None where the library's product is faster."""
    if few_rows.takes(x, weight, glu):
        return few_rows.launch
    if warpgroup.takes(x, weight, glu):
        return warpgroup.launch
    if x.shape[0] == 1:
        from deepspeed_hybrid.ops.triton.row_linear import launch  # here, because a torch for CPUs has no Triton

        return launch
    return None


def _normalised(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    if squares.shape[0] == 0:
        return scaled
    factor = torch.rsqrt(squares.sum(0) / scaled.shape[1] + eps)[:, None]
    return (scaled.float() * factor).to(scaled.dtype)


@torch.library.custom_op("deepspeed_hybrid::normed_linear", mutates_args=(), device_types="cuda")
def normed_linear(
    scaled: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """The second half of an RMSNorm, a product, and its bias or gated SiLU, with the roundings of each.

    On CUDA up to 16 rows of 16 bits are one launch of the CUDA op few_rows_linear, on a card from Hopper on, and 17 to
    64 one of warpgroup_linear, on Hopper, for sizes that they take; another single row is one of a Triton kernel. All
    read the weight once, and the first call compiles them. Anything else is the card's library product, with silu * up
    in a launch of its own. On a CPU it is
    :func:`normed_linear_reference`. There is no gradient.

    Args:
        scaled: [M, K] fp32, bf16 or fp16, contiguous.
        squares: [parts, M] fp32; no parts where ``scaled`` is normalised already.
        eps: of the norm.
        weight: [N, K] in the dtype of ``scaled``, contiguous; with ``glu`` the gate's rows before the up projection's.
        bias: [N] or None; not with ``glu``.
        glu: return silu(first half) * second half of the product.

    Returns:
        [M, N], with ``glu`` [M, N / 2], in the dtype of ``scaled``, contiguous.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(scaled, weight, squares, bias, None, None, glu)
    launch = _launch(scaled, weight, glu)
    if launch is not None:
        return launch(scaled, weight, squares if squares.shape[0] else None, eps, bias, None, None, 0.0, glu)[0]
    return normed_linear_by_library(scaled, squares, eps, weight, bias, glu)


def normed_linear_by_library(
    scaled: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """:func:`normed_linear` of any number of rows as it is of many, on CUDA."""
    product = F.linear(_normalised(scaled, squares, eps), weight, bias)
    return fused_silu_mul_halves(product) if glu else product


@normed_linear.register_fake
def _(scaled, squares, eps, weight, bias, glu):
    return scaled.new_empty(scaled.shape[0], weight.shape[0] // (2 if glu else 1))


# --------------------------------------------------------------------------------------------------- residual_linear


def residual_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    next_offset: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`residual_linear` does, in plain torch on any device."""
    _check(x, weight, None, bias, residual, next_norm, False)
    hidden = residual + F.linear(x, weight, bias)
    return (hidden, *normed_rows_reference(hidden, next_norm, next_offset, next_eps))


@torch.library.custom_op("deepspeed_hybrid::residual_linear", mutates_args=(), device_types="cuda")
def residual_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    next_offset: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A product, its bias, the residual, and the first half of the RMSNorm that comes next.

    On CUDA up to 64 rows are one launch, as in :func:`normed_linear`; otherwise it is the card's library product and a
    launch for all that follows. So it is for fp16, where a hidden state times the norm's weight might overflow. On a
    CPU it is :func:`residual_linear_reference`. There is no gradient.

    Args:
        x: [M, K] fp32, bf16 or fp16, contiguous.
        weight: [N, K] in x's dtype, contiguous.
        bias: [N] or None.
        residual: [M, N] in x's dtype, contiguous.
        next_norm: [N] weight of the next RMSNorm; ``next_offset`` is added to it.
        next_eps: of that norm.

    Returns:
        hidden [M, N] in x's dtype; scaled and squares of the next norm, as this module defines them.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    _check(x, weight, None, bias, residual, next_norm, False)
    launch = None if x.dtype == torch.float16 else _launch(x, weight, False)
    if launch is not None:
        return launch(x, weight, None, 0.0, bias, residual, next_norm, next_offset, False)
    return residual_linear_by_library(x, weight, bias, residual, next_norm, next_offset, next_eps)


def residual_linear_by_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    next_offset: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`residual_linear` of any number of rows as it is of many, on CUDA: the norm is whole."""
    from deepspeed_hybrid.ops.triton.residual_norm import launch  # here, because a torch for CPUs has no Triton

    hidden, normed = launch(F.linear(x, weight, bias), residual, next_norm, next_offset, next_eps)
    return hidden, normed, x.new_empty(0, x.shape[0], dtype=torch.float32)


@residual_linear.register_fake
def _(x, weight, bias, residual, next_norm, next_offset, next_eps):
    parts = torch.library.get_ctx().new_dynamic_size()
    squares = x.new_empty(parts, x.shape[0], dtype=torch.float32)
    return torch.empty_like(residual), torch.empty_like(residual), squares


for _op, _reference, _name in (
    (normed_rows, normed_rows_reference, "normed_rows"),
    (normed_linear, normed_linear_reference, "normed_linear"),
    (residual_linear, residual_linear_reference, "residual_linear"),
):
    _op.register_kernel("cpu")(_reference)
    refuse_gradients(_op, _name)


def _check_norm(hidden: torch.Tensor, norm: torch.Tensor) -> None:
    if hidden.dim() != 2 or hidden.dtype not in DTYPES or (hidden.stride(1) != 1 and hidden.shape[1] > 1):
        raise RuntimeError(
            f"hidden must be [M, K] float32, bfloat16 or float16 with adjacent columns, got {list(hidden.shape)} "
            f"{hidden.dtype}"
        )
    if norm.shape != hidden.shape[1:] or not norm.is_contiguous() or norm.dtype not in DTYPES:
        raise RuntimeError(f"norm must be contiguous [{hidden.shape[1]}], got {list(norm.shape)} {norm.dtype}")
    if norm.device != hidden.device:
        raise RuntimeError(f"norm is on {norm.device}, and hidden on {hidden.device}")


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    next_norm: torch.Tensor | None,
    glu: bool,
) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        raise RuntimeError(f"x must be contiguous [M, K] float32, bfloat16 or float16, got {list(x.shape)} {x.dtype}")
    if weight.dim() != 2 or (glu and weight.shape[0] % 2):
        raise RuntimeError(f"weight must be [N, {x.shape[1]}]{', N even' if glu else ''}, got {list(weight.shape)}")
    if glu and bias is not None:
        raise RuntimeError("glu takes no bias")
    rows, columns = weight.shape[0], x.shape[1]
    expected = {
        "weight": (weight, (rows, columns), x.dtype),
        "squares": (squares, (0 if squares is None else squares.shape[0], x.shape[0]), torch.float32),
        "bias": (bias, (rows,), x.dtype),
        "residual": (residual, (x.shape[0], rows), x.dtype),
        "next_norm": (next_norm, (rows,), x.dtype),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise RuntimeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise RuntimeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise RuntimeError(f"{name} is on {tensor.device}, and x on {x.device}")
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")
