# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A vocabulary that ranks share: each has the logits of consecutive ids. What ranks need of one another, they gather.

Every rank computes what follows from the same gathered numbers in the same order, so that all come to the same bits.
"""

import deepspeed
import torch

from deepspeed_hybrid.ops.collectives import everyones

EXACT_IN_FP32 = 2**24  # ids travel as fp32 beside scores


class VocabShard:
    """The ids ``start`` to ``start + size`` of ``total``, of this rank.

    Args:
        group: the ranks that share the vocabulary.
        sizes: how many ids each has, in their order.

    Raises:
        ValueError: more ids than an fp32 number can tell apart.
    """

    def __init__(self, group, sizes: list[int]):
        rank = deepspeed.comm.get_rank(group=group)
        self.group, self.rank = group, rank
        self.start, self.size, self.total = sum(sizes[:rank]), sizes[rank], sum(sizes)
        if self.total > EXACT_IN_FP32:
            raise ValueError(f"a vocabulary of {self.total} ids cannot be shared; at most {EXACT_IN_FP32} can")

    def own(self, entries: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [B, total], a view."""
        return entries[:, self.start : self.start + self.size]

    def everyones(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: what each rank passes, of one shape. A collective operation."""
        return everyones(mine, self.group)
