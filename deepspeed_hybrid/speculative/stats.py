# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What speculation came to: tokens a step, and how often a draft was right at each place of a block."""

import torch

from deepspeed_hybrid.ops.block_step import count_reached


class SpeculationStats:
    """Counts on the device, at addresses that stay, so that captured steps add to them; read at the end of a call."""

    def __init__(self) -> None:
        self.reached: dict[int, torch.Tensor] = {}  # block length T -> [T] int64: rows that got more than i tokens
        self.steps: dict[int, int] = {}  # block length -> steps

    def begin(self) -> None:
        """Count anew, in place."""
        self.steps = {}
        for counts in self.reached.values():
            counts.zero_()

    def hold(self, tokens: int, device: torch.device) -> torch.Tensor:
        """The counts of steps of so many tokens, made at the first call: before a capture, whose memory is reused."""
        if tokens not in self.reached:
            self.reached[tokens] = torch.zeros(tokens, dtype=torch.int64, device=device)
        return self.reached[tokens]

    def add(self, tokens: int, counts: torch.Tensor) -> None:
        """A step of ``tokens``, out of which came ``counts`` [B] int64 for its rows; 0 for parked ones."""
        count_reached(counts, self.reached[tokens])

    def summary(self) -> dict:
        """Waits for the device.

        Returns:
            ``steps`` by block length; ``tokens_per_step``, of a row, over all steps (None: there was none);
            ``acceptance``, by block length a list: the share of rows whose draft at that place came out, given that
            those before it did (None where there was none); rows that ended count as if the draft had been wrong.
        """
        reached = {tokens: self.reached[tokens].tolist() for tokens in self.steps}
        rows, emitted = sum(one[0] for one in reached.values()), sum(sum(one) for one in reached.values())
        return {
            "steps": dict(self.steps),
            "row_steps": rows,
            "tokens": emitted,
            "tokens_per_step": emitted / rows if rows else None,
            "acceptance": {
                tokens: [here / before if before else None for before, here in zip(one, one[1:], strict=False)]
                for tokens, one in reached.items()
                if tokens > 1
            },
        }
