# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""batch_invariant=True: a row's tokens and logprobs have the same bits alone and among others."""

import pytest
import torch
from harness import prompt, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutBatch, RolloutRequest, SamplingConfig

LENGTHS = [3, 40, 1, 17, 9]
NEW_TOKENS = 24
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}


def answer(rollout, prompts, **options) -> RolloutBatch:
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(max_new_tokens=NEW_TOKENS, seed=7, **options))


def assert_same_bits(batch: RolloutBatch, other: RolloutBatch, row: int = 0, other_row: int = 0) -> None:
    for name in ("input_ids", "logprobs"):
        one, two = getattr(batch, name)[row], getattr(other, name)[other_row]
        assert torch.equal(one[-NEW_TOKENS:], two[-NEW_TOKENS:]), name


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_slot_and_many(family, kind):
    """Rows that run one after the other, in one slot, and all at once."""
    prompts = ragged_prompts(LENGTHS)
    rollout = rollout_of(tiny_model(family), batch_invariant=True)
    together = answer(rollout, prompts, **kind)
    apart = answer(rollout, prompts, continuous_batch_size=1, **kind)
    two = answer(rollout, prompts, continuous_batch_size=2, n_samples_per_prompt=1, **kind)
    for row in range(len(LENGTHS)):
        assert_same_bits(together, apart, row, row)
        assert_same_bits(together, two, row, row)


def test_a_prompt_alone():
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    together = answer(rollout_of(model, batch_invariant=True), prompts, temperature=0.0)
    for row in range(len(LENGTHS)):
        ids = prompt(prompts, row)[None]
        alone = answer(rollout_of(model, batch_invariant=True), (ids, torch.ones_like(ids)), temperature=0.0)
        assert_same_bits(together, alone, row)


def test_it_answers_as_without():
    """The same sums in another order."""
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    plain = answer(rollout_of(model), prompts, temperature=0.0)
    invariant = answer(rollout_of(model, batch_invariant=True), prompts, temperature=0.0)
    assert torch.equal(plain.input_ids, invariant.input_ids)
    torch.testing.assert_close(plain.logprobs, invariant.logprobs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("options", [{"use_segki": False}, {"segki_kernel": "fused_glu"}], ids=str)
def test_layers_that_are_no_chains_are_refused(options):
    with pytest.raises(RuntimeError, match="batch_invariant=True cannot be honoured: .* is no decode chain: "):
        rollout_of(tiny_model(), batch_invariant=True, **options)


def test_a_layer_that_stops_being_a_chain_is_refused():
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    rollout = rollout_of(model, batch_invariant=True)
    before = answer(rollout, prompts, temperature=0.0)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="batch_invariant=True cannot be honoured: layer 1 is no decode chain"):
        answer(rollout, prompts, temperature=0.0)
    hook.remove()
    assert torch.equal(answer(rollout, prompts, temperature=0.0).input_ids, before.input_ids)
