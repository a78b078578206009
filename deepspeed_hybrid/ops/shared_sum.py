# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The end of a half of a layer that ranks share: the product of a rank's part, the sum over ranks, bias, residual, and
the norm that comes next."""

import logging
from collections.abc import Callable

import deepspeed
import torch

from deepspeed_hybrid.ops.collectives import group_patience

logger = logging.getLogger(__name__)

Ended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SharedSum:
    """One launch behind the product where the ranks' cards address one another's memory, a collective operation and
    what follows it otherwise. Both round alike.

    Args:
        product: :func:`~deepspeed_hybrid.ops.fused_linear.normed_linear`, or its reference.
        norm: :func:`~deepspeed_hybrid.ops.fused_linear.normed_rows`, or its reference.
        direct: whether to make inboxes, at the first sum of each shape, which every rank must then come to.
    """

    def __init__(self, product: Callable, norm: Callable, direct: bool = False):
        self.product, self.norm, self.direct = product, norm, direct
        self.obstacle: str | None = None  # why the sums are collective operations though ``direct`` was asked for
        self._inboxes: dict[tuple, tuple] = {}

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        offset: float,
        eps: float,
        group,
    ) -> Ended:
        """
        Args:
            x: [M, K] of this rank, fp32, bf16 or fp16, contiguous.
            weight: [N, K] of this rank, in x's dtype, contiguous.
            bias: [N] or None, added once.
            residual: [M, N], the same on all ranks.
            norm: [N] weight of the next RMSNorm; ``offset`` is added to it, and ``eps`` is its own.
            group: the ranks.

        Returns:
            hidden [M, N] in x's dtype, the same bits on all ranks; the norm's rows [M, N] and no partial sums [0, M],
            as :mod:`~deepspeed_hybrid.ops.fused_linear` defines them.
        """
        none = x.new_empty(0, x.shape[0], dtype=torch.float32)
        product = self.product(x, none, 0.0, weight, None, False)
        inbox = self._inbox(product, group) if self.direct and self.obstacle is None else None
        if inbox is not None:
            from deepspeed_hybrid.ops.triton.shared_sum import launch  # here: a torch for CPUs has no Triton

            return *launch(product, bias, residual, norm, offset, eps, *inbox), none
        deepspeed.comm.all_reduce(product, group=group)
        hidden = residual + (product if bias is None else product + bias)
        return hidden, *self.norm(hidden, norm, offset, eps)

    @property
    def shapes(self) -> list[tuple]:
        """Of the sums that have inboxes."""
        return [(rows, columns, str(dtype)) for _, rows, columns, dtype in self._inboxes]

    @property
    def nbytes(self) -> int:
        """Of this rank's inboxes."""
        return sum(inbox.own.nbytes for inbox, _ in self._inboxes.values())

    def release(self) -> None:
        """Give the inboxes back. Captured steps write to them: drop those first, and on every rank."""
        self._inboxes.clear()

    def _inbox(self, product: torch.Tensor, group) -> tuple | None:
        """Addresses, launches so far, this rank and its patience for sums of this shape; None where there are none."""
        key = group, *product.shape, product.dtype
        if key not in self._inboxes:
            from deepspeed_hybrid.ops.inbox import Inbox
            from deepspeed_hybrid.ops.triton.shared_sum import words_of

            try:
                words = words_of(product.shape[1], product.dtype)
                size = 2 * deepspeed.comm.get_world_size(group=group) * len(product) * words
                inbox = Inbox(size, product.device, group)
            except (RuntimeError, ValueError) as error:  # the same on all ranks
                self.obstacle = f"the ranks' cards do not write to one another's memory: {error}"
                logger.warning("deepspeed_hybrid: direct sums are off: %s", self.obstacle)
                return None
            launches = torch.zeros(len(product), dtype=torch.int32, device=product.device)
            patience = group_patience(group, product.device)
            self._inboxes[key] = inbox, (inbox.addresses, launches, inbox.rank, patience)
        return self._inboxes[key][1]
