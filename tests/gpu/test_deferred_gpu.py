# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts on a GPU whose recurrent states are written late: tokens of those whose states are written at once."""

import pytest
import torch
from harness import rollout_of
from models import ragged_prompts, tiny_model
from tolerances import assert_close

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.tools.models import decay_slowly

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [3, 40, 1, 17, 9, 66, 15, 16]
LIMITS = [50, 3, 33, 18, 20, 50, 7, 41]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("slots", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same(temperature, slots, graphs):
    """And again in calls behind one another, of which some defer and some do not, over one cache."""
    model = tiny_model().cuda()
    decay_slowly(model)  # so that a token that is lost or counted twice shows
    sampling = SamplingConfig(
        max_new_tokens=max(LIMITS),
        max_new_tokens_per_row=LIMITS,
        temperature=temperature,
        seed=5,
        continuous_batch_size=slots,
    )
    request = RolloutRequest(*ragged_prompts(LENGTHS))
    expected = rollout_of(model, use_graph_capture=graphs).generate(request, sampling)
    rollout = rollout_of(model, use_graph_capture=graphs)
    for many in (1, None, 1):
        rollout._arena.release()
        rollout._arena.many_rows = lambda state_dtype, many=many: many
        for _ in range(2):
            batch = rollout.generate(request, sampling)
            assert torch.equal(batch.input_ids, expected.input_ids)
            assert_close(batch.logprobs, expected.logprobs)
        assert ("gdn_deltas" in rollout.memory_report()) == (many is not None)
