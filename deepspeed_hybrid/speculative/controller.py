# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How many tokens the next block has."""

from typing import Protocol


class Controller(Protocol):
    """Decides on the host, before a step."""

    def tokens(self, lanes: int) -> int:
        """Of the next block over so many lanes, the anchor among them; 1 is a plain step."""

    def describe(self) -> str:
        """In a few words."""


class FixedBlock:
    """Always the same.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int):
        self.block = block

    def tokens(self, lanes: int) -> int:
        return self.block

    def describe(self) -> str:
        return f"blocks of {self.block} tokens"
