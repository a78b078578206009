# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Keys and values of a draft model, a place for every slot of the target's cache and every position."""

import torch

from deepspeed_hybrid.speculative.config import DraftConfig


class DraftCache:
    """``keys`` and ``values`` [slots + 1, capacity, L, G, E]; the last slot is scratch.

    A slot holds context rows at the positions of the target's committed tokens. What is behind them, such as rows of
    tokens that were not accepted, is overwritten before it is read. Nothing is cropped or moved.

    Args:
        slots: of the target's cache.
        capacity: positions of a slot: the target's.
    """

    def __init__(self, config: DraftConfig, slots: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.slots, self.capacity = slots, capacity
        shape = (slots + 1, capacity, config.num_layers, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """To copy slots of. fp8 goes as bytes, which torch copies by index everywhere."""
        named = {"draft_keys": self.keys, "draft_values": self.values}
        return {name: one.view(torch.uint8) if one.element_size() == 1 else one for name, one in named.items()}
