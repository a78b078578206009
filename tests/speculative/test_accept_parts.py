# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Truncated choices of a block are made some rows at a time, and are the same."""

import torch
from harness import rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import DeviceScript, figures, script_of, speculative_rollout

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.speculative import accept


def test_tokens_do_not_depend_on_the_parts(monkeypatch):
    """Parts end amid the lanes of a token, and the last is shorter than others."""
    target, prompts = tiny_model(), RolloutRequest(*ragged_prompts([5, 2, 9]))
    sampling = SamplingConfig(max_new_tokens=20, temperature=1.1, seed=4, top_p=0.9, top_k=50)
    plain = rollout_of(target).generate(prompts, sampling)
    script, sizes = DeviceScript(script_of(plain), lambda *key: sum(key) % 8), []
    rollout = speculative_rollout(target, script)
    monkeypatch.setattr(accept, "MOST_TRUNCATED", 5)
    advance = accept.advance

    def watched(state, scores, *rest):
        sizes.append((len(scores), state.token.numel()))
        advance(state, scores, *rest)

    monkeypatch.setattr(accept, "advance", watched)
    batch = rollout.generate(prompts, sampling)
    assert torch.equal(batch.input_ids, plain.input_ids)
    torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=1e-4, rtol=0)
    assert figures(rollout)["tokens_per_step"] > 2
    assert sizes[:7] == [(5, 5)] * 6 + [(2, 2)]  # 8 tokens of 4 lanes
