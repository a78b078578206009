# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Take back tokens: what a rejected draft has done to slots is undone exactly.

Keys and values need no copy, since positions beyond a row's own are never read and are written again before they are.
A recurrent state has no positions: it is copied before and put back after.
"""

import torch

from deepspeed_hybrid.cache.layers import SlotGdnLayer
from deepspeed_hybrid.cache.slot_cache import SlotCache


class CacheSnapshot:
    """The conv windows and recurrent states of some slots at one moment.

    Args:
        cache: the cache to come back to.
        slots: [N] int64.
    """

    def __init__(self, cache: SlotCache, slots: torch.Tensor):
        self.slots = slots
        self.saved = [
            (buffer, buffer.index_select(0, slots))
            for layer in cache.layers
            if isinstance(layer, SlotGdnLayer)
            for buffer in layer.tensors().values()
        ]

    def restore(self) -> None:
        """Put the saved rows back at their addresses. The caller moves the write positions back."""
        for buffer, rows in self.saved:
            buffer.index_copy_(0, self.slots, rows)
