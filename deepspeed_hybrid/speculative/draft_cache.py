# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Keys and values of a draft model, a place for every slot of the target's cache and every position."""

import torch

RowShape = tuple[int, int, int]  # of a position: layers L, key heads G, their dimensions E


class DraftCache:
    """[slots + 1, capacity, L, G, E] keys and values; the last slot is scratch.

    A slot holds context rows at the positions of the target's committed tokens, and behind them the block of the last
    proposal, which the context of the tokens at those positions overwrites. Nothing is cropped or moved.

    Args:
        row: of a position.
        slots: of the target's cache.
        capacity: positions of a slot: the target's, and a block beyond them.
    """

    def __init__(self, row: RowShape, slots: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.slots, self.capacity = slots, capacity
        shape = (slots + 1, capacity, *row)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [B, T, L, G, E] of all layers, to positions [B, T] of slots [B, T] or [B, 1] (int64 both)."""
        self._store(self.keys, (slots, positions), keys)
        self._store(self.values, (slots, positions), values)

    def write_layer(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Rows [B, T, G, E] of one layer, as :meth:`write` takes them."""
        self._store(self.keys[:, :, layer], (slots, positions), keys)
        self._store(self.values[:, :, layer], (slots, positions), values)

    def read_layer(self, layer: int, lanes: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first positions of the first slots, [lanes, length, G, E], as views."""
        return self.keys[:lanes, :length, layer], self.values[:lanes, :length, layer]

    def clear(self, slots: torch.Tensor) -> None:
        """Zeros: masked values are still multiplied, and a NaN that an earlier row left would spread."""
        self.keys.index_fill_(0, slots, 0.0)
        self.values.index_fill_(0, slots, 0.0)

    @staticmethod
    def _store(buffer: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        if rows.dtype != buffer.dtype:
            raise RuntimeError(f"a draft cache of {buffer.dtype} cannot take rows of {rows.dtype}")
        buffer[where] = rows

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"draft_keys": self.keys, "draft_values": self.values}
