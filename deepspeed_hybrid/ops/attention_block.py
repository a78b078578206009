# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention for several new tokens a row, each of which sees those before it: attention_decode over a block."""

from collections.abc import Callable

import torch

from deepspeed_hybrid.ops.attention_decode import attention_decode_reference, check_attention
from deepspeed_hybrid.ops.inference import refuse_recording


def token_by_token(
    op: Callable,
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    lanes: int,
) -> torch.Tensor:
    """What :func:`attention_block` does, by one ``op`` (attention_decode, or its reference) a token."""
    if not lanes:
        return projected.new_empty(0, query_heads * keys.shape[3])
    settings = q_norm, k_norm, norm_offset, eps, query_heads, gated, scaling
    per_token = (part.split(lanes) for part in (projected, cos, sin, position, parked))
    return torch.cat(
        [
            op(rows, turn, other, keys, values, places, idle, *settings)
            for rows, turn, other, places, idle in zip(*per_token, strict=True)
        ]
    )


@torch.library.custom_op("deepspeed_hybrid::attention_block", mutates_args=("keys", "values"), device_types="cuda")
def attention_block_op(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    lanes: int,
) -> torch.Tensor:
    """:func:`attention_block` as torch's dispatcher knows it."""
    settings = q_norm, k_norm, norm_offset, eps, query_heads, gated, scaling
    _check(projected, cos, sin, keys, values, position, parked, *settings, lanes)
    # Not at the top: a torch built for CPUs only comes without Triton.
    from deepspeed_hybrid.ops.triton.attention_block import launch

    return launch(projected, cos, sin, keys, values, position, parked, *settings, lanes)


@attention_block_op.register_kernel("cpu")
def _(*arguments) -> torch.Tensor:
    _check(*arguments)
    return token_by_token(attention_decode_reference, *arguments)


@attention_block_op.register_fake
def _(projected, cos, sin, keys, values, position, parked, q_norm, k_norm, norm_offset, eps, query_heads, *_):
    return projected.new_empty(projected.shape[0], query_heads * keys.shape[3])


def attention_block(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    gated: bool,
    scaling: float,
    lanes: int,
) -> torch.Tensor:
    """:func:`deepspeed_hybrid.ops.attention_decode.attention_decode` for T tokens a slot, in rows token by token: row
    i * lanes + b is token i of slot b, and sees what came before token 0, and tokens 0 to i.

    On CUDA all keys and values are written in one launch, and one or two more attend.

    Args:
        projected, cos, sin, position, parked: [T * lanes, ...], as there. Positions of a slot follow one another, and
            tokens that are parked are the last of their slot. A GPU may read both ahead of the end of the kernel
            before: they must not be of its making.
        lanes: rows of a token.

    The other arguments, the result and what is raised are as there.
    """
    refuse_recording("attention_block", projected, cos, sin, keys, values, q_norm, k_norm)
    return attention_block_op(
        projected,
        cos,
        sin,
        keys,
        values,
        position,
        parked,
        q_norm,
        k_norm,
        norm_offset,
        eps,
        query_heads,
        gated,
        scaling,
        lanes,
    )


def _check(projected, cos, sin, keys, values, position, parked, *rest) -> None:
    """Raise before anything is written."""
    *settings, lanes = rest
    rows = {"projected": projected, "cos": cos, "sin": sin, "position": position, "parked": parked}
    count = position.shape[0] if position.dim() else 0
    for name, tensor in rows.items():
        if tensor.dim() == 0 or tensor.shape[0] != count or (count % lanes if lanes else count):
            raise RuntimeError(
                f"attention_block: {name} must have the {count} rows of position, some for each of {lanes} lanes, not "
                f"{list(tensor.shape)}"
            )
    for name in ("position", "parked"):
        if not rows[name].is_contiguous():
            raise RuntimeError(f"attention_block: {name} must be contiguous, not of strides {rows[name].stride()}")
    projected, cos, sin, position, parked = (tensor[:lanes] for tensor in rows.values())
    check_attention("attention_block", projected, cos, sin, keys, values, position, parked, *settings)
