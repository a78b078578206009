# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Top-k, top-p and min-p where each rank has the scores of some ids.

A threshold is found digit by digit of the scores' bits, as a radix sort would: ranks add up what falls under each
digit, so that histograms travel and scores do not. Sums are of integers, and so the same in any order.
"""

import torch

from deepspeed_hybrid.ops.truncate_scores import check_arguments
from deepspeed_hybrid.ops.vocab_shard import VocabShard

DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and bits of each, from the top
FIXED_POINT = 2.0**40  # a probability's unit; sums over 2**22 entries stay within int64


def truncate_scores_on_shards(
    shard: VocabShard, scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """``truncate_scores`` of this rank's [B, shard.size]. Nine small gathers, whatever is asked for."""
    check_arguments(scores, top_k, top_p_tail, min_p)
    highest = shard.everyones(scores.amax(dim=-1)).amax(dim=0)
    order = _order(scores)

    keep = top_k.masked_fill(top_k <= 0, shard.total).clamp(max=shard.total)
    threshold, _ = _first_above(shard, order, torch.ones_like(order), shard.total - keep)
    scores = scores.masked_fill(order < threshold[:, None], -torch.inf)

    likelihood = (scores - highest[:, None]).exp()  # of the likeliest, which has 1
    mass = (likelihood * FIXED_POINT).round().long()
    total = shard.everyones(mass.sum(dim=-1)).sum(dim=0)
    tail = torch.minimum((top_p_tail.double() * total).long(), total - 1)  # the likeliest stays
    threshold, below = _first_above(shard, order, mass, tail)
    equal = order == threshold[:, None]
    dropped = (order < threshold[:, None]) | _first_equals(shard, equal, mass, tail - below)
    scores = scores.masked_fill(dropped & (top_p_tail > 0)[:, None], -torch.inf)
    return scores.masked_fill(likelihood < min_p[:, None], -torch.inf)


def _order(scores: torch.Tensor) -> torch.Tensor:
    """[B, V] int64 in [0, 2**32), in the order of the scores."""
    bits = (scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    return torch.where(bits < 0, -1 - bits, bits + 2**31)


def _first_above(
    shard: VocabShard, order: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest place in the order up to which weights [B, V] sum to more than ``target`` [B], which is less than
    all of them; and the sum of those before it."""
    found, before = torch.zeros_like(target), torch.zeros_like(target)
    for shift, bits in DIGITS:
        inside = (order >> (shift + bits)) == (found >> (shift + bits))[:, None]
        digit = (order >> shift) & ((1 << bits) - 1)
        mine = weight.new_zeros(len(weight), 1 << bits).scatter_add_(1, digit, weight * inside)
        reached = shard.everyones(mine).sum(dim=0).cumsum(dim=-1) + before[:, None]
        chosen = (reached <= target[:, None]).sum(dim=-1).clamp(max=(1 << bits) - 1)
        earlier = reached.gather(1, (chosen - 1).clamp(min=0)[:, None])[:, 0]
        before = torch.where(chosen > 0, earlier, before)
        found = found + (chosen << shift)
    return found, before


def _first_equals(shard: VocabShard, equal: torch.Tensor, mass: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Of equal scores, those with the lowest ids whose mass fits ``room`` [B]; never the last of all."""
    each = mass.masked_fill(~equal, 0).amax(dim=-1)
    facts = shard.everyones(torch.stack([equal.sum(dim=-1), each], dim=-1))  # [ranks, B, 2]
    counts, each = facts[..., 0], facts[..., 1].amax(dim=0).clamp(min=1)
    count = torch.minimum(room // each, counts.sum(dim=0) - 1)
    rank = shard.rank
    place = equal.long().cumsum(dim=-1) + counts[:rank].sum(dim=0)[:, None]  # from 1
    return equal & (place <= count[:, None])
