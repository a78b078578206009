# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_decode, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_decode import L2_EPS, checked_sizes
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, rounded_if

# One choice for every batch: the order in which a sum over DK is added up follows from the number of warps, so that a
# choice by batch would make the bits of a row depend on its batch mates. On an H200, with [128, 128] tiles, 4 warps
# were 20 to 40% faster than 8 (with 128 registers a thread or as many as it takes) from 1 row to 256.
OPTIONS = {"num_warps": 4}
# A state passes once a step. Where the L2 cache lets go of it first, 8 rows took 10.1 us instead of 10.7 and 64 rows
# 73.3 instead of 75.9; 128 rows the same, and 256 rows 3% more.
MOST_EVICTED_FIRST = 200 * 2**20


@triton.jit
def _sigmoid(x):
    """Through exp of what is never positive, which cannot overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), and x itself above 20 as in torch, with its tail where 1 + exp(x) rounds to 1.

    Around there log(u) has the error of rounding u = 1 + small, which small / (u - 1) takes out again.
    """
    small = tl.exp(-tl.abs(x))
    u = 1.0 + small
    tail = tl.where(u == 1.0, small, tl.log(u) * (small / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + tail)


@triton.jit
def _product(a, b, minus_zero):
    """a * b, rounded. The assembler fuses products into the sum behind them, and of the first two either one: which it
    is differs from kernel to kernel, and so would the last bit. What has been added to, even -0.0, it leaves alone."""
    return tl.fma(a, b, minus_zero)


@triton.jit
def _parts(values, TILE: tl.constexpr):
    """The four quarters of a vector of 4 * TILE."""
    low, high = tl.split(tl.permute(tl.reshape(values, [2, 2, TILE]), (2, 1, 0)))
    q, k = tl.split(low)
    v, z = tl.split(high)
    return q, k, v, z


@triton.jit
def _activated(total, convolved, weight_dtype: tl.constexpr, dtype: tl.constexpr):
    """SiLU of the conv's sums, with the roundings of a conv and an activation apart; and of z, which has none."""
    total = rounded_if(weight_dtype == dtype, total, dtype)  # z is in this dtype already
    activated = total * _sigmoid(total)
    return tl.where(convolved, rounded(activated, dtype), activated)


@triton.jit
def _normalised(core, VALUE_DIM: tl.constexpr, eps, norm, weight_dtype: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of what the delta rule reads, rounded before, ahead of its weight, and behind that."""
    core = rounded(core, dtype)
    core = rounded(core * tl.rsqrt(tl.sum(core * core) / VALUE_DIM + eps), dtype)
    return rounded_if(weight_dtype == dtype, core * norm, dtype)


# Of all pointers only state is read in vectors, so that where the others happen to be aligned is no reason to compile
# again, and in the middle of a capture.
@triton.jit(
    do_not_specialize=["projected_stride"],
    do_not_specialize_on_alignment=[
        "projected",
        "window",
        "conv_weight",
        "conv_bias",
        "A_log",
        "dt_bias",
        "norm_weight",
        "position",
        "parked",
        "out",
    ],
)
def gdn_decode_kernel(
    projected,
    projected_stride,
    window,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    state,
    norm_weight,
    eps,
    position,
    parked,
    out,
    minus_zero,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_KERNEL: tl.constexpr,
    TILE: tl.constexpr,
    L2_EPSILON: tl.constexpr,
    ROUNDED: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row and a value head; its [DK, DV] state stays in registers from the load to the store.

    No program reads what another writes. The conv reads columns p-1 .. p-K+1 (mod K) of the window and takes the token
    at p from ``projected``; what is written is column p % K, which holds the token at p-K and which nobody reads any
    more. So value heads that share a query and key head may run in any order. Each channel has one writer: of q and k
    the first value head of the group, of v its own.
    """
    announce(PDL)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES

    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)  # a slot times its size can pass 2^31
    key_head = head // GROUP
    within = tl.arange(0, TILE)
    key_mask = within < KEY_DIM
    value_mask = within < VALUE_DIM
    value_place = head * VALUE_DIM + within
    out_place = out + row * VALUES + value_place

    if tl.load(parked + row):
        wait(PDL)
        tl.store(out_place, tl.zeros([TILE], dtype=out.dtype.element_ty), mask=value_mask)
        return

    # What is older than this step, state and window, is asked for ahead of the projection's end, as the weights are;
    # the state first. Of this step only this program writes them.
    state_place = state + (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_place += within[:, None] * VALUE_DIM + within[None, :]
    state_mask = key_mask[:, None] & value_mask[None, :]
    memory = tl.load(state_place, mask=state_mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    window += row * (CHANNELS * CONV_KERNEL)
    now = (tl.load(position + row) % CONV_KERNEL).to(tl.int32)
    shift = tl.load(dt_bias + head).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    norm = tl.load(norm_weight + within, mask=value_mask, other=0.0).to(tl.float32)

    # q, k, v and z of the head in one vector: z shares the SiLU, and there is work for every thread. A vector shorter
    # than the program has threads Triton would load and convolve again in every thread that needs an element.
    lane = tl.arange(0, 4 * TILE)
    part, inside = lane // TILE, lane % TILE
    start = tl.where(part < 2, part * KEYS + key_head * KEY_DIM, 2 * KEYS + (part - 2) * VALUES + head * VALUE_DIM)
    present = inside < tl.where(part < 2, KEY_DIM, VALUE_DIM)
    convolved = present & (part < 3)
    channel = start + inside
    taps = conv_weight + channel * CONV_KERNEL
    last_tap = tl.load(taps + CONV_KERNEL - 1, mask=convolved, other=1.0).to(tl.float32)
    total = tl.zeros([4 * TILE], tl.float32)
    for back in tl.static_range(1, CONV_KERNEL):
        column = (now + CONV_KERNEL - back) % CONV_KERNEL
        earlier = tl.load(window + channel * CONV_KERNEL + column, mask=convolved, other=0.0).to(tl.float32)
        total += earlier * tl.load(taps + CONV_KERNEL - 1 - back, mask=convolved, other=0.0).to(tl.float32)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, mask=convolved, other=0.0).to(tl.float32)

    wait(PDL)
    projected += row * projected_stride
    raw = tl.load(projected + channel, mask=present, other=0.0)
    b = tl.load(projected + CHANNELS + VALUES + head).to(tl.float32)
    a = tl.load(projected + CHANNELS + VALUES + VALUE_HEADS + head).to(tl.float32) + shift
    total += raw.to(tl.float32) * last_tap
    writer = convolved & ((part == 2) | (head % GROUP == 0))
    tl.store(window + channel * CONV_KERNEL + now, raw, mask=writer)
    q, k, v, gate = _parts(_activated(total, convolved, conv_weight.dtype.element_ty, raw.dtype), TILE)

    k = rounded_if(ROUNDED, k * tl.rsqrt(tl.sum(k * k) + L2_EPSILON), raw.dtype)

    memory *= tl.exp(-rate * _softplus(a))
    beta = rounded(_sigmoid(b), raw.dtype)
    known = tl.sum(_product(memory, k[:, None], minus_zero), axis=0)
    delta = tl.fma(-known, beta, rounded_if(ROUNDED, v * beta, raw.dtype))
    memory += k[:, None] * delta[None, :]
    tl.store(state_place, memory.to(state.dtype.element_ty), mask=state_mask, eviction_policy=EVICTION)

    # Here and not with k: its way through shared memory keeps the state's stores ahead of all that follows. With both
    # above, Triton moves that up, and the assembler then puts the stores behind the sum.
    q = rounded_if(ROUNDED, q * tl.rsqrt(tl.sum(q * q) + L2_EPSILON), raw.dtype) * (KEY_DIM**-0.5)
    core = tl.sum(memory * q[:, None], axis=0)
    normed = _normalised(core, VALUE_DIM, eps, norm, norm_weight.dtype.element_ty, raw.dtype)
    tl.store(out_place, (normed * gate).to(out.dtype.element_ty), mask=value_mask)


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
    parked: torch.Tensor,
    key_heads: int,
    rounded_heads: bool = False,
    options: dict | None = None,
) -> torch.Tensor:
    """``gdn_decode`` through the kernel, on CUDA or in Triton's interpreter.

    Args:
        options: Triton's for the launch (num_warps, num_stages, maxnreg); OPTIONS unless given.

    The other arguments, the result and what is raised are those of
    :func:`deepspeed_hybrid.ops.gdn_decode.gdn_decode`.
    """
    sizes = checked_sizes(
        projected, window, conv_weight, conv_bias, A_log, dt_bias, state, norm_weight, position, parked, key_heads
    )
    rows = projected.shape[0]
    out = projected.new_empty(rows, sizes.value_heads * sizes.value_dim)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(projected):  # Triton launches on the current device
        gdn_decode_kernel[(sizes.value_heads, rows)](
            projected,
            projected.stride(0),
            window,
            conv_weight,
            conv_bias,
            A_log,
            dt_bias,
            state,
            norm_weight,
            eps,
            position,
            parked,
            out,
            -0.0,
            KEY_HEADS=sizes.key_heads,
            VALUE_HEADS=sizes.value_heads,
            KEY_DIM=sizes.key_dim,
            VALUE_DIM=sizes.value_dim,
            CONV_KERNEL=sizes.conv_kernel,
            TILE=triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
            L2_EPSILON=L2_EPS,
            ROUNDED=rounded_heads,
            EVICTION="evict_first" if rows * state[0].nbytes <= MOST_EVICTED_FIRST else "",
            **pdl(projected),
            **(options or OPTIONS),
        )
    return out
