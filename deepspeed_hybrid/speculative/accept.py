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
from deepspeed_hybrid.ops.block_step import REAL, WHOLE, block_accept, block_rows

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
    alone = kind.penalised or kind.invariant  # a penalty goes by the tokens before
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
    """Every choice as a row of its own, as if all drafts were right; then as many as there really are."""
    tokens, lanes = logits.shape[:2]
    whole, real = ([getattr(state, name) for name in names] for names in (WHOLE, REAL))
    whole_rows, real_rows, parked, finish = block_rows(whole, real, state.parked, state.finish, tokens)
    rows = replace(
        state,
        parked=parked,
        finish=finish,
        tokens=state.tokens.new_empty(tokens * lanes, 1),  # what is chosen beyond a buffer's end is at its end
        logprobs=state.logprobs.new_empty(tokens * lanes, 1),
        **dict(zip(WHOLE, whole_rows, strict=True)),
        **dict(zip(REAL, real_rows, strict=True)),
    )
    count = MOST_TRUNCATED if kind.truncated else tokens * lanes
    for start, scores in zip(range(0, tokens * lanes, count), logits.flatten(0, 1).split(count), strict=True):
        advance(rows.part(slice(start, start + count)), scores, kind, choose, truncate, None)
    into = state.token, state.position, state.length, state.parked, state.finish, state.tokens, state.logprobs
    return block_accept(rows.token, rows.logprobs, rows.finish, rows.parked, drafts, *into)
