# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_heads, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_decode import L2_EPS
from deepspeed_hybrid.ops.gdn_heads import checked_heads, heads_dtype
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.gdn_decode import OPTIONS, _activated, _parts, _sigmoid, _softplus
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if


# Nothing is read in vectors that could be longer for an alignment: which there is, is no reason to compile again.
@triton.jit(
    do_not_specialize=["projected_stride", "lanes"],
    do_not_specialize_on_alignment=[
        "projected",
        "window",
        "conv_weight",
        "conv_bias",
        "A_log",
        "dt_bias",
        "position",
        "counts",
        "heads",
        "gates",
    ],
)
def gdn_heads_kernel(
    projected,
    projected_stride,
    lanes,
    window,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    position,
    counts,
    heads,
    gates,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TILE: tl.constexpr,
    L2_EPSILON: tl.constexpr,
    ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a token, a key head and two of the value heads that share it.

    They lie in one vector, a quarter each, as q, k, v and z do in gdn_decode, so that squares are summed in its order.
    """
    announce(PDL)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PAIRS: tl.constexpr = (GROUP + 1) // 2
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES

    key_head, pair = tl.program_id(0) // PAIRS, tl.program_id(0) % PAIRS
    token = tl.program_id(1).to(tl.int64)
    index, row = token // lanes, token % lanes

    lane = tl.arange(0, 4 * TILE)
    part, inside = lane // TILE, lane % TILE
    member = 2 * pair + part - 2  # of the key head's value heads
    start = tl.where(part < 2, part * KEYS + key_head * KEY_DIM, 2 * KEYS + (key_head * GROUP + member) * VALUE_DIM)
    present = tl.where(part < 2, inside < KEY_DIM, (inside < VALUE_DIM) & (member < GROUP))
    channel = start + inside
    taps = conv_weight + channel * CONV_KERNEL
    last_tap = tl.load(taps + CONV_KERNEL - 1, mask=present, other=0.0).to(tl.float32)
    window += row * (CHANNELS * CONV_KERNEL)

    both = tl.arange(0, 2)
    head = key_head * GROUP + 2 * pair + both
    is_head = 2 * pair + both < GROUP
    shift = tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head, mask=is_head, other=0.0).to(tl.float32))

    wait(PDL)
    if index >= tl.load(counts + row):
        return
    now = ((tl.load(position + row) + index) % CONV_KERNEL).to(tl.int32)
    here = projected + token * projected_stride
    raw = tl.load(here + channel, mask=present, other=0.0)
    total = tl.zeros([4 * TILE], tl.float32)
    for back in tl.static_range(1, CONV_KERNEL):
        column = (now + CONV_KERNEL - back) % CONV_KERNEL
        kept = tl.load(window + channel * CONV_KERNEL + column, mask=present & (index < back), other=0.0)
        there = here - back * lanes.to(tl.int64) * projected_stride
        new = tl.load(there + channel, mask=present & (index >= back), other=0.0)
        earlier = tl.where(index < back, kept, new).to(tl.float32)
        total += earlier * tl.load(taps + CONV_KERNEL - 1 - back, mask=present, other=0.0).to(tl.float32)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, mask=present, other=0.0).to(tl.float32)
    total += raw.to(tl.float32) * last_tap
    q, k, v, w = _parts(_activated(total, present, conv_weight.dtype.element_ty, raw.dtype), TILE)
    q = rounded_if(ROUNDED, q * tl.rsqrt(tl.sum(q * q) + L2_EPSILON), raw.dtype)
    k = rounded_if(ROUNDED, k * tl.rsqrt(tl.sum(k * k) + L2_EPSILON), raw.dtype)

    within = tl.arange(0, TILE)
    dtype: tl.constexpr = heads.dtype.element_ty
    is_key = (within < KEY_DIM) & (pair == 0)
    key_place = heads + token * CHANNELS + key_head * KEY_DIM + within
    tl.store(key_place, q.to(dtype), mask=is_key)
    tl.store(key_place + KEYS, k.to(dtype), mask=is_key)
    value_place = heads + token * CHANNELS + 2 * KEYS + (key_head * GROUP + 2 * pair) * VALUE_DIM + within
    tl.store(value_place, v.to(dtype), mask=within < VALUE_DIM)
    tl.store(value_place + VALUE_DIM, w.to(dtype), mask=(within < VALUE_DIM) & (2 * pair + 1 < GROUP))

    b = tl.load(here + CHANNELS + VALUES + head, mask=is_head, other=0.0).to(tl.float32)
    a = tl.load(here + CHANNELS + VALUES + VALUE_HEADS + head, mask=is_head, other=0.0).to(tl.float32) + shift
    gate_place = gates + token * (2 * VALUE_HEADS) + head
    tl.store(gate_place, rounded(_sigmoid(b), raw.dtype), mask=is_head)
    tl.store(gate_place + VALUE_HEADS, tl.exp(-rate * _softplus(a)), mask=is_head)


def launch(
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
    """``gdn_heads`` through the kernel, on CUDA or in Triton's interpreter."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_heads(projected, window, *layer, position, counts, key_heads, key_dim)
    tokens = projected.shape[0]
    heads = projected.new_empty(tokens, sizes.channels, dtype=heads_dtype(projected, rounded_heads))
    gates = projected.new_empty(tokens, 2, sizes.value_heads, dtype=torch.float32)
    if not tokens:
        return heads, gates
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        gdn_heads_kernel[(sizes.key_heads * triton.cdiv(sizes.group, 2), tokens)](
            projected,
            projected.stride(0),
            position.numel(),
            window,
            *layer,
            position,
            counts,
            heads,
            gates,
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_DIM=sizes.key_dim,
            VALUE_DIM=sizes.value_dim,
            CONV_KERNEL=sizes.conv_kernel,
            TILE=triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
            L2_EPSILON=L2_EPS,
            ROUNDED=rounded_heads,
            **pdl(projected),
            **OPTIONS,
        )
    return heads, gates
