# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The choice of a token from a rank's share of the scores, in two launches, and a third that records what all ranks
have chosen. References are in :mod:`deepspeed_hybrid.ops.sharded_choice`."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait

SPAN = 4096  # entries of a row that a program looks at
FIELDS = 4  # of a candidate: merit, id, score, logsumexp


@triton.jit
def _scan(
    scores,
    raw,
    parts,
    score_stride,
    raw_stride,
    size,
    RAW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK entries of a row: the largest and where it is first, and max and sum of exponentials of
    what the logprob is taken from."""
    announce(PDL)
    wait(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = part * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    score = tl.load(scores + row * score_stride + entry, mask=inside, other=float("-inf")).to(tl.float32)
    merit = tl.max(score, axis=0)
    best = tl.min(tl.where((score == merit) & inside, entry, size), axis=0)
    source = score
    if RAW:
        source = tl.load(raw + row * raw_stride + entry, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.maximum(tl.max(source, axis=0), -3.0e38)  # finite where every entry is -inf
    to = parts + (row * tl.num_programs(1) + part) * 4
    tl.store(to, merit)
    tl.store(to + 1, best.to(tl.float32))
    tl.store(to + 2, highest)
    tl.store(to + 3, tl.sum(tl.exp(source - highest), axis=0))


@triton.jit
def _nominate(parts, source, candidates, stride, count, size, start, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for a row: its candidate."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < count
    of = parts + (row * count + part) * 4
    merit = tl.load(of, mask=inside, other=float("-inf"))
    entry = tl.load(of + 1, mask=inside, other=0.0)
    highest = tl.load(of + 2, mask=inside, other=-3.0e38)
    sums = tl.load(of + 3, mask=inside, other=0.0)
    best = tl.max(merit, axis=0)
    entry = tl.min(tl.where((merit == best) & inside, entry, 16777216.0), axis=0)
    entry = tl.minimum(entry, (size - 1).to(tl.float32))
    top = tl.max(highest, axis=0)
    total = top + tl.log(tl.maximum(tl.sum(sums * tl.exp(highest - top), axis=0), 1e-37))
    to = candidates + row * 4
    tl.store(to, best)
    tl.store(to + 1, entry + start)
    tl.store(to + 2, tl.load(source + row * stride + entry.to(tl.int64)).to(tl.float32))
    tl.store(to + 3, total)


@triton.jit
def _record(
    candidates,
    limit,
    stop_ids,
    token,
    position,
    length,
    parked,
    finish,
    tokens,
    logprobs,
    rows,
    stops,
    columns,
    tokens_stride,
    logprobs_stride,
    STOPPED: tl.constexpr,
    LENGTH: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a row: the best candidate, the first of equal ones, and the bookkeeping of a decode step."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0)
    if tl.load(parked + row).to(tl.int1):
        return
    best = tl.load(candidates + row * 4)
    choice = tl.load(candidates + row * 4 + 1)
    score = tl.load(candidates + row * 4 + 2)
    top = tl.load(candidates + row * 4 + 3)
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, tl.load(candidates + (rank * rows + row) * 4 + 3))
    total = 0.0
    for rank in tl.static_range(RANKS):
        of = candidates + (rank * rows + row) * 4
        merit = tl.load(of)
        better = merit > best
        best = tl.where(better, merit, best)
        choice = tl.where(better, tl.load(of + 1), choice)
        score = tl.where(better, tl.load(of + 2), score)
        total += tl.exp(tl.load(of + 3) - top)
    chosen = choice.to(tl.int64)

    so_far = tl.load(length + row)
    column = tl.minimum(so_far, columns - 1).to(tl.int64)
    tl.store(token + row, chosen)
    tl.store(tokens + row * tokens_stride + column, chosen)
    tl.store(logprobs + row * logprobs_stride + column, score - (top + tl.log(total)))
    tl.store(position + row, tl.load(position + row) + 1)
    tl.store(length + row, so_far + 1)
    stop = tl.arange(0, BLOCK_STOPS)
    stop_id = tl.load(stop_ids + stop, mask=stop < stops, other=-1)
    stopped = tl.max((stop_id == chosen).to(tl.int32), axis=0) > 0
    if stopped | (so_far + 1 >= tl.load(limit + row)):
        tl.store(finish + row, tl.where(stopped, STOPPED, LENGTH).to(tl.uint8))
        tl.store(parked + row, True)


def nominate(scores: torch.Tensor, raw_logits: torch.Tensor | None, start: int) -> torch.Tensor:
    """[B, size] fp32, bf16 or fp16 of ids from ``start`` on -> candidates [B, 4] fp32: the largest score, its id (the
    first of equal ones), the score that its logprob is of, and the logsumexp of those."""
    rows, size = scores.shape
    source = scores if raw_logits is None else raw_logits
    count = triton.cdiv(size, SPAN)
    parts = scores.new_empty(rows, count, FIELDS, dtype=torch.float32)
    candidates = scores.new_empty(rows, FIELDS, dtype=torch.float32)
    options = pdl(scores)
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        _scan[(rows, count)](
            scores,
            raw_logits,
            parts,
            scores.stride(0),
            source.stride(0),
            size,
            RAW=raw_logits is not None,
            BLOCK=min(SPAN, triton.next_power_of_2(size)),
            **options,
        )
        _nominate[(rows,)](
            parts,
            source,
            candidates,
            source.stride(0),
            count,
            size,
            start,
            BLOCK=triton.next_power_of_2(count),
            num_warps=1,
            **options,
        )
    return candidates


def record(
    candidates: torch.Tensor,
    limit: torch.Tensor,
    stop_ids: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    length: torch.Tensor,
    parked: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    stopped: int,
    out_of_length: int,
) -> None:
    """Candidates [ranks, B, 4] of all ranks, and all else as ``decode_step`` has it.

    Args:
        stopped, out_of_length: what to write to ``finish``.
    """
    ranks, rows, _ = candidates.shape
    with torch.cuda.device_of(candidates):
        _record[(rows,)](
            candidates,
            limit,
            stop_ids,
            token,
            position,
            length,
            parked,
            finish,
            tokens,
            logprobs,
            rows,
            stop_ids.numel(),
            tokens.shape[1],
            tokens.stride(0),
            logprobs.stride(0),
            STOPPED=stopped,
            LENGTH=out_of_length,
            RANKS=ranks,
            BLOCK_STOPS=triton.next_power_of_2(max(1, stop_ids.numel())),
            num_warps=1,
            **pdl(candidates),
        )
