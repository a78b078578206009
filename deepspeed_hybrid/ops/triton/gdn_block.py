# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_block and gdn_commit, and its launches."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_block import checked_block, checked_commit
from deepspeed_hybrid.ops.gdn_decode import GdnSizes
from deepspeed_hybrid.ops.triton import gated_norm
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.gdn_decode import _product
from deepspeed_hybrid.ops.triton.rounding import rounded

# A program has some of a head's columns, which one warp can hold in registers: no thread ever waits for another warp.
# Sums over DK are then added up in the order of gdn_decode, whose four warps have every fourth row of an fp32 state of
# 128 columns each, as the four groups of eight threads do here. Of few rows, which leave the card idle, a block takes
# a quarter less in programs of half as many columns; where vectors of four divide a head, that changes no sum.
COLUMNS, FEW_COLUMNS, FEW_LANES = 32, 16, 4
MOST_LAYERS = 64  # of a launch: each has five addresses among its parameters, of which 4 KiB are sure


@triton.jit
def _of_layer(tensors, layer, LAYERS: tl.constexpr):
    """One of a tuple's pointers, by a number that is not known before."""
    chosen = tensors[0]
    for index in tl.static_range(1, LAYERS):
        chosen = tl.where(layer == index, tensors[index], chosen)
    return chosen


@triton.jit(do_not_specialize=["projected_stride"], do_not_specialize_on_alignment=["counts", "core", "position"])
def gdn_block_kernel(
    all_heads,
    all_gates,
    all_states,
    counts,
    core,
    all_projected,
    projected_stride,
    all_windows,
    position,
    minus_zero,
    LAYERS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row and some columns of a value head of a layer, whose state stays in registers over all
    tokens.

    What tokens read goes to ``core``, where there is one; otherwise states and windows are written. A token's vectors
    are asked for while the one before it is at work.
    """
    announce(PDL)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SPLITS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES

    head, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tl.program_id(1).to(tl.int64)  # a slot times its size can pass 2^31
    lanes = tl.num_programs(1)
    key_head = head // GROUP
    within = tl.arange(0, TILE)
    # Read in so short vectors, columns take eight threads however many they are.
    column = split * COLUMNS + tl.max_contiguous(tl.arange(0, COLUMNS), max(COLUMNS // 8, 1))
    key_mask, value_mask = within < KEY_DIM, column < VALUE_DIM

    layer = tl.program_id(2)
    heads, gates = _of_layer(all_heads, layer, LAYERS), _of_layer(all_gates, layer, LAYERS)
    state = _of_layer(all_states, layer, LAYERS)

    # Older than this step, and so asked for ahead of the end of the kernel before.
    state_place = state + (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_place += within[:, None] * VALUE_DIM + column[None, :]
    state_mask = key_mask[:, None] & value_mask[None, :]
    memory = tl.load(state_place, mask=state_mask, other=0.0).to(tl.float32)

    wait(PDL)
    count = tl.load(counts + row).to(tl.int32)
    here = heads + row * CHANNELS
    key_place = here + KEYS + key_head * KEY_DIM + within
    value_place = here + 2 * KEYS + head * VALUE_DIM + column
    gate_place = gates + row * (2 * VALUE_HEADS) + head
    if core is not None:
        core_place = core + row * VALUES + head * VALUE_DIM + column
    next_k = tl.load(key_place, mask=key_mask & (count > 0), other=0.0)
    next_q = tl.load(key_place - KEYS, mask=key_mask & (count > 0) & (core is not None), other=0.0)
    next_v = tl.load(value_place, mask=value_mask & (count > 0), other=0.0)
    next_beta, next_decay = tl.load(gate_place), tl.load(gate_place + VALUE_HEADS)
    for index in range(0, count):
        k, q, v = next_k.to(tl.float32), next_q.to(tl.float32) * (KEY_DIM**-0.5), next_v.to(tl.float32)
        beta, decay = next_beta, next_decay
        step = tl.where(index + 1 < count, lanes, 0).to(tl.int64)  # behind the last token, that one once more
        key_place += step * CHANNELS
        value_place += step * CHANNELS
        gate_place += step * (2 * VALUE_HEADS)
        next_k = tl.load(key_place, mask=key_mask, other=0.0)
        next_q = tl.load(key_place - KEYS, mask=key_mask & (core is not None), other=0.0)
        next_v = tl.load(value_place, mask=value_mask, other=0.0)
        next_beta, next_decay = tl.load(gate_place), tl.load(gate_place + VALUE_HEADS)

        memory *= decay
        known = tl.sum(_product(memory, k[:, None], minus_zero), axis=0)
        delta = tl.fma(-known, beta, rounded(v * beta, heads.dtype.element_ty))
        memory += k[:, None] * delta[None, :]
        if core is not None:
            read = tl.sum(memory * q[:, None], axis=0)
            tl.store(core_place, read.to(core.dtype.element_ty), mask=value_mask)
            core_place += lanes * VALUES
        memory = memory.to(state.dtype.element_ty).to(tl.float32)  # as the next step finds it

    if core is None:
        if count > 0:
            tl.store(state_place, memory.to(state.dtype.element_ty), mask=state_mask)
        # The last tokens into the window: values by whose they are, queries and keys in shares by the first head.
        SHARE: tl.constexpr = (TILE + SPLITS - 1) // SPLITS
        mine = key_mask & (within // SHARE == split) & (head % GROUP == 0)
        start = (tl.load(position + row) % CONV_KERNEL).to(tl.int32)
        ring = _of_layer(all_windows, layer, LAYERS) + row * (CHANNELS * CONV_KERNEL)
        projected = _of_layer(all_projected, layer, LAYERS)
        for back in tl.static_range(0, CONV_KERNEL):
            index = count - 1 - back
            there = projected + (index * lanes + row) * projected_stride
            place = ring + (start + index + CONV_KERNEL) % CONV_KERNEL  # index is at least -CONV_KERNEL
            for part in tl.static_range(0, 2):
                channel = part * KEYS + key_head * KEY_DIM + within
                raw = tl.load(there + channel, mask=mine & (index >= 0), other=0.0)
                tl.store(place + channel * CONV_KERNEL, raw, mask=mine & (index >= 0))
            channel = 2 * KEYS + head * VALUE_DIM + column
            raw = tl.load(there + channel, mask=value_mask & (index >= 0), other=0.0)
            tl.store(place + channel * CONV_KERNEL, raw, mask=value_mask & (index >= 0))


def launch(
    projected: torch.Tensor,
    heads: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    counts: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """``gdn_block`` through the kernels, on CUDA or in Triton's interpreter."""
    sizes = checked_block(projected, heads, gates, state, counts, key_heads, norm_weight=norm_weight)
    lanes, core = counts.numel(), projected.new_empty(projected.shape[0], sizes.values)
    if not core.numel():
        return core
    _scan(sizes, [heads], [gates], [state], counts, core, None, None, None)
    z = projected[:, sizes.channels : sizes.channels + sizes.values].unflatten(0, (-1, lanes))
    core = core.view(-1, lanes, sizes.value_heads, sizes.value_dim)
    return gated_norm.launch(core, z, norm_weight, eps, counts).flatten(0, 1)


def launch_commit(
    projected: list[torch.Tensor],
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    window: list[torch.Tensor],
    state: list[torch.Tensor],
    position: torch.Tensor,
    counts: torch.Tensor,
    key_heads: int,
) -> None:
    """``gdn_commit`` through the kernel, all layers in one launch."""
    sizes = checked_commit(projected, heads, gates, window, state, position, counts, key_heads)
    if sizes is None or not projected[0].numel():
        return
    for first in range(0, len(state), MOST_LAYERS):
        some = slice(first, first + MOST_LAYERS)
        _scan(sizes, heads[some], gates[some], state[some], counts, None, projected[some], window[some], position)


def _scan(
    sizes: GdnSizes,
    heads: list[torch.Tensor],
    gates: list[torch.Tensor],
    state: list[torch.Tensor],
    counts: torch.Tensor,
    core: torch.Tensor | None,
    projected: list[torch.Tensor] | None,
    window: list[torch.Tensor] | None,
    position: torch.Tensor | None,
) -> None:
    few = core is not None and counts.numel() <= FEW_LANES and sizes.value_dim % 4 == 0
    columns = min(FEW_COLUMNS if few else COLUMNS, triton.next_power_of_2(sizes.value_dim))
    splits = triton.cdiv(sizes.value_dim, columns)
    with torch.cuda.device_of(counts):  # Triton launches on the current device
        gdn_block_kernel[(sizes.value_heads * splits, counts.numel(), len(state))](
            tuple(heads),
            tuple(gates),
            tuple(state),
            counts,
            core,
            None if projected is None else tuple(projected),
            0 if projected is None else projected[0].stride(0),
            None if window is None else tuple(window),
            position,
            -0.0,
            LAYERS=len(state),
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_DIM=sizes.key_dim,
            VALUE_DIM=sizes.value_dim,
            CONV_KERNEL=sizes.conv_kernel,
            TILE=triton.next_power_of_2(sizes.key_dim),
            COLUMNS=columns,
            **pdl(counts),
            num_warps=1,
        )
