# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speculative steps on a GPU: eager, with the kernels of plain decode steps, and the plain path's tokens in fp32."""

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import ScriptedDrafter, figures, script_of, speculative_rollout, tiny_draft

from deepspeed_hybrid import RolloutRequest, SamplingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class DeviceScript(ScriptedDrafter):
    """A script reads its rows on the host; its guesses go to the device."""

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        return super().propose(state, tokens, kv_length).to(state.token.device)


@pytest.mark.usefixtures("exact_fp32")
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("proposes", ["model", "script"])
def test_fp32_tokens_are_the_plain_paths(family, proposes):
    target, prompts = tiny_model(family).cuda(), ragged_prompts([5, 1, 17, 2])
    plain = greedy(rollout_of(target), prompts, 32)
    draft = tiny_draft(target).cuda()
    if proposes == "script":
        draft = DeviceScript(script_of(plain), lambda request, sample, length: (length + request) % 8)
    rollout = speculative_rollout(target, draft)
    batch = greedy(rollout, prompts, 32)
    assert torch.equal(batch.input_ids, plain.input_ids)
    torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=1e-3, rtol=0)
    assert "graph capture: off" in rollout.describe()
    if proposes == "script":
        assert figures(rollout)["tokens_per_step"] > 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_do_not_wait_for_the_device():
    target, prompts = tiny_model().cuda(), ragged_prompts([5, 2])
    rollout = speculative_rollout(target, tiny_draft(target).cuda())
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=1)
    rollout.generate(RolloutRequest(*prompts), sampling)  # compiles kernels
    original = rollout._speculation.step

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    rollout._speculation.step = watched
    assert rollout.generate(RolloutRequest(*prompts), sampling).response_lengths.tolist() == [12, 12]
