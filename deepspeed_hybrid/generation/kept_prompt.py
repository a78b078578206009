# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A prompt of whose samples some still wait for a slot: it is prefilled once for them too."""

import torch

from deepspeed_hybrid.cache.slot_cache import SlotCache
from deepspeed_hybrid.generation.transfer import upload


class KeptPrompt:
    """What a slot held behind the last token of a prompt, and that token's logits. Rows wait in the order of prompts,
    so that there is never more than one such prompt.

    Args:
        enabled: False: there is no memory for it, and nothing is kept.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.drop()

    def drop(self) -> None:
        self.request: int | None = None
        self.logits: torch.Tensor | None = None  # [1, V]
        self._slot: list[torch.Tensor] = []

    def keep(self, cache: SlotCache, slot: int, request: int, logits: torch.Tensor) -> None:
        """Copy ``slot``, which has taken in the prompt of ``request`` and nothing else. ``logits`` is [1, V]."""
        if not self.enabled:
            return
        self.request, self.logits = request, logits.clone()
        self._slot = [buffer[slot].clone() for buffer in cache.buffers(deferred=False)]

    def restore(self, cache: SlotCache, slot: int) -> None:
        """Make ``slot`` what it would be behind a prefill of the prompt."""
        for buffer, kept in zip(cache.buffers(deferred=False), self._slot, strict=True):
            buffer.index_copy_(0, upload([slot], buffer.device), kept[None])
