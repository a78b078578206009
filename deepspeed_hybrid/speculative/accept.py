# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sample and match: the target chooses every token as it always does, and goes on as long as the draft had it.

A draft only decides how many of the target's own choices come out of one forward. The noise of a choice is keyed by
its position, so that it is the same choice that a decode step would have made.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from deepspeed_hybrid.generation.sampling import SamplingKind
from deepspeed_hybrid.generation.state import DecodeState
from deepspeed_hybrid.generation.step import advance

# Of a row, what all of its choices have in common.
COMMON = ("limit", "seed", "request", "sample", "temperature", "top_k", "top_p_tail", "min_p")
MOST_TRUNCATED = 64  # rows whose truncated scores, which are fp32, are made at once


def accept(
    state: DecodeState,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    kind: SamplingKind,
    choose: Callable,
    truncate: Callable,
) -> torch.Tensor:
    """Advance every row by the tokens that are certain, in place, without a host sync.

    Args:
        state: B rows; tokens, logprobs, penalties, stops and limits are those of so many decode steps.
        logits: [T, B, V], behind the last token and behind each draft.
        drafts: [B, T - 1] int64.
        kind, choose, truncate: as of :func:`deepspeed_hybrid.generation.step.decode_step`.

    Returns:
        [B] int64, 0 to T: tokens that came out, and so inputs to commit; 0 for parked rows.
    """
    many = logits.shape[0] * logits.shape[1] > MOST_TRUNCATED
    alone = kind.penalised or kind.invariant or (kind.truncated and many)  # a penalty goes by the tokens before
    return (_one_by_one if alone else _all_at_once)(state, logits, drafts, kind, choose, truncate)


def _one_by_one(
    state: DecodeState,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    kind: SamplingKind,
    choose: Callable,
    truncate: Callable,
) -> torch.Tensor:
    before = state.length.clone()
    diverged = torch.zeros_like(state.parked)
    for index, scores in enumerate(logits):
        idle = state.parked | diverged
        row = replace(state, parked=idle.clone())
        advance(row, scores, kind, choose, truncate, None)
        state.parked.logical_or_(row.parked & ~idle)
        if index < drafts.shape[1]:
            diverged = diverged | (state.token != drafts[:, index])
    return state.length - before


def _all_at_once(
    state: DecodeState,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    kind: SamplingKind,
    choose: Callable,
    truncate: Callable,
) -> torch.Tensor:
    """Every choice as a row of its own, in one call, as if all drafts were right; then as many as there really are."""
    tokens, lanes = logits.shape[:2]
    index = torch.arange(tokens, device=logits.device)[:, None]
    rows = replace(
        state,
        token=state.token.repeat(tokens),
        position=(state.position + index).flatten(),
        length=(state.length + index).flatten(),
        parked=(state.parked | (index >= state.limit - state.length)).flatten(),
        finish=state.finish.repeat(tokens),
        tokens=state.tokens.new_zeros(tokens * lanes, 1),  # what is chosen beyond a buffer's end is at its end
        logprobs=state.logprobs.new_zeros(tokens * lanes, 1),
        **{name: getattr(state, name).repeat(tokens) for name in COMMON},
    )
    advance(rows, logits.flatten(0, 1), kind, choose, truncate, None)
    chosen, logprobs, finish, ended = (
        part.view(tokens, lanes) for part in (rows.token, rows.logprobs, rows.finish, rows.parked)
    )

    right = (chosen[:-1] == drafts.t()) & ~ended[:-1]
    counts = (1 + right.long().cumprod(dim=0).sum(dim=0)).masked_fill(state.parked, 0)
    last = (counts - 1).clamp(min=0)[None]
    # Behind the last that came out it comes again, to the same place.
    taken = torch.minimum(index, last)
    columns = (state.length + taken).clamp(max=state.tokens.shape[1] - 1).t()
    for buffer, values in ((state.tokens, chosen), (state.logprobs, logprobs)):
        kept = buffer.gather(1, columns)
        buffer.scatter_(1, columns, torch.where(state.parked[:, None], kept, values.gather(0, taken).t()))
    for buffer, values in ((state.token, chosen), (state.finish, finish)):
        buffer.copy_(torch.where(state.parked, buffer, values.gather(0, last)[0]))
    state.position.add_(counts)
    state.length.add_(counts)
    state.parked.logical_or_(ended.gather(0, last)[0])
    return counts
