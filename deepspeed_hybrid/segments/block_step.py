# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A mixer over a block of several tokens a row, one after another, by the op of a decode step.

Rows come token by token: row i * B + b is token i of lane b.
"""

from collections.abc import Callable
from functools import partial

import torch

GdnStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def gdn_block(
    step: GdnStep, projected: torch.Tensor, window: torch.Tensor, state: torch.Tensor, block
) -> torch.Tensor:
    """The output for every token, from copies of the slots' window and state, which stay as they are.

    The inputs are kept in ``block.replays``, for as many of them as will be accepted.

    Args:
        step: projected [B, N], window, state, positions [B], idle [B], again -> [B, M]; updates window and state,
            ``again``, since each token's are those that the one before it has just written.
        projected: [T * B, N].
        window, state: of all slots.
        block: the plan's :class:`~deepspeed_hybrid.cache.layers.BlockPlan`.
    """
    parts = projected.chunk(block.tokens)
    lanes = len(parts[0])
    scratch = window[:lanes].clone(), state[:lanes].clone()
    places = zip(parts, block.positions, block.idle, strict=True)
    outputs = [step(part, *scratch, position, idle, True) for part, position, idle in places]
    block.replays.append(partial(_replay, step, parts, window, state, block.positions))
    return torch.cat(outputs)


def _replay(
    step: GdnStep,
    parts: tuple[torch.Tensor, ...],
    window: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    beyond: torch.Tensor,
) -> None:
    """Once more, in the slots; ``beyond`` [T, B] bool: tokens that change nothing."""
    for part, position, idle in zip(parts, positions, beyond, strict=True):
        step(part, window, state, position, idle, True)


def attention_block(step: Callable, projected: torch.Tensor, rotary: tuple, block) -> torch.Tensor:
    """Each token sees those before it. Keys and values of all of them are in their slots then.

    Args:
        step: projected [B, N], cos and sin [B, R], positions [B], idle [B] -> [B, M].
        projected: [T * B, N].
        rotary: cos and sin [T * B, R].
    """
    parts = zip(projected.chunk(block.tokens), *(table.chunk(block.tokens) for table in rotary), strict=True)
    places = zip(block.positions, block.idle, strict=True)
    return torch.cat([step(*part, *place) for part, place in zip(parts, places, strict=True)])
