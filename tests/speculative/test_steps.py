# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How a speculative step runs: without looking at a value on the host, and with no trace where it fails."""

import pytest
import torch
from harness import greedy
from models import ragged_prompts, tiny_model
from speculative_cases import figures, speculative_rollout, tiny_draft
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.speculative import speculation
from deepspeed_hybrid.speculative.verify import verify

LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class Watch(TorchDispatchMode):
    """Names of ops that wait for a device, or whose results' sizes depend on values."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in LOOKS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [dict(temperature=0.0), dict(temperature=1.0, top_p=0.9, repetition_penalty=1.1)])
def test_no_step_looks_at_a_value(options):
    """So that it can run ahead on a GPU, and be captured one day."""
    target = tiny_model()
    rollout = speculative_rollout(target, tiny_draft(target))
    original, watch, steps = rollout._speculation.step, Watch(), []

    def watched(*args):
        with watch:
            original(*args)
        steps.append(1)

    rollout._speculation.step = watched
    sampling = SamplingConfig(max_new_tokens=6, seed=1, **options)
    rollout.generate(RolloutRequest(*ragged_prompts([5, 2])), sampling)
    assert len(steps) > 2 and watch.seen == []
    with watch:
        torch.ones(1).item()
    assert watch.seen == ["_local_scalar_dense"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["propose", "verify", "accept", "commit", "observe"])
def test_a_failure_anywhere_leaves_nothing(where, error, monkeypatch):
    target = tiny_model()
    rollout, prompts = speculative_rollout(target, tiny_draft(target)), ragged_prompts([5, 2])
    first = greedy(rollout, prompts, 8)
    counts = figures(rollout)
    calls = []

    def failing(original):
        def run(*args):
            calls.append(1)
            if len(calls) == 3:
                raise error("in the midst")
            return original(*args)

        return run

    with monkeypatch.context() as patch:
        owner = rollout._speculation.drafter if where in ("propose", "observe") else speculation
        patch.setattr(owner, where, failing(getattr(owner, where)))
        with pytest.raises(error, match="in the midst"):
            greedy(rollout, prompts, 8)
    assert not any(layer._forward_hooks for layer in text_model(target).layers)
    assert not any("forward" in module.__dict__ for module in target.modules())
    again = greedy(rollout, prompts, 8)
    assert torch.equal(again.input_ids, first.input_ids) and torch.equal(again.logprobs, first.logprobs)
    assert figures(rollout) == counts
    assert speculation.verify is verify
