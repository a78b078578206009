# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_deferred, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_decode import GdnSizes
from deepspeed_hybrid.ops.gdn_deferred import BLOCK, PLACES
from deepspeed_hybrid.ops.triton import gated_norm
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded

COLUMNS, WARPS = 32, 1  # of a head's state for a program, and its warps: none ever waits for another


# Where a ring's rows begin is a multiple of their length: alignments are known from there.
@triton.jit(
    do_not_specialize=["projected_stride"],
    do_not_specialize_on_alignment=["position", "answered", "counts", "core", "decays"],
)
def gdn_deferred_kernel(
    projected,
    projected_stride,
    heads,
    gates,
    window,
    state,
    keys,
    deltas,
    decays,
    position,
    answered,
    counts,
    core,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row and some columns of a value head."""
    announce(PDL)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SPLITS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES

    head, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tl.program_id(1).to(tl.int64)  # a slot times its size can pass 2^31
    key_head = head // GROUP
    within = tl.arange(0, TILE)
    column = split * COLUMNS + tl.arange(0, COLUMNS)
    key_mask, value_mask = within < KEY_DIM, column < VALUE_DIM

    # Older than this step, and so asked for ahead of the end of the kernel before.
    state += (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + within[:, None] * VALUE_DIM + column[None, :]
    state_mask = key_mask[:, None] & value_mask[None, :]
    memory = tl.load(state, mask=state_mask, other=0.0).to(tl.float32)

    wait(PDL)
    if tl.load(counts + row) == 0:
        return
    place = tl.load(position + row)
    earlier = (tl.load(answered + row) - 1).to(tl.int32)
    count = tl.minimum(earlier, ((place - 1) % BLOCK + 1).to(tl.int32))  # of kept tokens, the oldest first
    now = (place % PLACES).to(tl.int32)
    token = tl.arange(0, PLACES)
    is_kept, where = token < count, (now - count + token + PLACES) % PLACES
    next_kept, next_where = token + 1 < count, (now - count + token + 1 + PLACES) % PLACES
    keys += (row * KEY_HEADS + key_head) * (PLACES * KEY_DIM) + within
    deltas += (row * VALUE_HEADS + head) * (PLACES * VALUE_DIM) + column
    decays += (row * VALUE_HEADS + head) * PLACES
    kept = tl.load(keys[None, :] + where[:, None] * KEY_DIM, mask=is_kept[:, None] & key_mask[None, :], other=0.0)
    added = tl.load(
        deltas[None, :] + where[:, None] * VALUE_DIM, mask=is_kept[:, None] & value_mask[None, :], other=0.0
    )
    faded = tl.load(decays + where, mask=is_kept, other=1.0)
    later = tl.load(decays + next_where, mask=next_kept, other=1.0)

    here = heads + row * CHANNELS
    k = tl.load(here + KEYS + key_head * KEY_DIM + within, mask=key_mask, other=0.0)
    q = tl.load(here + key_head * KEY_DIM + within, mask=key_mask, other=0.0).to(tl.float32)
    v = tl.load(here + 2 * KEYS + head * VALUE_DIM + column, mask=value_mask, other=0.0).to(tl.float32)
    gates += row * (2 * VALUE_HEADS) + head
    beta, decay = tl.load(gates), tl.load(gates + VALUE_HEADS)

    # What is left by now of the state and of each kept token.
    of_state = tl.sum(tl.where(token == 0, tl.cumprod(faded, axis=0, reverse=True), 0.0)) * decay
    of_token = tl.cumprod(later, axis=0, reverse=True) * decay
    known, read = tl.sum(memory * k.to(tl.float32)[:, None], axis=0), tl.sum(memory * q[:, None], axis=0)
    kept = kept.to(tl.float32)
    with_key = tl.sum(kept * k.to(tl.float32)[None, :], axis=1) * of_token
    with_query = rounded(tl.sum(kept * q[None, :], axis=1) * of_token, keys.dtype.element_ty)
    own = rounded(tl.sum(k.to(tl.float32) * q), keys.dtype.element_ty)
    known = known * of_state + tl.sum(with_key[:, None] * added, axis=0)
    delta = tl.fma(-known, beta, rounded(v * beta, keys.dtype.element_ty))
    read = (read * of_state + tl.sum(with_query[:, None] * added, axis=0) + own * delta) * (KEY_DIM**-0.5)
    tl.store(core + row * VALUES + head * VALUE_DIM + column, read.to(core.dtype.element_ty), mask=value_mask)

    if (earlier > 0) & (place % BLOCK == 0):
        for index in range(0, count):
            old = (now - count + index + PLACES) % PLACES
            key = tl.load(keys + old * KEY_DIM, mask=key_mask, other=0.0).to(tl.float32)
            of_key = tl.load(deltas + old * VALUE_DIM, mask=value_mask, other=0.0)
            memory = memory * tl.load(decays + old) + key[:, None] * of_key[None, :]
        tl.store(state, memory.to(state.dtype.element_ty), mask=state_mask)

    # Values by whose they are, queries and keys in shares by the first head of those that have them.
    SHARE: tl.constexpr = (TILE + SPLITS - 1) // SPLITS
    mine = key_mask & (within // SHARE == split) & (head % GROUP == 0)
    tl.store(keys + now * KEY_DIM, k, mask=mine)
    tl.store(deltas + now * VALUE_DIM, delta, mask=value_mask)
    tl.store(decays + now, decay, mask=split == 0)
    ring = window + row * (CHANNELS * CONV_KERNEL) + (place % CONV_KERNEL).to(tl.int32)
    raw = projected + row * projected_stride
    for part in tl.static_range(0, 2):
        channel = part * KEYS + key_head * KEY_DIM + within
        tl.store(ring + channel * CONV_KERNEL, tl.load(raw + channel, mask=mine, other=0.0), mask=mine)
    channel = 2 * KEYS + head * VALUE_DIM + column
    tl.store(ring + channel * CONV_KERNEL, tl.load(raw + channel, mask=value_mask, other=0.0), mask=value_mask)


def launch(
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
    sizes: GdnSizes,
) -> torch.Tensor:
    """What follows ``gdn_heads`` in ``gdn_deferred``, on CUDA or in Triton's interpreter, on checked arguments."""
    rows, core = len(projected), projected.new_empty(len(projected), sizes.values)
    if not core.numel():
        return core
    columns = min(COLUMNS, triton.next_power_of_2(sizes.value_dim))
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        gdn_deferred_kernel[(sizes.value_heads * triton.cdiv(sizes.value_dim, columns), rows)](
            projected,
            projected.stride(0),
            heads,
            gates,
            window,
            state,
            keys,
            deltas,
            decays,
            position,
            answered,
            counts,
            core,
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_DIM=sizes.key_dim,
            VALUE_DIM=sizes.value_dim,
            CONV_KERNEL=sizes.conv_kernel,
            PLACES=PLACES,
            BLOCK=BLOCK,
            TILE=triton.next_power_of_2(sizes.key_dim),
            COLUMNS=columns,
            **pdl(projected),
            num_warps=WARPS,
        )
    z = projected[:, sizes.channels : sizes.channels + sizes.values]
    core = core.view(1, rows, sizes.value_heads, sizes.value_dim)
    return gated_norm.launch(core, z[None], norm_weight, eps, counts)[0]
