# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A bar over the rows of a call, from what the host knows anyway: nothing waits for the device."""

import deepspeed
from tqdm import tqdm


class Progress:
    """Rows that have ended, and about how many tokens there are.

    The host sees a row end a burst of steps or two later on a device that runs ahead; those count as tokens here.

    Args:
        shown: False: do nothing. Where there are several processes only the first shows a bar.
        rows: of the call.
    """

    def __init__(self, shown: bool, rows: int):
        self.shown, self.rows, self.tokens = shown and is_first_rank(), rows, 0

    def __enter__(self) -> "Progress":
        self._bar = tqdm(total=self.rows, desc="rollout", unit="row", disable=not self.shown)
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def add(self, tokens: int = 0, rows: int = 0) -> None:
        """So many more."""
        if self.shown:
            self.tokens += tokens
            self._bar.set_postfix_str(f"{self.tokens} tokens", refresh=False)
            self._bar.update(rows)


def is_first_rank() -> bool:
    return not deepspeed.comm.is_initialized() or deepspeed.comm.get_rank() == 0
