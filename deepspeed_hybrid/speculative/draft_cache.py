# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Keys and values of a draft model, a place for every slot of the target's cache and every position."""

import math

import torch

RowShape = tuple[int, int, int]  # of a position: layers L, key heads G, their dimensions E


class DraftCache:
    """``keys`` and ``values`` [slots + 1, capacity, L, G, E]; the last slot is scratch.

    A slot holds context rows at the positions of the target's committed tokens. What is behind them, such as rows of
    tokens that were not accepted, is overwritten before it is read. Nothing is cropped or moved.

    Args:
        row: of a position.
        slots: of the target's cache.
        capacity: positions of a slot: the target's.
    """

    def __init__(self, row: RowShape, slots: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.slots, self.capacity = slots, capacity
        shape = (slots + 1, capacity, *row)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Rows [B, T, G, E] of one layer in the cache's dtype, to positions [B, T] of slots [B, T] or [B, 1]."""
        self.keys[:, :, layer].index_put_((slots, positions), keys)
        self.values[:, :, layer].index_put_((slots, positions), values)

    def read(self, layer: int, lanes: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first positions of the first slots, [lanes, length, G, E], as views."""
        return self.keys[:lanes, :length, layer], self.values[:lanes, :length, layer]

    def clear(self, slots: torch.Tensor) -> None:
        """Zeros, for attention that multiplies masked values: a NaN that an earlier row left would spread."""
        self.keys.index_fill_(0, slots, 0.0)
        self.values.index_fill_(0, slots, 0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """To copy slots of. fp8 goes as bytes, which torch copies by index everywhere."""
        named = {"draft_keys": self.keys, "draft_values": self.values}
        return {name: one.view(torch.uint8) if one.element_size() == 1 else one for name, one in named.items()}

    @staticmethod
    def nbytes(row: RowShape, slots: int, capacity: int, dtype: torch.dtype) -> int:
        """Of a cache that is made with these."""
        return 2 * (slots + 1) * capacity * math.prod(row) * dtype.itemsize
