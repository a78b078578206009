# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""batch_invariant=True: a row's tokens and logprobs have the same bits alone and among others, before and after.

On a CPU rows run one by one; what is left to go wrong is what rows share: the cache's capacity, a prompt's forward,
the sampling of several rows at once.
"""

import pytest
import torch
from harness import prompt, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import prefill as prefill_module
from deepspeed_hybrid.generation.sampling import truncate_alone
from deepspeed_hybrid.ops.truncate_scores import truncate_scores_reference as truncate

LENGTHS = [400, 3, 500, 17]  # beyond some 385 positions the order of a sum shows
NEW_TOKENS = 16
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs_mode": "raw"},
}


def answer(rollout, prompts, new_tokens: int = NEW_TOKENS, **options) -> RolloutBatch:
    options = {"temperature": 0.0, "seed": 7, **options}
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(max_new_tokens=new_tokens, **options))


def assert_same_bits(one: RolloutBatch, other: RolloutBatch, row: int = 0, other_row: int = 0) -> None:
    starts = int(one.response_start_idx[row]), int(other.response_start_idx[other_row])
    tokens = [
        batch.input_ids[at, start:] for batch, at, start in zip((one, other), (row, other_row), starts, strict=True)
    ]
    width = min(len(tokens[0]), len(tokens[1]))
    assert torch.equal(tokens[0][:width], tokens[1][:width])
    assert torch.equal(one.logprobs[row, :width], other.logprobs[other_row, :width])


def alone(prompts, row: int):
    ids = prompt(prompts, row)[None]
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_alone_and_among_others(family, dtype):
    model, prompts = tiny_model(family).to(dtype), ragged_prompts(LENGTHS)
    together = answer(rollout_of(model, batch_invariant=True), prompts)
    for row in range(len(LENGTHS)):
        assert_same_bits(together, answer(rollout_of(model, batch_invariant=True), alone(prompts, row)), row)


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3"])
def test_what_came_before_and_what_may_come_after(family):
    """A cache that has grown for another call, and one with room for more tokens."""
    model, prompts = tiny_model(family), alone(ragged_prompts(LENGTHS), 0)
    rollout = rollout_of(model, batch_invariant=True)
    first = answer(rollout, prompts)
    answer(rollout, ragged_prompts([900]), 4)
    assert_same_bits(answer(rollout, prompts), first)
    assert_same_bits(answer(rollout_of(model, batch_invariant=True), prompts, 120), first)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_samples_of_every_kind(kind):
    model, prompts = tiny_model(), ragged_prompts(LENGTHS[:2])
    together = answer(rollout_of(model, batch_invariant=True), prompts, n_samples_per_prompt=2, **kind)
    first = answer(rollout_of(model, batch_invariant=True), alone(prompts, 0), n_samples_per_prompt=2, **kind)
    unshared = rollout_of(model, batch_invariant=True, use_shared_prefill=False)
    apart = answer(unshared, prompts, n_samples_per_prompt=2, **kind)
    for row in range(2):  # of the first prompt, whose request number is the same
        assert_same_bits(together, first, row, row)
    for row in range(4):
        assert_same_bits(together, apart, row, row)


@pytest.mark.parametrize("invariant", [True, False])
def test_prompts_run_one_at_a_time(invariant, monkeypatch):
    seen = []
    whole = prefill_module._in_chunks

    def recorded(model, cache, ids, lengths, slots, budget):
        seen.append((len(slots), ids.shape[1]))
        return whole(model, cache, ids, lengths, slots, budget)

    monkeypatch.setattr(prefill_module, "_in_chunks", recorded)
    model, prompts = tiny_model(), ragged_prompts([3, 40, 17])
    rollout = rollout_of(model)
    answer(rollout, prompts, 1)  # makes room
    seen.clear()
    arena = rollout._arena
    with rollout._generating():
        logits = prefill_module.prefill(arena.model, arena.cache, prompts[0], [3, 40, 17], [0, 1, 2], alone=invariant)
    assert logits.shape[0] == 3
    assert seen == ([(1, 3), (1, 40), (1, 17)] if invariant else [(3, 40)])


@pytest.mark.parametrize("invariant", [True, False])
def test_a_call_asks_for_it(invariant):
    """Where rows do not run one by one, as on a GPU, prompts and truncation go by this alone."""
    rollout = rollout_of(tiny_model("qwen2_5"), batch_invariant=invariant)
    job = rollout._agree(RolloutRequest(*ragged_prompts([3, 5])), SamplingConfig(max_new_tokens=2))
    assert job.plan.kind.invariant == invariant


def test_rows_are_truncated_by_themselves():
    """Over a vocabulary for which cumulative sums go by the number of rows; no row has another's set."""
    scores = 3 * torch.randn(5, 5000, generator=torch.Generator().manual_seed(0))
    settings = (torch.tensor([0, 7, 0, 40, 0]), torch.tensor([0.1, 0.0, 0.3, 0.05, 0.0]), torch.zeros(5))
    together = truncate_alone(truncate, scores, *settings)
    for row in range(5):
        one = slice(row, row + 1)
        alone = truncate_alone(truncate, scores[one], *(setting[one] for setting in settings))
        assert torch.equal(alone, together[one])
    assert torch.equal(together.isfinite(), truncate(scores, *settings).isfinite())


def test_it_answers_as_without():
    """The same sums in another order."""
    model, prompts = tiny_model(), ragged_prompts([3, 40, 1, 17, 9])
    plain = answer(rollout_of(model), prompts)
    invariant = answer(rollout_of(model, batch_invariant=True), prompts)
    assert torch.equal(plain.input_ids, invariant.input_ids)
    torch.testing.assert_close(plain.logprobs, invariant.logprobs, rtol=0, atol=5e-5)


def test_figures_of_a_continuous_batch_are_those_of_one():
    model, prompts = tiny_model(), ragged_prompts([3, 5])
    rollout = rollout_of(model, batch_invariant=True)
    answer(rollout, prompts, 2)
    assert rollout.get_last_continuous_stats() is None
    answer(rollout, prompts, 2, continuous_batch_size=2)
    assert rollout.get_last_continuous_stats()["slots"] == 1


@pytest.mark.parametrize("options", [{"use_segki": False}, {"segki_kernel": "fused_glu"}], ids=str)
def test_layers_that_are_no_chains_are_refused(options):
    with pytest.raises(RuntimeError, match="batch_invariant=True cannot be honoured: .* is no decode chain: "):
        rollout_of(tiny_model(), batch_invariant=True, **options)


def test_a_layer_that_stops_being_a_chain_is_refused():
    model, prompts = tiny_model(), ragged_prompts([3, 40])
    rollout = rollout_of(model, batch_invariant=True)
    before = answer(rollout, prompts)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="batch_invariant=True cannot be honoured: layer 1 is no decode chain"):
        answer(rollout, prompts)
    hook.remove()
    assert torch.equal(answer(rollout, prompts).input_ids, before.input_ids)
