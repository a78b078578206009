# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How long decode steps take while a rollout generates, without waiting for the device between them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.tools.device import has_cuda


class StepMarks:
    """A mark behind every decode step of a rollout: an event on a GPU, the clock's time elsewhere.

    Args:
        rollout: without profile, which would wait for the device between steps.
    """

    def __init__(self, rollout: HybridEngineRollout):
        self.marks: list[Any] = []
        arena, begin = rollout._arena, rollout._arena.begin

        def begin_marked(plan) -> Callable[[], None]:
            step = begin(plan)

            def run() -> None:
                step()
                self.marks.append(_mark())

            return run

        arena.begin = begin_marked  # type: ignore[method-assign]

    def clear(self) -> None:
        self.marks.clear()

    def mean_ms(self, skipped: int, steps: int | None = None) -> float:
        """Of a step, from the one behind the first ``skipped`` on, ``steps`` of them or all: those in which recurrent
        states are written take longer than others.

        Raises:
            ValueError: there were too few.
        """
        marks = self.marks[skipped:] if steps is None else self.marks[skipped : skipped + steps + 1]
        if len(marks) < 2:
            raise ValueError(
                f"a call must have {skipped + 2} decode steps and more to be timed, not {len(self.marks)}"
            )
        get_accelerator().synchronize()
        return statistics.fmean(_ms(*pair) for pair in zip(marks, marks[1:], strict=False))


def _mark() -> Any:
    if not has_cuda():
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    return start.elapsed_time(end) if has_cuda() else 1000 * (end - start)
