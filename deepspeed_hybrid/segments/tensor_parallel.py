# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Projections whose rows ranks share: one product and one gather where the layers have one of each for themselves."""

from functools import partial

import torch
from torch import nn

from deepspeed_hybrid.autotp import gathers, is_column_shard, is_plain, shard_sizes
from deepspeed_hybrid.ops.collectives import everyones
from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.weights import FusedLinear


class GatheredLinear(FusedLinear):
    """Column shards of one input whose outputs every rank wants whole."""

    why_all_heads: str | None = None  # where they are those of a GatedDeltaNet layer

    def __init__(self, layers: list[nn.Linear], may_move: bool = True):
        super().__init__(layers, may_move)
        self._group = layers[0].mp_group
        self._widths = list(zip(*map(shard_sizes, layers), strict=True))  # of each rank, one a layer
        self._widest = max(map(sum, self._widths))

    def parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = self(inputs)
        own = nn.functional.pad(own, (0, self._widest - own.shape[-1]))
        ranks = everyones(own, self._group)
        pieces = [
            rank[..., : sum(widths)].split(list(widths), dim=-1)
            for rank, widths in zip(ranks, self._widths, strict=True)
        ]
        return tuple(torch.cat(piece, dim=-1) for piece in zip(*pieces, strict=True))


def fused_linear(layers: list[nn.Linear], may_move: bool) -> FusedLinear:
    """Layers without an obstacle as one; what they give is what the layers would."""
    gathered = is_column_shard(layers[0]) and gathers(layers[0])
    return GatheredLinear(layers, may_move) if gathered else FusedLinear(layers, may_move)


def head_binding(head: nn.Module) -> Binding | None:
    """A head that would gather every rank's logits keeps its own; None for any other."""
    if not is_column_shard(head) or not gathers(head) or not is_plain(head):
        return None
    return Binding(head, partial(_own_columns, head))


def _own_columns(head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., this rank's outputs]."""
    return nn.functional.linear(hidden_states, head.weight, head.bias)
