# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernels of gdn_block and gdn_commit, and their launches."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_block import checked_block
from deepspeed_hybrid.ops.gdn_decode import L2_EPS, GdnSizes
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.gdn_decode import OPTIONS, _activated, _normalised, _parts, _sigmoid, _softplus
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if

RING_CHANNELS = 1024  # of a program that writes windows


# As in gdn_decode: only state is read in vectors.
@triton.jit(
    do_not_specialize=["projected_stride", "tokens"],
    do_not_specialize_on_alignment=[
        "projected",
        "window",
        "conv_weight",
        "conv_bias",
        "A_log",
        "dt_bias",
        "norm_weight",
        "position",
        "counts",
        "out",
    ],
)
def gdn_block_kernel(
    projected,
    projected_stride,
    tokens,
    window,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    state,
    norm_weight,
    eps,
    position,
    counts,
    out,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TILE: tl.constexpr,
    L2_EPSILON: tl.constexpr,
    ROUNDED: tl.constexpr,
    COMMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row and a value head; its [DK, DV] state stays in registers over all tokens.

    What is computed for a token is gdn_decode's, in its order. COMMIT writes the state and no output. Nobody writes
    the window here, since value heads that share a query and key head read its columns at their own pace.
    """
    announce(PDL)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES

    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)  # a slot times its size can pass 2^31
    lanes = tl.num_programs(1)
    key_head = head // GROUP
    within = tl.arange(0, TILE)
    key_mask = within < KEY_DIM
    value_mask = within < VALUE_DIM
    value_place = head * VALUE_DIM + within

    # Older than this step, and so asked for ahead of the end of the kernel before: window, state and position, and the
    # weights. How many tokens there are is known before a block's first layer; how many to commit, only just now.
    state_place = state + (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_place += within[:, None] * VALUE_DIM + within[None, :]
    state_mask = key_mask[:, None] & value_mask[None, :]
    memory = tl.load(state_place, mask=state_mask, other=0.0).to(tl.float32)
    window += row * (CHANNELS * CONV_KERNEL)
    start = (tl.load(position + row) % CONV_KERNEL).to(tl.int32)
    shift = tl.load(dt_bias + head).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    norm = tl.load(norm_weight + within, mask=value_mask, other=0.0).to(tl.float32)

    lane = tl.arange(0, 4 * TILE)
    part, inside = lane // TILE, lane % TILE
    first = tl.where(part < 2, part * KEYS + key_head * KEY_DIM, 2 * KEYS + (part - 2) * VALUES + head * VALUE_DIM)
    present = inside < tl.where(part < 2, KEY_DIM, VALUE_DIM)
    if COMMIT:
        present = present & ((part == 1) | (part == 2))  # keys and values alone
    convolved = present & (part < 3)
    channel = first + inside
    taps = conv_weight + channel * CONV_KERNEL
    last_tap = tl.load(taps + CONV_KERNEL - 1, mask=convolved, other=1.0).to(tl.float32)

    wait(PDL)
    count = tl.load(counts + row).to(tl.int32)
    for index in range(0, count):
        here = projected + (index * lanes + row) * projected_stride
        raw = tl.load(here + channel, mask=present, other=0.0)
        b = tl.load(here + CHANNELS + VALUES + head).to(tl.float32)
        a = tl.load(here + CHANNELS + VALUES + VALUE_HEADS + head).to(tl.float32) + shift
        total = tl.zeros([4 * TILE], tl.float32)
        for back in tl.static_range(1, CONV_KERNEL):
            before = index - back
            column = (start + index + CONV_KERNEL - back) % CONV_KERNEL
            kept = tl.load(window + channel * CONV_KERNEL + column, mask=convolved & (before < 0), other=0.0)
            there = projected + (before * lanes + row) * projected_stride
            new = tl.load(there + channel, mask=convolved & (before >= 0), other=0.0)
            earlier = tl.where(before < 0, kept, new).to(tl.float32)
            total += earlier * tl.load(taps + CONV_KERNEL - 1 - back, mask=convolved, other=0.0).to(tl.float32)
        if conv_bias is not None:
            total += tl.load(conv_bias + channel, mask=convolved, other=0.0).to(tl.float32)
        total += raw.to(tl.float32) * last_tap
        q, k, v, gate = _parts(_activated(total, convolved, conv_weight.dtype.element_ty, raw.dtype), TILE)

        k = rounded_if(ROUNDED, k * tl.rsqrt(tl.sum(k * k) + L2_EPSILON), raw.dtype)
        memory *= tl.exp(-rate * _softplus(a))
        delta = (v - tl.sum(memory * k[:, None], axis=0)) * rounded(_sigmoid(b), raw.dtype)
        memory += k[:, None] * delta[None, :]
        if not COMMIT:
            q = rounded_if(ROUNDED, q * tl.rsqrt(tl.sum(q * q) + L2_EPSILON), raw.dtype) * (KEY_DIM**-0.5)
            core = tl.sum(memory * q[:, None], axis=0)
            normed = _normalised(core, VALUE_DIM, eps, norm, norm_weight.dtype.element_ty, raw.dtype)
            place = out + (index * lanes + row) * VALUES + value_place
            tl.store(place, (normed * gate).to(out.dtype.element_ty), mask=value_mask)
        memory = memory.to(state.dtype.element_ty).to(tl.float32)  # as the next step finds it

    if COMMIT:
        if count > 0:
            tl.store(state_place, memory.to(state.dtype.element_ty), mask=state_mask)
    else:
        for index in range(count, tokens):
            place = out + (index * lanes + row) * VALUES + value_place
            tl.store(place, tl.zeros([TILE], dtype=out.dtype.element_ty), mask=value_mask)


@triton.jit(
    do_not_specialize=["projected_stride"],
    do_not_specialize_on_alignment=["projected", "window", "position", "counts"],
)
def gdn_ring_kernel(
    projected,
    projected_stride,
    window,
    position,
    counts,
    CHANNELS: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last committed tokens of a row into its window, behind the kernel that still reads what they replace."""
    announce(PDL)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.num_programs(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    place = window + (row * CHANNELS + channel) * CONV_KERNEL
    start = (tl.load(position + row) % CONV_KERNEL).to(tl.int32)
    wait(PDL)
    count = tl.load(counts + row).to(tl.int32)
    for back in tl.static_range(0, CONV_KERNEL):
        index = count - 1 - back
        mask = inside & (index >= 0)
        value = tl.load(projected + (index * lanes + row) * projected_stride + channel, mask=mask, other=0.0)
        column = (start + index + CONV_KERNEL) % CONV_KERNEL  # index is at least -CONV_KERNEL
        tl.store(place + column, value, mask=mask)


def launch(
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
    """``gdn_block`` through the kernel, on CUDA or in Triton's interpreter."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_block(projected, window, *layer, state, norm_weight, position, counts, key_heads)
    out = projected.new_empty(projected.shape[0], sizes.value_heads * sizes.value_dim)
    if out.numel():
        scanned = window, *layer, state, norm_weight, eps, position, counts, out
        _scan(sizes, projected, counts.numel(), scanned, rounded_heads, commit=False)
    return out


def launch_commit(
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
    """``gdn_commit`` through the kernels."""
    layer = conv_weight, conv_bias, A_log, dt_bias
    sizes = checked_block(projected, window, *layer, state, norm_weight, position, counts, key_heads)
    if not projected.numel():
        return
    lanes = counts.numel()
    scanned = window, *layer, state, norm_weight, eps, position, counts, None
    _scan(sizes, projected, lanes, scanned, rounded_heads, commit=True)
    with torch.cuda.device_of(projected):
        gdn_ring_kernel[(triton.cdiv(sizes.channels, RING_CHANNELS), lanes)](
            projected,
            projected.stride(0),
            window,
            position,
            counts,
            CHANNELS=sizes.channels,
            CONV_KERNEL=sizes.conv_kernel,
            BLOCK=RING_CHANNELS,
            **pdl(projected),
        )


def _scan(
    sizes: GdnSizes, projected: torch.Tensor, lanes: int, arguments: tuple, rounded_heads: bool, commit: bool
) -> None:
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        gdn_block_kernel[(sizes.value_heads, lanes)](
            projected,
            projected.stride(0),
            projected.shape[0] // lanes,
            *arguments,
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_DIM=sizes.key_dim,
            VALUE_DIM=sizes.value_dim,
            CONV_KERNEL=sizes.conv_kernel,
            TILE=triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
            L2_EPSILON=L2_EPS,
            ROUNDED=rounded_heads,
            COMMIT=commit,
            **pdl(projected),
            **OPTIONS,
        )
