# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The end of a run, when nobody waits and few rows are left: a step of fewer lanes serves them.

The rule knows steps and rows alone. Were it to ask which graphs there are, the same call could take another path, and
so other roundings, the second time.
"""

FEW_LANES = (1, 4, 16)  # up to here a step waits for weights: sizes between would be graphs that gain little
WORTHWHILE_STEPS = 32  # still to come, and since the last move: a move copies whole slots, and may bring a capture


def tail_lanes(rows: int) -> int:
    """Lanes of a step for the last ``rows`` rows: few sizes, since each is a graph of its own."""
    return next((lanes for lanes in FEW_LANES if lanes >= rows), 1 << (rows - 1).bit_length())


class TailShrink:
    """When to move the rows of one run together. Lanes never grow again in a run: nobody is left to come.

    Args:
        enabled: False: never.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._last: int | None = None

    def lanes(self, rows: int, lanes: int, steps_done: int, steps_left: int) -> int | None:
        """The lanes to go on with, at most half of those there are; None to stay.

        Args:
            rows: in flight, with an empty queue.
            lanes: of a step now.
            steps_done: of this run.
            steps_left: that a row can take at most.
        """
        fewer = tail_lanes(rows)
        just_moved = self._last is not None and steps_done - self._last < WORTHWHILE_STEPS
        if not self.enabled or just_moved or steps_left < WORTHWHILE_STEPS or 2 * fewer > lanes:
            return None
        self._last = steps_done
        return fewer
