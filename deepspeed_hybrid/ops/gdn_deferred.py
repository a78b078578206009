# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A decode step of a GatedDeltaNet layer that reads every state, and writes it at every 15th token only.

What a token adds to a state is the outer product of its key and of what the delta rule writes for it. Both are kept
beside the state, with the token's decay, and later tokens read state and kept tokens together. The token at a position
that 15 divides takes all tokens before it into the state as it reads it, and there is one place more, for its own. A
row's bits so depend on its own positions, and on no other row.

With S the state, g the decays, k and d the kept tokens' keys and what was written for them, token t reads

    k_t S' = (g ... g_t) k_t S + sum over kept i of (g_{i+1} ... g_t) (k_t k_i) d_i

and the same with its query, whose products with keys are rounded to the heads' dtype, as the training forward rounds
them within a chunk. At large batches the states are most of what a step reads and writes, and this is nearly half of
it.
"""

import torch

from deepspeed_hybrid.ops import gdn_streamed
from deepspeed_hybrid.ops.gdn_decode import GdnSizes, check_tensors, checked_sizes, gated_core
from deepspeed_hybrid.ops.gdn_heads import gdn_heads_reference, heads_dtype
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.rounding import rounded

PLACES = 16  # for tokens beside a state: the one at position p is in place p % 16
BLOCK = PLACES - 1  # tokens of a row that wait there, at most

# Shapes: B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims.


def gdn_deferred_reference(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
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
    rounded_heads: bool = False,
) -> torch.Tensor:
    """What :func:`gdn_deferred` does, in plain torch on any device: the state is made up to date for every token."""
    layer, kept = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    places = position, answered, counts
    sizes = checked_deferred(projected, window, *layer, state, *kept, norm_weight, *places, key_heads, rounded_heads)
    of_row = position, counts, key_heads, sizes.key_dim
    heads, gates = gdn_heads_reference(projected, window, *layer, *of_row, rounded_heads=rounded_heads)
    lanes = counts.numel()
    live, rings = counts > 0, (keys[:lanes], deltas[:lanes], decays[:lanes])
    query, key, value = heads.float().split([sizes.keys, sizes.keys, sizes.values], dim=-1)
    query, key = (part.unflatten(-1, (key_heads, -1)).repeat_interleave(sizes.group, dim=1) for part in (query, key))
    beta, decay = gates.unbind(1)

    # What is left of the state, and of each kept token what it adds to what is read.
    memory = state[:lanes].float()
    of_tokens, left = torch.zeros_like(deltas[:lanes, :, 0]), decay
    for age, is_kept in enumerate(_kept(position, answered, live), 1):
        old, added, faded = _tokens(rings, position - age, sizes.group)
        shared = rounded((old * query).sum(-1) * left, heads.dtype)
        of_tokens = torch.where(is_kept[..., None], of_tokens + shared[..., None] * added, of_tokens)
        left = torch.where(is_kept, left * faded, left)
    of_state = (memory * query[..., None]).sum(-2) * left[..., None]
    memory = settled(memory, *rings, position, answered, None, live)
    full = live & (answered > 1) & (position % BLOCK == 0)
    state[:lanes] = torch.where(full[:, None, None, None], memory.to(state.dtype), state[:lanes])

    known = (memory * decay[..., None, None] * key[..., None]).sum(-2)
    value = rounded(value.unflatten(-1, (sizes.value_heads, -1)) * beta[..., None], heads.dtype)
    delta = value - known * beta[..., None]
    own = rounded((key * query).sum(-1), heads.dtype)[..., None] * delta
    core = (of_state + of_tokens + own) * sizes.key_dim**-0.5

    new_keys = heads[:, sizes.keys : 2 * sizes.keys].unflatten(-1, (key_heads, -1))
    for ring, new in zip(rings, (new_keys, delta, decay), strict=True):
        _put(ring, new.to(ring.dtype), position % PLACES, live)
    raw = projected[:, : sizes.channels]
    _put(window[:lanes], raw, position % sizes.conv_kernel, live)
    return gated_core(core, projected, norm_weight, eps, sizes).masked_fill(~live[:, None], 0.0)


def settled(
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    position: torch.Tensor,
    answered: torch.Tensor,
    stepped: torch.Tensor | None,
    live: torch.Tensor,
) -> torch.Tensor:
    """[B, HV, DK, DV] fp32: the states of B rows with the tokens that are kept beside them, before the token at
    ``position``; those of rows that are not ``live`` [B] as they are. Arguments as of :func:`gdn_deferred`, by row;
    a step has brought one token, whatever ``stepped`` says."""
    memory, group = state.float(), state.shape[1] // keys.shape[1]
    for age, is_kept in reversed(list(enumerate(_kept(position, answered, live), 1))):
        old, added, faded = _tokens((keys, deltas, decays), position - age, group)
        after = memory * faded[..., None, None] + old[..., None] * added[..., None, :]
        memory = torch.where(is_kept[..., None, None], after, memory)
    return memory


def _kept(position: torch.Tensor, answered: torch.Tensor, live: torch.Tensor) -> list[torch.Tensor]:
    """For each age, from the token right before on, whether such a token is kept: [B, 1] each."""
    count = torch.minimum(answered - 1, (position - 1) % BLOCK + 1)
    return [(live & (count >= age))[:, None] for age in range(1, BLOCK + 1)]


def _tokens(
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor], position: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key [B, HV, DK], delta [B, HV, DV] and decay [B, HV] of the tokens at ``position`` [B], in fp32."""
    keys, deltas, decays = rings
    rows, place = torch.arange(len(position), device=position.device), position % PLACES
    return keys[rows, :, place].float().repeat_interleave(group, dim=1), deltas[rows, :, place], decays[rows, :, place]


def _put(ring: torch.Tensor, new: torch.Tensor, number: torch.Tensor, live: torch.Tensor) -> None:
    """``new`` [B, H, ...] into place ``number[b]`` of row b of ``ring`` [B, H, places, ...], where rows are live."""
    lanes = torch.arange(len(number), device=ring.device)[live]
    ring.movedim(2, 1)[lanes, number[live]] = new[live]


@torch.library.custom_op(
    "deepspeed_hybrid::gdn_deferred", mutates_args=("window", "state", "keys", "deltas", "decays"), device_types="cuda"
)
def gdn_deferred_op(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
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
    rounded_heads: bool = False,
) -> torch.Tensor:
    """:func:`gdn_deferred` without the refusal of gradients."""
    from deepspeed_hybrid.ops.triton.gdn_deferred import launch  # here, because a torch for CPUs has no Triton
    from deepspeed_hybrid.ops.triton.gdn_heads import launch as launch_heads

    layer, kept = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    places = position, answered, counts
    sizes = checked_deferred(projected, window, *layer, state, *kept, norm_weight, *places, key_heads, rounded_heads)
    if gdn_streamed.takes(projected, window, *layer, state, *kept, norm_weight, sizes):
        rest = A_log, dt_bias, state, *kept, norm_weight, eps, *places, key_heads
        return gdn_streamed.launch(projected, window, conv_weight, *rest)
    of_row = position, counts, key_heads, sizes.key_dim
    made = launch_heads(projected, window, *layer, *of_row, rounded_heads=rounded_heads)
    return launch(projected, *made, window, state, *kept, norm_weight, eps, *places, sizes)


@gdn_deferred_op.register_fake
def _(projected, window, conv_weight, conv_bias, A_log, dt_bias, state, *rest) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


gdn_deferred_op.register_kernel("cpu")(gdn_deferred_reference)


def gdn_deferred(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
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
    rounded_heads: bool = False,
) -> torch.Tensor:
    """One token of every row, like :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`, with states written late.

    On CUDA this is one launch of :mod:`deepspeed_hybrid.ops.gdn_streamed` for layers that it takes, and three of
    Triton's kernels for others, without a host sync. Window, state and conv_weight may be read ahead of the end of the
    kernels before: nothing since the last launch that lets no successor start early may have written to them. A row's
    bits are the same in any batch. On a CPU it is :func:`gdn_deferred_reference`. There is no gradient.

    Args:
        projected, window, conv_weight, conv_bias, A_log, dt_bias, norm_weight, eps, key_heads, rounded_heads: as of
            gdn_decode; the window is updated.
        state: [S, HV, DK, DV] fp32, bf16 or fp16; updated in rows whose position 15 divides.
        keys: [S, HK, 16, DK] in projected's dtype if ``rounded_heads``, else fp32; deltas: [S, HV, 16, DV] fp32;
            decays: [S, HV, 16] fp32. The token at position p is in place p % 16; updated.
        position: [B] int64, the token's place in its sequence.
        answered: [B] int64, tokens that the row has had of decode steps like this, with the present one: as many of
            those are kept beside the state, at most those from the last multiple of 15 on.
        counts: [B] int64, 1, or 0 for a row that is none: whatever it holds does not matter, and its bits stay.

    Returns:
        [B, HV * DV] in projected's dtype, contiguous; zeros for rows that are none.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("gdn_deferred", projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight)
    layer, kept = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    rest = norm_weight, eps, position, answered, counts, key_heads, rounded_heads
    return gdn_deferred_op(projected, window, *layer, state, *kept, *rest)


def checked_deferred(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    answered: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    layer = conv_weight, conv_bias, A_log, dt_bias, state, norm_weight
    sizes = checked_sizes(projected, window, *layer, position, None, key_heads)
    slots, lanes = state.shape[0], len(projected)
    expected = {
        "keys": (keys, (slots, key_heads, PLACES, sizes.key_dim), (heads_dtype(projected, rounded_heads),)),
        "deltas": (deltas, (slots, sizes.value_heads, PLACES, sizes.value_dim), (torch.float32,)),
        "decays": (decays, (slots, sizes.value_heads, PLACES), (torch.float32,)),
        "answered": (answered, (lanes,), (torch.int64,)),
        "counts": (counts, (lanes,), (torch.int64,)),
    }
    check_tensors(expected, projected.device)
    return sizes
