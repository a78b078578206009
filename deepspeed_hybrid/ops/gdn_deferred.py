# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A decode step of a GatedDeltaNet layer that reads every state, and writes it at every 16th token only.

What a token adds to a state is the outer product of its key and of what the delta rule writes for it. Until a row
comes to a position whose successor 16 divides, both are kept beside the state, with the token's decay, and later
tokens read state and kept tokens together. A row's bits so depend on its own positions, and on no other row.

With S the state, g the decays, k and d the kept tokens' keys and what was written for them, token t reads

    k_t S' = (g ... g_t) k_t S + sum over kept i of (g_{i+1} ... g_t) (k_t k_i) d_i

and the same with its query, whose products with keys are rounded to the heads' dtype, as the training forward rounds
them within a chunk. At large batches the states are most of what a step reads and writes, and this is nearly half of
it.
"""

import torch

from deepspeed_hybrid.ops.gdn_block import checked_block
from deepspeed_hybrid.ops.gdn_decode import GdnSizes, check_tensors, gated_core
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.rounding import rounded

KEPT = 16  # tokens of a row, at most, of which the last is written into the state at once

# Shapes: B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_deferred_reference(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    answered: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """What :func:`gdn_deferred` does, in plain torch on any device: the state is made up to date for every token."""
    kept, places = (keys, deltas, decays), (position, answered, counts)
    sizes = checked_deferred(projected, heads, gates, window, state, *kept, norm_weight, *places, key_heads)
    lanes = counts.numel()
    live, number = counts > 0, position % KEPT
    query, key, value = heads.float().split([sizes.keys, sizes.keys, sizes.values], dim=-1)
    query, key = (part.unflatten(-1, (key_heads, -1)).repeat_interleave(sizes.group, dim=1) for part in (query, key))
    beta, decay = gates.unbind(1)

    # What is left of the state, and of each kept token what it adds to what is read.
    memory = state[:lanes].float()
    of_tokens, left = torch.zeros_like(deltas[:lanes, :, 0]), decay
    for index in reversed(range(KEPT - 1)):
        is_kept = (live & (index < number) & (index >= number - (answered - 1)))[:, None]
        old = keys[:lanes, :, index].float().repeat_interleave(sizes.group, dim=1)
        shared = rounded((old * query).sum(-1) * left, heads.dtype)
        added = shared[..., None] * deltas[:lanes, :, index]
        of_tokens = torch.where(is_kept[..., None], of_tokens + added, of_tokens)
        left = torch.where(is_kept, left * decays[:lanes, :, index], left)
    of_state = (memory * query[..., None]).sum(-2) * left[..., None]
    memory = settled(memory, keys[:lanes], deltas[:lanes], decays[:lanes], position, answered, live)

    memory = memory * decay[..., None, None]
    delta = (value.unflatten(-1, (sizes.value_heads, -1)) - (memory * key[..., None]).sum(-2)) * beta[..., None]
    memory = memory + key[..., None] * delta[..., None, :]
    own = rounded((key * query).sum(-1), heads.dtype)[..., None] * delta
    core = (of_state + of_tokens + own) * sizes.key_dim**-0.5

    of_heads = heads[:, sizes.keys : 2 * sizes.keys].unflatten(-1, (key_heads, -1))
    for ring, new in ((keys, of_heads), (deltas, delta), (decays, decay)):
        _put(ring[:lanes], new.to(ring.dtype), number, live)
    raw = projected[:, : sizes.channels]
    _put(window[:lanes], raw, position % sizes.conv_kernel, live)
    full = live & (number == KEPT - 1)
    state[:lanes] = torch.where(full[:, None, None, None], memory.to(state.dtype), state[:lanes])
    return gated_core(core, projected, norm_weight, eps, sizes).masked_fill(~live[:, None], 0.0)


def settled(
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    position: torch.Tensor,
    answered: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """[B, HV, DK, DV] fp32: the states of B rows with the tokens that are kept beside them, before the token at
    ``position``; those of rows that are not ``live`` [B] as they are. Arguments as of :func:`gdn_deferred`, by row."""
    memory, number = state.float(), position % KEPT
    group = state.shape[1] // keys.shape[1]
    for index in range(KEPT - 1):
        is_kept = live & (index < number) & (index >= number - (answered - 1))
        key = keys[:, :, index].float().repeat_interleave(group, dim=1)
        after = memory * decays[:, :, index, None, None] + key[..., None] * deltas[:, :, index, None]
        memory = torch.where(is_kept[:, None, None, None], after, memory)
    return memory


def _put(ring: torch.Tensor, new: torch.Tensor, number: torch.Tensor, live: torch.Tensor) -> None:
    """``new`` [B, H, ...] into place ``number[b]`` of row b of ``ring`` [B, H, places, ...], where rows are live."""
    lanes = torch.arange(len(number), device=ring.device)[live]
    ring.movedim(2, 1)[lanes, number[live]] = new[live]


@torch.library.custom_op(
    "deepspeed_hybrid::gdn_deferred", mutates_args=("window", "state", "keys", "deltas", "decays"), device_types="cuda"
)
def gdn_deferred_op(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    answered: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """:func:`gdn_deferred` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_deferred import launch  # here, because a torch for CPUs has no Triton

    kept = keys, deltas, decays
    rest = norm_weight, eps, position, answered, counts, key_heads
    return launch(projected, heads, gates, window, state, *kept, *rest)


@gdn_deferred_op.register_fake
def _(projected, heads, gates, window, state, *rest) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


gdn_deferred_op.register_kernel("cpu")(gdn_deferred_reference)


def gdn_deferred(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    position: torch.Tensor,
    answered: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """One token of every row, like :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, with states written late.

    On CUDA these are two launches without a host sync. The state may be read ahead of the end of the kernel before,
    and must not be of that kernel's making. On a CPU it is :func:`gdn_deferred_reference`. There is no gradient.

    Args:
        projected: [B, N], as of gdn_decode; here for z, and for what enters the window.
        heads, gates: what :func:`deepspeed_hybrid.ops.gdn_heads.gdn_heads` made of it.
        window: [S, C, K] rings in projected's dtype, as of gdn_decode; updated.
        state: [S, HV, DK, DV] fp32, bf16 or fp16; updated in rows whose position is 15 of 16.
        keys: [S, HK, 16, DK] in heads' dtype; deltas: [S, HV, 16, DV] fp32; decays: [S, HV, 16] fp32. The token at
            position p is in place p % 16; updated.
        norm_weight, eps, key_heads: as of gdn_decode.
        position: [B] int64, the token's place in its sequence.
        answered: [B] int64, tokens that the row has had of decode steps like this, with the present one: as many of
            those in place beyond the state, at most those since a multiple of 16.
        counts: [B] int64, 1, or 0 for a row that is none: whatever it holds does not matter, and its bits stay.

    Returns:
        [B, HV * DV] in projected's dtype, contiguous; zeros for rows that are none.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("gdn_deferred", projected, heads, gates, window, state, norm_weight)
    kept = keys, deltas, decays
    rest = norm_weight, eps, position, answered, counts, key_heads
    return gdn_deferred_op(projected, heads, gates, window, state, *kept, *rest)


def checked_deferred(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    answered: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    fits = {"norm_weight": norm_weight, "window": window, "position": position}
    sizes = checked_block(projected, heads, gates, state, counts, key_heads, **fits)
    if len(projected) != counts.numel():
        raise RuntimeError(f"projected must have one token for each of {counts.numel()} rows, got {len(projected)}")
    slots = state.shape[0]
    expected = {
        "keys": (keys, (slots, key_heads, KEPT, sizes.key_dim), (heads.dtype,)),
        "deltas": (deltas, (slots, sizes.value_heads, KEPT, sizes.value_dim), (torch.float32,)),
        "decays": (decays, (slots, sizes.value_heads, KEPT), (torch.float32,)),
        "answered": (answered, (counts.numel(),), (torch.int64,)),
    }
    check_tensors(expected, projected.device)
    return sizes
