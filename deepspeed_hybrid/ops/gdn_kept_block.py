# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Several tokens a row through a GatedDeltaNet layer, of which it is decided afterwards how many have been, with
states written late.

What :mod:`deepspeed_hybrid.ops.gdn_deferred` is to a single token: key, decay and what the delta rule writes of each
token are put beside the state, into rings, where they are nothing until the row's position has passed them. Nothing
is left to do for those that stay but to advance the row, and for those that do not, nothing at all.

A token is read with a state that has all tokens in it up to a multiple of 16, the last one that is seven positions
back or more, and with the tokens since. That goes by its position alone: its bits do not depend on how a row's tokens
come in blocks. As none of eight tokens are in the states of the others, one pass over the state that is there gives
the products with all of them, with the one state or, from some token on, with the next; a block of more takes a pass
for each eight. A step finds the state that was the last step's first token's, and leaves that of its own.

With S the state, g the decays, k and d the kept tokens' keys and what was written for them, token t reads

    k_t S' = (g ... g_t) k_t S + sum over kept i of (g_{i+1} ... g_t) (k_t k_i) d_i

and the same with its query, whose products with keys are rounded to the heads' dtype.
"""

import functools

import torch

from deepspeed_hybrid.ops.gdn_decode import GdnSizes, check_tensors, gated_core
from deepspeed_hybrid.ops.gdn_heads import checked_heads, gdn_heads_reference, heads_dtype, tokens_a_row
from deepspeed_hybrid.ops.inference import refuse_recording
from deepspeed_hybrid.ops.loader import load, op_obstacle
from deepspeed_hybrid.ops.rounding import rounded

MOST_TOKENS = 16  # of a block
TAKEN = 16  # tokens that a state takes in at a time
LAG = 7  # tokens at least that come before it does
MOST_BESIDE = TAKEN + LAG - 1 + MOST_TOKENS  # tokens that a block finds beside a state
PLACES = MOST_BESIDE + MOST_TOKENS + 2  # R: for these and for its own, in fours

SHARED_BYTES = 227 * 1024  # of a block of the kernel

# Shapes: T tokens, B rows, S slots, C conv channels, K conv kernel, HK/HV key/value heads, DK/DV their dims, R places.


def suits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CUDA op computes a layer that :mod:`deepspeed_hybrid.ops.gdn_streamed` suits, too."""
    return dtype == torch.bfloat16 and obstacle(device.index) is None


@functools.cache
def obstacle(index: int) -> str | None:
    """Why the CUDA op is not for this machine and card, or None: it wants a copy engine and a large shared memory, as
    Hopper has, and Blackwell for servers."""
    card = torch.cuda.get_device_properties(index)
    if card.major < 9 or card.shared_memory_per_block_optin < SHARED_BYTES:
        return f"{card.name} has no copy engine, or too little shared memory"
    return op_obstacle("gdn_streamed_block")


def in_state(position: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    """Tokens that are in the state with which the one at ``position`` is read; prompts are from the beginning."""
    return torch.maximum(prompt, (position - LAG).div(TAKEN, rounding_mode="floor") * TAKEN)


def _found(position: torch.Tensor, answered: torch.Tensor, stepped: torch.Tensor) -> torch.Tensor:
    """[B] int64: tokens that a step finds in the state; all before it where it is the first."""
    return torch.minimum(in_state(position - stepped, position + 1 - answered), position)


def gdn_kept_block_reference(
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
    stepped: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """What :func:`gdn_kept_block` does, in plain torch on any device, token by token."""
    layer, rings = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    rows = position, answered, stepped, counts
    sizes = checked_kept_block(projected, window, *layer, state, *rings, norm_weight, *rows, key_heads, rounded_heads)
    of_row = position, counts, key_heads, sizes.key_dim
    heads, gates = gdn_heads_reference(projected, window, *layer, *of_row, rounded_heads=rounded_heads)
    lanes, prompt = counts.numel(), position + 1 - answered
    rings = tuple(ring[:lanes] for ring in rings)
    found, first = _found(position, answered, stepped), in_state(position, prompt)
    memory = taken_in(state[:lanes].float(), rings, found, first, counts > 0)
    written = (counts > 0) & (first > found)
    state[:lanes] = torch.where(written[:, None, None, None], memory.to(state.dtype), state[:lanes])
    if projected.shape[0] == lanes:
        column = (position % sizes.conv_kernel)[:, None, None].expand(-1, sizes.channels, 1)
        ring = window[:lanes].scatter(2, column, projected[:, : sizes.channels, None])
        window[:lanes] = torch.where(counts[:, None, None] > 0, ring, window[:lanes])

    out = [projected.new_empty(0, sizes.values)]
    steps = zip(*(part.split(lanes) for part in (projected, heads, gates)), strict=True) if lanes else ()
    for index, (of_token, of_heads, of_gates) in enumerate(steps):
        live, token = counts > index, position + index
        begin = in_state(token, prompt)
        seen = taken_in(memory, rings, first, begin, live)
        core, *new = _read(of_heads, of_gates, seen, rings, begin, token, live, sizes)
        for ring, value in zip(rings, new, strict=True):
            places = torch.arange(lanes, device=ring.device)[live]
            ring.movedim(2, 1)[places, token[live] % ring.shape[2]] = value[live].to(ring.dtype)
        out.append(gated_core(core, of_token, norm_weight, eps, sizes).masked_fill(~live[:, None], 0.0))
    return torch.cat(out)


def _read(
    heads: torch.Tensor,
    gates: torch.Tensor,
    memory: torch.Tensor,
    rings: tuple[torch.Tensor, ...],
    begin: torch.Tensor,
    token: torch.Tensor,
    live: torch.Tensor,
    sizes: GdnSizes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the tokens at ``token`` [B] read, [B, HV, DV], and what is kept of them: key, delta, decay."""
    query, key, value = heads.float().split([sizes.keys, sizes.keys, sizes.values], dim=-1)
    query, key = (
        part.unflatten(-1, (sizes.key_heads, -1)).repeat_interleave(sizes.group, dim=1) for part in (query, key)
    )
    beta, decay = gates.unbind(1)
    kept = [_tokens(rings, begin + age, live & (begin + age < token), sizes.group) for age in range(TAKEN + LAG - 1)]
    left = _left([faded for *_, faded in kept], decay)
    known, read = torch.zeros_like(value).unflatten(-1, (sizes.value_heads, -1)), 0.0
    for (old, added, _), faded in zip(kept, left[1:], strict=True):
        known = known + ((old * key).sum(-1) * faded)[..., None] * added
        read = read + rounded((old * query).sum(-1) * faded, heads.dtype)[..., None] * added
    known = known + (memory * key[..., None]).sum(-2) * left[0][..., None]
    read = read + (memory * query[..., None]).sum(-2) * left[0][..., None]
    value = rounded(value.unflatten(-1, (sizes.value_heads, -1)) * beta[..., None], heads.dtype)
    delta = value - known * beta[..., None]
    read = read + rounded((key * query).sum(-1), heads.dtype)[..., None] * delta
    new_keys = heads[:, sizes.keys : 2 * sizes.keys].unflatten(-1, (sizes.key_heads, -1))
    return read * sizes.key_dim**-0.5, new_keys, delta, decay


def taken_in(
    state: torch.Tensor,
    rings: tuple[torch.Tensor, ...],
    begin: torch.Tensor,
    end: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """[B, HV, DK, DV] fp32: states of B rows, ``begin`` [B] tokens in them, with those up to ``end`` [B] as well;
    those of rows that are not ``live`` [B] as they are."""
    group, most = state.shape[1] // rings[0].shape[1], rings[0].shape[2]
    count = min(most, int((end - begin)[live].max())) if bool(live.any()) else 0
    tokens = [_tokens(rings, begin + age, live & (begin + age < end), group) for age in range(count)]
    left = _left([faded for *_, faded in tokens])
    memory = state * left[0][..., None, None] if tokens else state
    for (old, added, _), faded in zip(tokens, left[1:], strict=True):
        memory = memory + old[..., None] * (added * faded[..., None])[..., None, :]
    return torch.where(live[:, None, None, None], memory, state)


def settled(
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    position: torch.Tensor,
    answered: torch.Tensor,
    stepped: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """[B, HV, DK, DV] fp32: the states of B rows with the tokens that are kept beside them, before the token at
    ``position``; those of rows that are not ``live`` [B] as they are. Arguments as of :func:`gdn_kept_block`, by
    row."""
    rings, first = (keys, deltas, decays), in_state(position, position + 1 - answered)
    memory = taken_in(state.float(), rings, _found(position, answered, stepped), first, live)
    return taken_in(memory, rings, first, position, live)


def _left(decays: list[torch.Tensor], last: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What decays leave of what was there before the first of them, and of what came with each."""
    left = [torch.ones_like(decays[0] if decays else last)] if decays or last is not None else [torch.ones(())]
    for decay in decays:
        left = [*(part * decay for part in left), torch.ones_like(decay)]
    return left if last is None else [part * last for part in left]


def _tokens(
    rings: tuple[torch.Tensor, ...], position: torch.Tensor, there: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key [B, HV, DK], delta [B, HV, DV] and decay [B, HV] of the tokens at ``position`` [B], in fp32; of those that
    are not ``there`` zeros, and a decay of 1."""
    keys, deltas, decays = rings
    rows, place = torch.arange(len(position), device=position.device), position % keys.shape[2]
    key, delta = keys[rows, :, place].float().repeat_interleave(group, dim=1), deltas[rows, :, place]
    there = there[:, None]
    return (
        torch.where(there[..., None], key, 0.0),
        torch.where(there[..., None], delta, 0.0),
        torch.where(there, decays[rows, :, place], 1.0),
    )


@torch.library.custom_op(
    "deepspeed_hybrid::gdn_kept_block",
    mutates_args=("window", "state", "keys", "deltas", "decays"),
    device_types="cuda",
)
def gdn_kept_block_op(
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
    stepped: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """:func:`gdn_kept_block` without the refusal of gradients."""
    layer, rings = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    rows = position, answered, stepped, counts
    checked_kept_block(projected, window, *layer, state, *rings, norm_weight, *rows, key_heads, rounded_heads)
    if conv_bias is not None or not rounded_heads:
        raise RuntimeError("gdn_kept_block: on CUDA there is no bias of the conv, and heads are rounded")
    made = A_log, dt_bias, state, *rings, norm_weight, eps, *rows, key_heads
    return load("gdn_streamed_block").gdn_streamed_block(projected, window, conv_weight, *made)


@gdn_kept_block_op.register_fake
def _(projected, window, conv_weight, conv_bias, A_log, dt_bias, state, *rest) -> torch.Tensor:
    return projected.new_empty(projected.shape[0], state.shape[1] * state.shape[3])


gdn_kept_block_op.register_kernel("cpu")(gdn_kept_block_reference)


def gdn_kept_block(
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
    stepped: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
) -> torch.Tensor:
    """The outputs of up to T new tokens a row, one after another, each of which is put beside the state.

    On CUDA this is one launch of the op gdn_streamed_block for each eight tokens, without a host sync, for layers in
    bfloat16 that :func:`deepspeed_hybrid.ops.gdn_streamed.takes` names, and for no others. Window, state and
    conv_weight may be read ahead of the end of the kernels before: nothing since the last launch that lets no
    successor start early may have written to them. A row's bits are the same in any batch and in blocks of any length.
    On a CPU it is :func:`gdn_kept_block_reference`. There is no gradient.

    Args:
        projected: [T * B, N], token by token, of up to 16 tokens; window, conv_weight, conv_bias, A_log, dt_bias,
            norm_weight, eps, key_heads, rounded_heads: as of gdn_decode. The window is updated if T is 1; else
            that is left to :func:`deepspeed_hybrid.ops.gdn_windows.gdn_windows`.
        state: [S, HV, DK, DV] fp32; updated in rows whose first token is read with another one than the last step's.
        keys: [S, HK, 56, DK] in projected's dtype if ``rounded_heads``, else fp32; deltas: [S, HV, 56, DV] fp32;
            decays: [S, HV, 56] fp32. The token at position p is in place p % 56; updated.
        position: [B] int64, the first token's place in its sequence.
        answered: [B] int64, tokens that the row has had of steps like this, with the first one: those before are in
            the state from the beginning.
        stepped: [B] int64, tokens that the row's last step has brought, of no matter for a row that has had none.
        counts: [B] int64, 0 to T: tokens that there are. What is there of others does not matter, and of rows that
            have none nothing does, and their bits stay.

    Returns:
        [T * B, HV * DV] in projected's dtype, contiguous; zeros for tokens that there are not.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device.
    """
    refuse_recording("gdn_kept_block", projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight)
    layer, rings = (conv_weight, conv_bias, A_log, dt_bias), (keys, deltas, decays)
    rest = norm_weight, eps, position, answered, stepped, counts, key_heads, rounded_heads
    return gdn_kept_block_op(projected, window, *layer, state, *rings, *rest)


def checked_kept_block(
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
    stepped: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
    rounded_heads: bool,
) -> GdnSizes:
    """The layer's sizes, from arguments that fit each other; otherwise a RuntimeError that names one."""
    if state.dim() != 4 or keys.dim() != 4:
        raise RuntimeError(f"state and keys must have 4 dimensions, got {tuple(state.shape)} and {tuple(keys.shape)}")
    slots, value_heads, key_dim, value_dim = state.shape
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_heads(projected, window, *layer, position, counts, key_heads, key_dim)
    lanes = position.numel()
    tokens = tokens_a_row(projected, lanes)
    if tokens > MOST_TOKENS:
        raise RuntimeError(f"projected must have at most {MOST_TOKENS} tokens a row, got {tokens}")
    expected = {
        "state": (state, (window.shape[0], sizes.value_heads, key_dim, sizes.value_dim), (torch.float32,)),
        "keys": (keys, (slots, key_heads, PLACES, key_dim), (heads_dtype(projected, rounded_heads),)),
        "deltas": (deltas, (slots, value_heads, PLACES, value_dim), (torch.float32,)),
        "decays": (decays, (slots, value_heads, PLACES), (torch.float32,)),
        "norm_weight": (norm_weight, (value_dim,), (projected.dtype, torch.float32)),
        "answered": (answered, (lanes,), (torch.int64,)),
        "stepped": (stepped, (lanes,), (torch.int64,)),
    }
    check_tensors(expected, projected.device)
    return sizes
