# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Several tokens a row through a GatedDeltaNet layer, of which it is decided afterwards how many have been.

:func:`gdn_block` gives the outputs of all of them and writes nothing; :func:`gdn_commit` takes over window and state
behind the first of them, from the same inputs. Each token is one of
:func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, in its order of operations and with its roundings. Rows come token
by token: row i * B + b is token i of slot b.
"""

from collections.abc import Callable

import torch

from deepspeed_hybrid.ops.gdn_decode import GdnSizes, checked_sizes, gdn_decode_reference
from deepspeed_hybrid.ops.inference import refuse_recording

# Shapes: T tokens, B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_block_reference(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """What :func:`gdn_block` does, in plain torch on any device."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_block(projected, window, *layer, state, norm_weight, position, counts, key_heads)
    lanes = counts.numel()
    if not lanes:
        return projected.new_empty(0, sizes.value_heads * sizes.value_dim)
    window, state = window[:lanes].clone(), state[:lanes].clone()
    step = _stepping(window, *layer, state, norm_weight, eps, key_heads, rounded_heads)
    return torch.cat([step(*token) for token in _tokens(projected, position, counts)])


def gdn_commit_reference(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> None:
    """What :func:`gdn_commit` does, in plain torch on any device."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    checked_block(projected, window, *layer, state, norm_weight, position, counts, key_heads)
    step = _stepping(window, *layer, state, norm_weight, eps, key_heads, rounded_heads)
    for token in _tokens(projected, position, counts):
        step(*token)


def _stepping(window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps, *heads) -> Callable:
    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps
    return lambda projected, position, parked: gdn_decode_reference(projected, *layer, position, parked, *heads)


def _tokens(projected: torch.Tensor, position: torch.Tensor, counts: torch.Tensor):
    """Of each token its rows [B, N], their positions [B], and which of them there are not [B]."""
    lanes = counts.numel()
    for index, rows in enumerate(projected.split(lanes) if lanes else ()):
        yield rows, position + index, counts <= index


@torch.library.custom_op("deepspeed_hybrid::gdn_block", mutates_args=(), device_types="cuda")
def gdn_block_op(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """:func:`gdn_block` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_block import launch  # here, because a torch for CPUs has no Triton

    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps
    return launch(projected, *layer, position, counts, key_heads, rounded_heads)


@gdn_block_op.register_fake
def _(
    projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps, position, counts, *_
) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


@torch.library.custom_op("deepspeed_hybrid::gdn_commit", mutates_args=("window", "state"), device_types="cuda")
def gdn_commit_op(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> None:
    """:func:`gdn_commit` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_block import launch_commit

    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps
    launch_commit(projected, *layer, position, counts, key_heads, rounded_heads)


gdn_block_op.register_kernel("cpu")(gdn_block_reference)
gdn_commit_op.register_kernel("cpu")(gdn_commit_reference)


def gdn_block(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """The outputs of up to T new tokens a row, one after another; window and state are read, and stay as they are.

    On CUDA this is one launch without a host sync, in which every state is read once. Window, state, position and
    counts may be read ahead of the end of the kernel before, and must not be of that kernel's making.

    Args:
        projected: [T * B, N], as of :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, token by token.
        window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, eps, key_heads, rounded_heads: as there.
        position: [B] int64, the first token's place in its sequence.
        counts: [B] int64, 0 to T: tokens that there are. What ``projected`` holds of others does not matter.

    Returns:
        [T * B, HV * DV] in projected's dtype, contiguous; zeros for tokens that there are not.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight
    refuse_recording("gdn_block", projected, *layer)
    return gdn_block_op(projected, *layer, eps, position, counts, key_heads, rounded_heads)


def gdn_commit(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> None:
    """Window and state, in place, behind each row's first ``counts`` tokens; rows of none keep their bits.

    On CUDA these are two launches without a host sync, in which every state is read once and written once. Window,
    state and position may be read ahead of the end of the kernel before, and must not be of its making.

    Args:
        counts: [B] int64, 0 to T: tokens to take over.

    The other arguments, and what is raised, are those of :func:`gdn_block`.
    """
    layer = window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight
    refuse_recording("gdn_commit", projected, *layer)
    gdn_commit_op(projected, *layer, eps, position, counts, key_heads, rounded_heads)


def checked_block(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    if counts.dtype != torch.int64 or counts.dim() != 1 or not counts.is_contiguous():
        raise RuntimeError(f"counts must be contiguous int64 [B], got {counts.dtype} {tuple(counts.shape)}")
    if counts.device != projected.device:
        raise RuntimeError(f"counts is on {counts.device}, projected on {projected.device}")
    lanes = counts.numel()
    if projected.dim() != 2 or (projected.shape[0] % lanes if lanes else projected.shape[0]):
        raise RuntimeError(
            f"projected must have 2 dimensions and as many rows for each token as counts, {lanes}, got shape "
            f"{tuple(projected.shape)}"
        )
    first, layer = projected[:lanes], (window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight)
    return checked_sizes(first, *layer, position, None, key_heads)
