# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What comes before the delta rule for several tokens a row, all of them at once: heads and gates.

None of it waits for a recurrent state, so that :mod:`deepspeed_hybrid.ops.gdn_block` has nothing but the state to go
through token by token. Rows come token by token: row i * B + b is token i of slot b.
"""

import torch

from deepspeed_hybrid.ops.gdn_decode import (
    MAX_CONV_KERNEL,
    MODEL_DTYPES,
    WEIGHT_DTYPES,
    GdnSizes,
    check_tensors,
    head_gates,
    next_heads,
)
from deepspeed_hybrid.ops.inference import refuse_gradients

# Shapes: T tokens, B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_heads_reference(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    key_dim: int,
    rounded_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`gdn_heads` does, in plain torch on any device."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_heads(projected, window, *layer, position, counts, key_heads, key_dim)
    dtype = heads_dtype(projected, rounded_heads)
    lanes = position.numel()
    heads = [projected.new_empty(0, sizes.channels, dtype=dtype)]
    gates = [projected.new_empty(0, 2, sizes.value_heads, dtype=torch.float32)]
    ring = window[:lanes]
    # Token by token, for on a CPU the bits of a function follow from a number's place in a tensor.
    for index, rows in enumerate(projected.split(lanes) if lanes else ()):
        ring, new = next_heads(rows, ring, conv_weight, conv_bias, position + index, sizes, rounded_heads)
        heads.append(new.to(dtype))
        gates.append(torch.stack(head_gates(rows, A_log, dt_bias, sizes), dim=1))
    return torch.cat(heads), torch.cat(gates)


@torch.library.custom_op("deepspeed_hybrid::gdn_heads", mutates_args=(), device_types="cuda")
def gdn_heads(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    key_dim: int,
    rounded_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Short conv, activation, norm of queries and keys, and gates, of T new tokens a row; the window stays as it is.

    The arithmetic of :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, in its order and with its roundings. On CUDA
    this is one launch without a host sync; on a CPU it is :func:`gdn_heads_reference`. There is no gradient.

    Args:
        projected, window, conv_weight, conv_bias, A_log, dt_bias, key_heads, rounded_heads: as there, projected
            [T * B, N] token by token.
        position: [B] int64, the first token's place in its sequence.
        counts: [B] int64, 0 to T: tokens that there are; of others nothing is computed on CUDA.
        key_dim: DK.

    Returns:
        [T * B, C]: queries and keys normalised, and values; in projected's dtype if ``rounded_heads``, else fp32.
        [T * B, 2, HV] fp32: beta, and what a state decays to, exp(g). Of tokens that there are not both hold anything.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    from deepspeed_hybrid.ops.triton.gdn_heads import launch  # here, because a torch for CPUs has no Triton

    layer = window, conv_weight, conv_bias, A_log, dt_bias
    return launch(projected, *layer, position, counts, key_heads, key_dim, rounded_heads)


@gdn_heads.register_fake
def _(
    projected, window, conv_weight, conv_bias, A_log, dt_bias, position, counts, key_heads, key_dim, *rounded_heads
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = projected.new_empty(projected.shape[0], window.shape[1], dtype=heads_dtype(projected, *rounded_heads))
    return heads, projected.new_empty(projected.shape[0], 2, A_log.numel(), dtype=torch.float32)


gdn_heads.register_kernel("cpu")(gdn_heads_reference)
refuse_gradients(gdn_heads, "gdn_heads")


def heads_dtype(projected: torch.Tensor, rounded_heads: bool = False) -> torch.dtype:
    """The narrowest that holds heads as they are: values are rounded in any case, queries and keys if asked to."""
    return projected.dtype if rounded_heads else torch.float32


def tokens_a_row(projected: torch.Tensor, lanes: int) -> int:
    """T, of [T * B, N] for B lanes; a RuntimeError where rows are no whole number of tokens."""
    if projected.dim() != 2 or (projected.shape[0] % lanes if lanes else projected.shape[0]):
        raise RuntimeError(
            f"projected must have 2 dimensions and as many rows for each token as there are lanes, {lanes}, got shape "
            f"{tuple(projected.shape)}"
        )
    return projected.shape[0] // lanes if lanes else 0


def checked_heads(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    key_dim: int,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    lanes, value_heads = position.numel(), A_log.numel()
    tokens_a_row(projected, lanes)
    if window.dim() != 3 or not 1 <= window.shape[2] <= MAX_CONV_KERNEL:
        raise RuntimeError(f"window must be [S, C, K] of 1 to {MAX_CONV_KERNEL} columns, got {tuple(window.shape)}")
    slots, channels, kernel = window.shape
    if slots < lanes:
        raise RuntimeError(f"window must have a slot for each of the {lanes} rows, got {slots}")
    values = channels - 2 * key_heads * key_dim
    if key_heads < 1 or not value_heads or value_heads % key_heads or values < 1 or values % value_heads:
        raise RuntimeError(f"{channels} channels are not {key_heads} key heads of {key_dim} and {value_heads} others")
    sizes = GdnSizes(key_heads, value_heads, key_dim, values // value_heads, kernel)
    expected = {
        "projected": (projected, (projected.shape[0], sum(sizes.columns)), MODEL_DTYPES),
        "window": (window, (slots, channels, kernel), (projected.dtype,)),
        "conv_weight": (conv_weight, (channels, kernel), WEIGHT_DTYPES),
        "conv_bias": (conv_bias, (channels,), WEIGHT_DTYPES),
        "A_log": (A_log, (value_heads,), WEIGHT_DTYPES),
        "dt_bias": (dt_bias, (value_heads,), WEIGHT_DTYPES),
        "position": (position, (lanes,), (torch.int64,)),
        "counts": (counts, (lanes,), (torch.int64,)),
    }
    check_tensors(expected, projected.device)
    return sizes
