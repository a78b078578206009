# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Generation runs in the parameters' dtype, whatever surrounds the call."""

import torch
from models import Tokenizer, engine_of, ragged_prompts, tiny_model

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig


def test_autocast_around_a_call_changes_nothing():
    model = tiny_model()
    rollout = HybridEngineRollout(engine_of(model), Tokenizer())
    ids, mask = ragged_prompts([3, 7])
    sampling = SamplingConfig(max_new_tokens=6, temperature=0.0)
    plain = rollout.generate(RolloutRequest(ids, mask), sampling)
    with torch.autocast("cpu", torch.bfloat16):
        cast = rollout.generate(RolloutRequest(ids, mask), sampling)
    assert torch.equal(cast.input_ids, plain.input_ids) and torch.equal(cast.logprobs, plain.logprobs)
