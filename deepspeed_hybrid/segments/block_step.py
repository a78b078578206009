# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention over a block of several tokens a row, one after another, by the op of a decode step.

Rows come token by token: row i * B + b is token i of lane b.
"""

from collections.abc import Callable

import torch


def attention_block(step: Callable, projected: torch.Tensor, rotary: tuple, block) -> torch.Tensor:
    """Each token sees those before it. Keys and values of all of them are in their slots then.

    Args:
        step: projected [B, N], cos and sin [B, R], positions [B], idle [B] -> [B, M].
        projected: [T * B, N].
        rotary: cos and sin [T * B, R].
        block: the plan's :class:`~deepspeed_hybrid.cache.layers.BlockPlan`.
    """
    parts = zip(projected.chunk(block.tokens), *(table.chunk(block.tokens) for table in rotary), strict=True)
    places = zip(block.positions, block.idle, strict=True)
    return torch.cat([step(*part, *place) for part, place in zip(parts, places, strict=True)])
