# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""An MTP head on a GPU, eager and captured: the plain path's tokens in fp32, one capture a length, no sync."""

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts
from mtp_cases import mtp_rollout, taught_mtp, tiny_mtp, tiny_target
from speculative_cases import Schedule, figures

from deepspeed_hybrid import RolloutRequest, SamplingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

LENGTHS, NEW_TOKENS = [5, 1, 17, 2], 24


def assert_same(one, other) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert one.finish_reasons == other.finish_reasons
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_fp32_tokens_are_the_plain_paths(captured):
    target, prompts = tiny_target().cuda(), ragged_prompts(LENGTHS)
    source = tiny_mtp(target)
    rollout = mtp_rollout(target, source, Schedule(4, 1, 2), draft_block_size=4, use_graph_capture=captured)
    kinds = (dict(temperature=0.0), dict(temperature=1.0, seed=1, top_p=0.9, n_samples_per_prompt=2))
    for kind in (*kinds, *kinds):
        sampling = SamplingConfig(NEW_TOKENS, **kind)
        plain = rollout_of(target).generate(RolloutRequest(*prompts), sampling)
        assert_same(rollout.generate(RolloutRequest(*prompts), sampling), plain)
    captures = 0 if rollout._graphs is None else rollout._graphs.captures
    taught = taught_mtp(target, prompts, NEW_TOKENS)
    for mine, theirs in zip(source.parameters(), taught.parameters(), strict=True):
        mine.copy_(theirs)
    rollout.sync_weights(1)
    assert_same(greedy(rollout, prompts, NEW_TOKENS), greedy(rollout_of(target), prompts, NEW_TOKENS))
    assert figures(rollout)["tokens_per_step"] > 1.7
    assert captures == (0 if rollout._graphs is None else rollout._graphs.captures)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_steps_do_not_wait_for_the_device(captured):
    target, prompts = tiny_target().cuda(), ragged_prompts([5, 2])
    draft = tiny_mtp(target)
    rollout = mtp_rollout(target, draft, Schedule(1, 4, 2), draft_block_size=4, use_graph_capture=captured)
    expected, steps, guarded = greedy(rollout, prompts, 16), rollout._speculation.steps, []

    def watched(*args):
        step = steps(*args)

        def run_step() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            guarded.append(1)

        return run_step

    rollout._speculation.steps = watched
    assert_same(greedy(rollout, prompts, 16), expected)
    assert len(guarded) == sum(figures(rollout)["steps"].values()) >= 8
