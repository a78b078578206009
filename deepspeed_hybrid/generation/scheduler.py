# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which row is in which slot. Pure bookkeeping on the host, first come first served."""

from collections import deque


class SlotScheduler:
    """Rows 0..rows-1 over ``slots`` places.

    Args:
        rows: how many rows there are in all.
        slots: how many can be in flight; more than ``rows`` are never used.
    """

    def __init__(self, rows: int, slots: int):
        self.waiting = deque(range(rows))
        self.occupants: list[int | None] = [None] * slots
        self.admissions = 0

    @property
    def running(self) -> int:
        return sum(row is not None for row in self.occupants)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.running > 0

    def admit(self) -> list[tuple[int, int]]:
        """Fill free slots from the queue; the new (slot, row) pairs."""
        placed = []
        for slot, occupant in enumerate(self.occupants):
            if occupant is None and self.waiting:
                row = self.waiting.popleft()
                self.occupants[slot] = row
                placed.append((slot, row))
        self.admissions += len(placed)
        return placed

    def retire(self, slot: int) -> int:
        """Free a slot; the row that was in it."""
        row = self.occupants[slot]
        if row is None:
            raise ValueError(f"slot {slot} is free already")
        self.occupants[slot] = None
        return row
