# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Triton kernels of block_step. They are launched plainly, so that the kernels behind them may read ahead."""

import torch
import triton
import triton.language as tl

BLOCK = 256  # rows, or lanes, of a program


# How many lanes there are, and where their buffers lie, is no reason to compile again.
@triton.jit(do_not_specialize=["lanes", "filler", "draft_lane_stride", "draft_token_stride"])
def _inputs(
    token,
    position,
    length,
    limit,
    parked,
    drafts,
    ids,
    positions,
    idle,
    counts,
    lanes,
    filler,
    draft_lane_stride,
    draft_token_stride,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < T * lanes
    lane, step = row % lanes, row // lanes
    first = inside & (step == 0)
    new = tl.load(token + lane, mask=first, other=0)
    if drafts is not None:
        place = lane * draft_lane_stride + (step - 1) * draft_token_stride
        others = tl.load(drafts + place, mask=inside & (step > 0), other=0)
        tl.store(ids + row, tl.where(step == 0, new, others), mask=inside)
    else:
        tl.store(ids + row, tl.where(step == 0, new, filler), mask=inside)
    tl.store(positions + row, tl.load(position + lane, mask=inside, other=0) + step, mask=inside)
    room = tl.load(limit + lane, mask=inside, other=0) - tl.load(length + lane, mask=inside, other=0)
    room = tl.minimum(tl.maximum(room, 0), T)
    room = tl.where(tl.load(parked + lane, mask=inside, other=0) != 0, 0, room)
    tl.store(idle + row, step >= room, mask=inside)
    tl.store(counts + lane, room, mask=first)


@triton.jit(do_not_specialize=["lanes"])
def _rows(
    token,
    position,
    length,
    limit,
    seed,
    request,
    sample,
    top_k,
    temperature,
    top_p_tail,
    min_p,
    parked,
    finish,
    whole,
    real,
    idle,
    ends,
    lanes,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = T * lanes
    inside = row < count
    lane, step = row % lanes, row // lanes
    answered = tl.load(length + lane, mask=inside, other=0)
    most = tl.load(limit + lane, mask=inside, other=0)
    tl.store(whole + row, tl.load(token + lane, mask=inside, other=0), mask=inside)
    tl.store(whole + count + row, tl.load(position + lane, mask=inside, other=0) + step, mask=inside)
    tl.store(whole + 2 * count + row, answered + step, mask=inside)
    tl.store(whole + 3 * count + row, most, mask=inside)
    tl.store(whole + 4 * count + row, tl.load(seed + lane, mask=inside, other=0), mask=inside)
    tl.store(whole + 5 * count + row, tl.load(request + lane, mask=inside, other=0), mask=inside)
    tl.store(whole + 6 * count + row, tl.load(sample + lane, mask=inside, other=0), mask=inside)
    tl.store(whole + 7 * count + row, tl.load(top_k + lane, mask=inside, other=0), mask=inside)
    tl.store(real + row, tl.load(temperature + lane, mask=inside, other=0.0), mask=inside)
    tl.store(real + count + row, tl.load(top_p_tail + lane, mask=inside, other=0.0), mask=inside)
    tl.store(real + 2 * count + row, tl.load(min_p + lane, mask=inside, other=0.0), mask=inside)
    beyond = (tl.load(parked + lane, mask=inside, other=0) != 0) | (step >= most - answered)
    tl.store(idle + row, beyond, mask=inside)
    tl.store(ends + row, tl.load(finish + lane, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["lanes", "columns", "draft_lane_stride", "draft_token_stride"])
def _accept(
    chosen,
    chosen_logprobs,
    ends,
    ended,
    drafts,
    token,
    position,
    length,
    parked,
    finish,
    tokens,
    logprobs,
    counts,
    lanes,
    columns,
    draft_lane_stride,
    draft_token_stride,
    tokens_stride,
    logprobs_stride,
    T: tl.constexpr,
    TILE: tl.constexpr,
):
    """One lane a program."""
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(parked + lane):
        tl.store(counts + lane, lane * 0)
        return
    step = tl.arange(0, TILE)
    row = step * lanes + lane
    inside = step < T
    choice = tl.load(chosen + row, mask=inside, other=0)
    over = tl.load(ended + row, mask=inside, other=1) != 0
    drafted = tl.load(drafts + lane * draft_lane_stride + step * draft_token_stride, mask=step < T - 1, other=-1)
    # The last choice of a block has no draft that it could be.
    certain = tl.min(tl.where((choice != drafted) | over | (step >= T - 1), step, T - 1), axis=0)
    count = certain + 1
    last = step == certain

    answered = tl.load(length + lane)
    column = answered + step
    # What is chosen beyond a buffer's end is at its end, the last of it.
    written = (step < count) & ((column < columns - 1) | last)
    column = tl.minimum(column, columns - 1)
    tl.store(tokens + lane * tokens_stride + column, choice, mask=written)
    logprob = tl.load(chosen_logprobs + row, mask=inside, other=0.0)
    tl.store(logprobs + lane * logprobs_stride + column, logprob, mask=written)

    tl.store(token + lane, tl.sum(tl.where(last, choice, 0), axis=0))
    end = tl.sum(tl.where(last, tl.load(ends + row, mask=inside, other=0).to(tl.int32), 0), axis=0)
    tl.store(finish + lane, end.to(tl.uint8))
    tl.store(parked + lane, tl.sum((last & over).to(tl.int32), axis=0) > 0)
    tl.store(position + lane, tl.load(position + lane) + count)
    tl.store(length + lane, answered + count)
    tl.store(counts + lane, count.to(tl.int64))


@triton.jit(do_not_specialize=["lanes"])
def _count(counts, reached, lanes, T: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    step = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, lanes, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        count = tl.load(counts + lane, mask=lane < lanes, other=0)
        total += tl.sum((count[None, :] > step[:, None]).to(tl.int64), axis=1)
    inside = step < T
    tl.store(reached + step, tl.load(reached + step, mask=inside, other=0) + total, mask=inside)


def _strides(drafts: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if drafts is None else (drafts.stride(0), drafts.stride(1))


def inputs(
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    parked: torch.Tensor,
    drafts: torch.Tensor | None,
    filler: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of block_inputs."""
    lanes = token.shape[0]
    ids, positions = (token.new_empty(tokens, lanes) for _ in range(2))
    idle, counts = parked.new_empty(tokens, lanes), torch.empty_like(token)
    with torch.cuda.device_of(token):  # Triton launches on the current device
        buffers = token, position, length, limit, parked, drafts, ids, positions, idle, counts
        grid = (triton.cdiv(tokens * lanes, BLOCK),)
        _inputs[grid](*buffers, lanes, filler, *_strides(drafts), T=tokens, BLOCK=BLOCK)
    return ids, positions, idle, counts


def rows(
    whole: list[torch.Tensor], real: list[torch.Tensor], parked: torch.Tensor, finish: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of block_rows."""
    lanes = parked.shape[0]
    count = tokens * lanes
    results = (
        whole[0].new_empty(len(whole), count),
        real[0].new_empty(len(real), count),
        parked.new_empty(count),
        finish.new_empty(count),
    )
    with torch.cuda.device_of(parked):  # Triton launches on the current device
        grid = (triton.cdiv(count, BLOCK),)
        _rows[grid](*whole, *real, parked, finish, *results, lanes, T=tokens, BLOCK=BLOCK)
    return results


def accept(
    chosen: torch.Tensor,
    chosen_logprobs: torch.Tensor,
    ends: torch.Tensor,
    ended: torch.Tensor,
    drafts: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> torch.Tensor:
    """Of block_accept."""
    lanes, counts = token.shape[0], torch.empty_like(token)
    size = drafts.shape[1] + 1
    with torch.cuda.device_of(token):  # Triton launches on the current device
        _accept[(lanes,)](
            chosen,
            chosen_logprobs,
            ends,
            ended,
            drafts,
            token,
            position,
            length,
            parked,
            finish,
            tokens,
            logprobs,
            counts,
            lanes,
            tokens.shape[1],
            *_strides(drafts),
            tokens.stride(0),
            logprobs.stride(0),
            T=size,
            TILE=triton.next_power_of_2(size),
            num_warps=1,
        )
    return counts


def count(counts: torch.Tensor, reached: torch.Tensor) -> None:
    """Of count_reached."""
    size = reached.shape[0]
    with torch.cuda.device_of(counts):  # Triton launches on the current device
        _count[(1,)](
            counts, reached, counts.shape[0], T=size, TILE=triton.next_power_of_2(size), BLOCK=BLOCK, num_warps=1
        )
