# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Marks behind the decode steps of a rollout, and the mean of what lies between them."""

import pytest
from harness import rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools import step_marks


def test_a_mark_a_step(monkeypatch):
    rollout = rollout_of(tiny_model())
    marks = step_marks.StepMarks(rollout)
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0)
    monkeypatch.setattr(step_marks, "time", Clock())
    rollout.generate(RolloutRequest(*ragged_prompts([5, 3])), sampling)
    assert len(marks.marks) == 5  # the first token is of the prompt
    assert marks.mean_ms(0) == pytest.approx((4**2 - 0) / 4)
    assert marks.mean_ms(2) == pytest.approx((4**2 - 2**2) / 2)
    assert marks.mean_ms(1, steps=2) == pytest.approx((3**2 - 1**2) / 2)
    with pytest.raises(ValueError, match="must have 6 decode steps and more to be timed, not 5"):
        marks.mean_ms(4)
    marks.clear()
    assert not marks.marks


class Clock:
    """Squares of ms, one a look."""

    looks = 0

    def perf_counter(self) -> float:
        self.looks += 1
        return (self.looks - 1) ** 2 / 1000
