# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A bar over the rows of a call, from what the host knows anyway: nothing waits for the device."""

import sys
from typing import TextIO

import deepspeed
from deepspeed.utils import logger
from tqdm import tqdm
from tqdm.utils import ObjectWrapper


class BestEffort(ObjectWrapper):
    """A stream whose failures are said once and then left alone: no call ends because nobody reads its bar."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.wrapper_setattr("broken", False)

    def write(self, text: str) -> None:
        self._attempt("write", text)

    def flush(self) -> None:
        self._attempt("flush")

    def _attempt(self, name: str, *arguments: str) -> None:
        if self.broken:
            return
        try:
            getattr(self._wrapped, name)(*arguments)
        except Exception as error:
            self.wrapper_setattr("broken", True)
            logger.warning(f"deepspeed_hybrid: no progress bar: {type(error).__name__}: {error}")


class Progress:
    """Rows that have ended, and about how many tokens there are.

    The host sees a row end a burst of steps or two later on a device that runs ahead; those count as tokens here.

    Args:
        shown: False: do nothing. Where there are several processes only the first shows a bar.
        rows: of the call.
    """

    def __init__(self, shown: bool, rows: int):
        self.shown = shown and sys.stderr is not None and is_first_rank()
        self.rows, self.tokens = rows, 0

    def __enter__(self) -> "Progress":
        if self.shown:
            self._bar = tqdm(total=self.rows, desc="rollout", unit="row", file=BestEffort(sys.stderr))
        return self

    def __exit__(self, *exception) -> None:
        if self.shown:
            self._bar.close()

    def add(self, tokens: int = 0, rows: int = 0) -> None:
        """So many more."""
        if self.shown:
            self.tokens += tokens
            self._bar.set_postfix_str(f"{self.tokens} tokens", refresh=False)
            self._bar.update(rows)


def is_first_rank() -> bool:
    return not deepspeed.comm.is_initialized() or deepspeed.comm.get_rank() == 0
