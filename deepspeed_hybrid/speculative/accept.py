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
