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

    def compact(self, slots: int) -> list[tuple[int, int]]:
        """Have only the first ``slots`` places from now on; the (from, to) pairs of the rows that have to move."""
        free = [slot for slot, row in enumerate(self.occupants[:slots]) if row is None]
        beyond = [slot for slot, row in enumerate(self.occupants) if row is not None and slot >= slots]
        if self.waiting or len(beyond) > len(free):
            raise ValueError(f"{self.running} rows, {len(self.waiting)} of them waiting, do not fit {slots} slots")
        moves = list(zip(beyond, free, strict=False))
        for source, target in moves:
            self.occupants[target] = self.occupants[source]
        del self.occupants[slots:]
        return moves
