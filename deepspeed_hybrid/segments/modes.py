# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Modules in evaluation mode while they generate, and in the mode that each had before afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_hybrid.segments.apply import surely


@contextmanager
def evaluating(tables: list[dict]) -> Iterator[None]:
    """
    Args:
        tables: the ``__dict__`` of every module; setting attributes would be slow.
    """
    modes = [(held, held["training"]) for held in tables]
    try:
        _set([(held, False) for held, _ in modes])
        yield
    finally:
        surely(lambda: _set(modes))


def _set(modes: list[tuple[dict, bool]]) -> None:
    for held, mode in modes:
        held["training"] = mode
