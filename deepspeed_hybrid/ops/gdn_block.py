# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Several tokens a row through a GatedDeltaNet layer, of which it is decided afterwards how many have been.

:func:`gdn_block` gives the outputs of all of them and writes nothing; :func:`gdn_commit` takes over window and state
behind the first of them, from the same heads and gates of :func:`deepspeed_hybrid.ops.gdn_heads.gdn_heads`. Each token
is one of :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, in its order of operations and with its roundings. Rows
come token by token: row i * B + b is token i of slot b.
"""

from typing import cast

import torch

from deepspeed_hybrid.ops.gdn_decode import (
    MODEL_DTYPES,
    STATE_DTYPES,
    WEIGHT_DTYPES,
    GdnSizes,
    check_tensors,
    delta_rule,
    gated_core,
)
from deepspeed_hybrid.ops.gdn_heads import tokens_a_row
from deepspeed_hybrid.ops.inference import refuse_gradients, refuse_recording

# Shapes: T tokens, B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_block_reference(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """What :func:`gdn_block` does, in plain torch on any device."""
    sizes = checked_block(projected, heads, gates, state, counts, key_heads, norm_weight=norm_weight)
    lanes, last = counts.numel(), (norm_weight, eps, sizes)
    read, _ = _scan(heads, gates, state, counts, sizes)
    out = [projected.new_empty(0, sizes.values)]
    for index, (core, rows) in enumerate(zip(read, projected.split(lanes) if lanes else (), strict=True)):
        out.append(gated_core(core, rows, *last).masked_fill((counts <= index)[:, None], 0.0))
    return torch.cat(out)


def gdn_commit_reference(
    projected: list[torch.Tensor],
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    window: list[torch.Tensor],
    state: list[torch.Tensor],
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> None:
    """What :func:`gdn_commit` does, in plain torch on any device."""
    sizes = checked_commit(projected, heads, gates, window, state, position, counts, key_heads)
    for layer in zip(projected, heads, gates, window, state, strict=True):
        _commit_layer(*layer, position, counts, cast(GdnSizes, sizes))


def _commit_layer(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    position: torch.Tensor,
    counts: torch.Tensor,
    sizes: GdnSizes,
) -> None:
    lanes, kernel = counts.numel(), sizes.conv_kernel
    _, memory = _scan(heads, gates, state, counts, sizes)
    state[:lanes] = torch.where(counts[:, None, None, None] > 0, memory, state[:lanes])
    for index, rows in enumerate(projected[:, : sizes.channels].split(lanes) if lanes else ()):
        column = ((position + index) % kernel)[:, None, None].expand(-1, sizes.channels, 1)
        ring = window[:lanes].scatter(2, column, rows[:, :, None])
        window[:lanes] = torch.where(counts[:, None, None] > index, ring, window[:lanes])


def _scan(
    heads: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, counts: torch.Tensor, sizes: GdnSizes
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each token reads, T of [B, HV, DV] fp32, and the state [B, HV, DK, DV] behind each row's tokens."""
    lanes = counts.numel()
    memory, core = state[:lanes], []
    pairs = zip(heads.float().split(lanes), gates.split(lanes), strict=True) if lanes else ()
    for index, (of_token, both) in enumerate(pairs):
        beta, decay = both.unbind(1)
        read, after = delta_rule(of_token, beta, decay, memory.float(), sizes, heads.dtype)
        memory = torch.where(counts[:, None, None, None] > index, after.to(state.dtype), memory)
        core.append(read)
    return core, memory


@torch.library.custom_op("deepspeed_hybrid::gdn_block", mutates_args=(), device_types="cuda")
def gdn_block(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """The outputs of up to T new tokens a row, one after another; the state is read, and stays as it is.

    On CUDA these are two launches without a host sync, in which every state is read once. The state may be read ahead
    of the end of the kernel before, and must not be of that kernel's making. On a CPU it is
    :func:`gdn_block_reference`. There is no gradient.

    Args:
        projected: [T * B, N], as of :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, token by token; here for z.
        heads, gates: what :func:`deepspeed_hybrid.ops.gdn_heads.gdn_heads` made of it.
        state, norm_weight, eps, key_heads: as of gdn_decode.
        counts: [B] int64, 0 to T: tokens that there are. What is there of others does not matter.

    Returns:
        [T * B, HV * DV] in projected's dtype, contiguous; zeros for tokens that there are not.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    from deepspeed_hybrid.ops.triton.gdn_block import launch  # here, because a torch for CPUs has no Triton

    return launch(projected, heads, gates, state, norm_weight, eps, counts, key_heads)


@gdn_block.register_fake
def _(projected, heads, gates, state, norm_weight, eps, counts, key_heads) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


@torch.library.custom_op("deepspeed_hybrid::gdn_commit", mutates_args=("window", "state"), device_types="cuda")
def gdn_commit_op(
    projected: list[torch.Tensor],
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    window: list[torch.Tensor],
    state: list[torch.Tensor],
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> None:
    """:func:`gdn_commit` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_block import launch_commit

    launch_commit(projected, heads, gates, window, state, position, counts, key_heads)


gdn_block.register_kernel("cpu")(gdn_block_reference)
gdn_commit_op.register_kernel("cpu")(gdn_commit_reference)
refuse_gradients(gdn_block, "gdn_block")


def gdn_commit(
    projected: list[torch.Tensor],
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    window: list[torch.Tensor],
    state: list[torch.Tensor],
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> None:
    """Windows and states of layers, in place, behind each row's first ``counts`` tokens; rows of none keep their bits.

    On CUDA this is one launch for up to 64 layers, without a host sync, in which every state is read and written once.
    States may be read ahead of the end of the kernel before, and must not be of its making.

    Args:
        projected, heads, gates, state: of each layer, as of :func:`gdn_block`; projected for what enters the window.
            Layers have the same sizes and dtypes.
        window: [S, C, K] rings in projected's dtype, as of gdn_decode; updated.
        position: [B] int64, the first token's place in its sequence.
        counts: [B] int64, 0 to T: tokens to take over.
        key_heads: as of gdn_decode.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device, or layers that differ; nothing changed.
    """
    refuse_recording("gdn_commit", *projected, *heads, *gates, *window, *state)
    gdn_commit_op(projected, heads, gates, window, state, position, counts, key_heads)


def checked_commit(
    projected: list[torch.Tensor],
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    window: list[torch.Tensor],
    state: list[torch.Tensor],
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> GdnSizes | None:
    """The sizes of all layers, None where there are none; or a RuntimeError that names what does not fit."""
    if len({len(tensors) for tensors in (projected, heads, gates, window, state)}) != 1:
        raise RuntimeError("projected, heads, gates, window and state must be of the same layers")
    sizes, facts = None, set()
    for rows, of_heads, of_gates, ring, memory in zip(projected, heads, gates, window, state, strict=True):
        sizes = checked_block(rows, of_heads, of_gates, memory, counts, key_heads, window=ring, position=position)
        facts.add((sizes, rows.shape, rows.stride(0), rows.dtype, of_heads.dtype, memory.dtype))
    if len(facts) > 1:
        raise RuntimeError("layers that are committed together must have the same sizes and dtypes")
    return sizes


def checked_block(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    norm_weight: torch.Tensor | None = None,
    window: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    if counts.dtype != torch.int64 or counts.dim() != 1 or not counts.is_contiguous():
        raise RuntimeError(f"counts must be contiguous int64 [B], got {counts.dtype} {tuple(counts.shape)}")
    lanes = counts.numel()
    tokens_a_row(projected, lanes)
    if state.dim() != 4 or state.shape[0] < lanes:
        raise RuntimeError(f"state must be [S, HV, DK, DV] with a slot for each of {lanes}, got {tuple(state.shape)}")
    _, value_heads, key_dim, value_dim = state.shape
    if key_heads < 1 or value_heads % key_heads:
        raise RuntimeError(f"key_heads must divide the {value_heads} value heads of state, got {key_heads}")
    kernel = 1 if window is None or window.dim() != 3 else window.shape[2]
    sizes, rows = GdnSizes(key_heads, value_heads, key_dim, value_dim, kernel), projected.shape[0]
    slots = state.shape[0] if window is None else window.shape[0]
    if slots < lanes:
        raise RuntimeError(f"window must have a slot for each of the {lanes} rows, got {slots}")
    expected = {
        "projected": (projected, (rows, sum(sizes.columns)), MODEL_DTYPES),
        "heads": (heads, (rows, sizes.channels), (projected.dtype, torch.float32)),
        "gates": (gates, (rows, 2, value_heads), (torch.float32,)),
        "state": (state, tuple(state.shape), STATE_DTYPES),
        "norm_weight": (norm_weight, (value_dim,), WEIGHT_DTYPES),
        "window": (window, (slots, sizes.channels, kernel), (projected.dtype,)),
        "position": (position, (lanes,), (torch.int64,)),
        "counts": (counts, (lanes,), (torch.int64,)),
    }
    check_tensors(expected, projected.device)
    return sizes
