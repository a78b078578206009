# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the walk over a model sees: attributes exchanged for others, and nothing where nothing changed."""

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid.segments.fingerprint import SeenModel


def test_an_unchanged_model_has_the_same():
    model = tiny_model()
    before = SeenModel(model)
    assert before.is_same()
    model.train()
    assert before.is_same()
    model.model.layers[0].ds_count = 1
    assert before.is_same() and before.is_same()


@pytest.mark.parametrize("kind", [list, dict, set])
def test_an_attribute_exchanged_time_and_again(kind):
    """The memory of an object that is gone is given to the next, and with it the id."""
    model = tiny_model()
    layer = model.model.layers[1].mlp
    for _ in range(20):
        layer.choice = kind()
        before = SeenModel(model)
        for _ in range(2):  # the second may lie where the first lay
            layer.choice = kind()
        assert not before.is_same()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_another_dtype_before_a_sync(family):
    """The sync sees the change first, and gives the buffers of the old dtype back."""
    model, prompts = tiny_model(family), ragged_prompts([3, 5])
    rollout = rollout_of(model)
    greedy(rollout, prompts, 4)
    model.to(torch.bfloat16)
    rollout.sync_segki_weights()
    expected = greedy(rollout_of(model), prompts, 4)
    assert torch.equal(greedy(rollout, prompts, 4).input_ids, expected.input_ids)
