# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A drafter's context beside the rest of a step: which steps branch, what is held, and that they always join.

Whether the streams of a GPU agree is tests/gpu/test_speculative_gpu.py's.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import Schedule, speculative_rollout, tiny_draft

from deepspeed_hybrid.speculative import side_stream, speculation
from deepspeed_hybrid.speculative.side_stream import SideStream


class Recorder:
    """A device with streams, of which only the order of events is there."""

    def __init__(self):
        self.log, self.now = [], "main"

    def Stream(self):
        return self._named("side")

    def current_stream(self):
        return self._named(self.now)

    def _named(self, name: str):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream):
        self.now = stream.name
        yield
        self.now = "main"


def test_a_branch_is_joined_and_holds_what_it_reads(monkeypatch):
    recorder, side = Recorder(), SideStream()
    monkeypatch.setattr(side_stream, "get_accelerator", lambda: recorder)
    features = SimpleNamespace(device=torch.device("cuda"))
    side.join()  # nothing has left
    for _ in range(2):
        with side.branch(features):
            assert recorder.now == "side" and side._held == [features]
        side.join()
        assert recorder.now == "main" and side._held == []
    assert recorder.log == ["side waits for main", "main waits for side"] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_branch_and_every_step_joins(fails, monkeypatch):
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    draft = tiny_draft(target)
    rollout = speculative_rollout(target, draft, Schedule(8, 1, 4), draft_side_stream=True)
    side, log = rollout._speculation.side, []
    branch, join = side.branch, side.join

    @contextmanager
    def branching(*held):
        log.append("branch")
        with branch(*held):
            yield

    side.branch, side.join = branching, lambda: (log.append("join"), join())
    if fails:

        def failing(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(speculation, "accept", failing)
        with pytest.raises(KeyboardInterrupt):
            greedy(rollout, prompts, 12)
        assert log == ["branch", "join"]
        return
    batch, plain = greedy(rollout, prompts, 12), greedy(rollout_of(target), prompts, 12)
    assert torch.equal(batch.input_ids, plain.input_ids)
    blocks = sum(count for tokens, count in rollout._speculation.stats.steps.items() if tokens > 1)
    assert log == ["branch", "join"] * blocks and blocks > 1
