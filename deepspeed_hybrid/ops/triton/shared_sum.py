# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What lies between the product that ends a shared half of a layer and the next product: the sum over ranks, bias,
residual and RMSNorm, in one launch.

Every rank writes its rows into inboxes that the others have for it. A packet of 8 bytes is 4 bytes of a row and the
number of the launch: whoever finds the number has the data, without a fence or a second trip between the cards.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.rounding import rounded, weighted

WORD = 4  # bytes of data in a packet


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """What words of 32 bits hold, as fp32: one fp32 number, or two of 16 bits, of which the first comes first."""
    if dtype == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = first
    else:
        first = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _words(first, second, dtype: tl.constexpr):
    """The other way round."""
    if dtype == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def _of_columns(values, column, inside, SECOND: tl.constexpr):
    """A vector's entries at the first numbers of words, and at the second ones where there are such."""
    first = tl.load(values + column, mask=inside, other=0.0).to(tl.float32)
    second = first
    if SECOND:
        second = tl.load(values + column + 1, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _received(inbox, i, inside, number, patience, TIMED: tl.constexpr):
    """The words of a row that another rank sends in this launch. Patience is in nanoseconds; beyond it the device
    fails, for the other rank is gone."""
    packets = tl.load(inbox + i, mask=inside, other=0, volatile=True)
    if TIMED:
        end = globaltimer() + patience
    while tl.sum((inside & ((packets >> 32).to(tl.int32) != number)).to(tl.int32)) > 0:
        packets = tl.load(inbox + i, mask=inside, other=0, volatile=True)
        if TIMED:
            if globaltimer() > end:
                packets = tl.inline_asm_elementwise(
                    "trap; mov.b64 $0, $1;", "=l,l", [packets], dtype=tl.int64, is_pure=False, pack=1
                )
    return packets.to(tl.int32)


@triton.jit
def _add_over_ranks(
    product,
    bias,
    residual,
    weight,
    hidden,
    normed,
    inboxes,
    launches,
    rows,
    patience,
    offset,
    eps,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BIASED: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row, which stays in registers. Inboxes are int64 [2, RANKS, rows, WORDS] on every rank; a
    launch uses one half of them, which the others have read by the time that it is written again."""
    announce(PDL)
    dtype: tl.constexpr = hidden.dtype.element_ty
    pair: tl.constexpr = N != WORDS
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WORDS
    column = i * (N // WORDS)
    gain, second_gain = _of_columns(weight, column, inside, pair)
    wait(PDL)
    number = tl.load(launches + row) + 1
    half = (number & 1).to(tl.int64) * RANKS
    own = tl.load(product.to(tl.pointer_type(tl.int32)) + row * WORDS + i, mask=inside, other=0)
    packets = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
            tl.store(there + ((half + RANK) * rows + row) * WORDS + i, packets, mask=inside)
    left = tl.load(residual.to(tl.pointer_type(tl.int32)) + row * WORDS + i, mask=inside, other=0)
    left, second_left = _numbers(left, dtype)

    here = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):  # in one order, so that all ranks have the same bits
        if rank == RANK:
            words = own
        else:
            words = _received(here + ((half + rank) * rows + row) * WORDS, i, inside, number, patience, TIMED)
        of_rank, second_of_rank = _numbers(words, dtype)
        first += of_rank
        second += second_of_rank
    tl.store(launches + row, number)

    first, second = rounded(first, dtype), rounded(second, dtype)  # where a layer's own code rounds
    if BIASED:
        added, second_added = _of_columns(bias, column, inside, pair)
        first, second = rounded(first + added, dtype), rounded(second + second_added, dtype)
    first, second = rounded(left + first, dtype), rounded(second_left + second, dtype)
    at = row * WORDS + i
    tl.store(hidden.to(tl.pointer_type(tl.int32)) + at, _words(first, second, dtype), mask=inside)
    squares = first * first
    if pair:
        squares += second * second
    scale = tl.rsqrt(tl.sum(squares) / N + eps)
    first, second = weighted(first * scale, gain, offset, dtype), weighted(second * scale, second_gain, offset, dtype)
    tl.store(normed.to(tl.pointer_type(tl.int32)) + at, _words(first, second, dtype), mask=inside)


def words_of(columns: int, dtype: torch.dtype) -> int:
    """Packets of a row.

    Raises:
        ValueError: the row does not fill its last word.
    """
    if columns * dtype.itemsize % WORD:
        raise ValueError(f"rows of {columns} numbers of {dtype.itemsize} bytes are no multiple of {WORD} bytes")
    return columns * dtype.itemsize // WORD


def launch(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    offset: float,
    eps: float,
    inboxes: torch.Tensor,
    launches: torch.Tensor,
    rank: int,
    patience: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's term ``product`` [M, N] of a sum, residual [M, N] and bias [N] or None -> the sum of all, and its
    RMSNorm with ``weight + offset``: [M, N].

    Args:
        inboxes: [ranks] int64, addresses of each rank's inbox, int64 [2, ranks, M, words].
        launches: [M] int32, how many launches there have been with these inboxes; it is counted up.
        patience: seconds to wait for another rank before the device fails.
    """
    hidden, normed = torch.empty_like(residual), torch.empty_like(residual)
    rows, n = residual.shape
    words = words_of(n, residual.dtype)
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        _add_over_ranks[(rows,)](
            product,
            bias,
            residual,
            weight,
            hidden,
            normed,
            inboxes,
            launches,
            rows,
            int(patience * 1e9),
            offset,
            eps,
            N=n,
            WORDS=words,
            BLOCK=triton.next_power_of_2(words),
            RANK=rank,
            RANKS=len(inboxes),
            BIASED=bias is not None,
            TIMED=residual.is_cuda,
            num_warps=8,
            **pdl(residual),
        )
    return hidden, normed
