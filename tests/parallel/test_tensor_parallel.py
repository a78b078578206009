# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts on a model whose layers two ranks share: the answers of the whole model, on both ranks."""

import copy
from dataclasses import replace

import deepspeed
import pytest
import torch
from harness import assert_same_answers, prompt
from models import Tokenizer, engine_of, ragged_prompts, solo
from prompt_ops import reference_ops
from tensor_parallel_cases import (
    FAMILIES,
    PROMPTS,
    SAMPLINGS,
    answer,
    counted,
    engine_over,
    first_difference,
    hybrid,
    plain,
    rollout_over,
    train,
    whole_weights,
)

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation.capacity import SlotBytes, cache_bytes
from deepspeed_hybrid.ops.few_rows import ROWS as FEW_ROWS

pytestmark = pytest.mark.xdist_group("two_ranks")
HERE = "parallel.test_tensor_parallel"
NEW_TOKENS = 16


def call(ranks, function, **arguments) -> list:
    """What a function of this file returns on both ranks, which must be the same."""
    first, second = ranks.run(f"{HERE}:{function.__name__}", **arguments)
    assert first == second, "ranks differ"
    return first


# ------------------------------------------------------------------------------------------------------------ outputs


def same_as_whole(
    family: str, tied: bool, use_segki: bool, new_tokens: int, samplings: list[str], sizes: dict, options: dict
) -> list:
    """Asserts that a shared model answers as the whole one does, whose greedy answers are Hugging Face's."""
    whole = FAMILIES[family](tied, **sizes)
    engine = engine_over(copy.deepcopy(whole).train(), **options)
    rollout = rollout_over(engine, use_segki=use_segki)
    alone = rollout_over(engine_of(whole), use_segki=use_segki)
    tokens = []
    for name in samplings:
        asked = {**SAMPLINGS[name], "n_samples_per_prompt": 1 if name == "greedy" else 2}
        batch, expected = answer(rollout, new_tokens, **asked), answer(alone, new_tokens, **asked)
        assert torch.equal(batch.input_ids, expected.input_ids), f"{name}: {first_difference(batch, expected)}"
        off = (batch.logprobs - expected.logprobs).abs()
        assert off.mean() < 2e-5 and off.max() < 5e-3, f"{name}: logprobs are off by up to {off.max()}"
        if name == "greedy":
            prompts = ragged_prompts(PROMPTS)
            assert_same_answers(batch, [solo(whole, prompt(prompts, row), new_tokens) for row in range(len(PROMPTS))])
        tokens.append(batch.input_ids.tolist())
    return tokens


LONG = ["greedy", "all at once"]
SHARED_MODELS = {
    "heads shared": dict(family="hybrid", new_tokens=128, samplings=LONG),
    "as AutoTP has it": dict(family="hybrid", use_segki=False, sizes=dict(vocab_size=2501)),
    "heads do not divide": dict(
        family="hybrid",
        tied=True,
        samplings=LONG,
        sizes=dict(linear_num_key_heads=3, linear_num_value_heads=3),
    ),
    "one key head": dict(
        family="hybrid", samplings=LONG, sizes=dict(linear_num_key_heads=1, linear_num_value_heads=3)
    ),
    "tied, odd vocabulary": dict(
        family="plain", tied=True, new_tokens=128, samplings=LONG, sizes=dict(vocab_size=257)
    ),
    "several chunks": dict(family="plain", sizes=dict(vocab_size=2501)),
    "sharded, not tied": dict(family="plain", samplings=LONG, options=dict(vocab_parallel_lm_head=True)),
    "tied, logits whole": dict(family="plain", tied=True, samplings=LONG, options=dict(vocab_parallel_lm_head=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_MODELS)
def test_answers_are_those_of_the_whole_model(ranks, name):
    """huggingface/transformers#46846 and tt-forge-models#798 (two key and four value heads), and DeepSpeed's argmax of
    vocabulary shards. Sizes of which a half is no whole number are among these."""
    defaults = dict(tied=False, use_segki=True, new_tokens=NEW_TOKENS, samplings=list(SAMPLINGS), sizes={}, options={})
    call(ranks, same_as_whole, **{**defaults, **SHARED_MODELS[name]})


def prompts_as_chains(family: str) -> list:
    """Asserts that prompts go through the ops that a GPU has for them, a sum over ranks behind each half of a layer,
    and that answers are those of the whole model."""
    whole = FAMILIES[family]()
    engine = engine_over(copy.deepcopy(whole).train())
    rollout, alone = rollout_over(engine), rollout_over(engine_of(whole))
    ops, rows = reference_ops(), []
    rollout._injection.prompt = replace(
        ops, shared_sum=lambda x, *rest: (rows.append(len(x)), ops.shared_sum(x, *rest))[1]
    )
    rollout._injection.replan()
    rollout._injection.follow()
    for asked in (dict(temperature=0.0), dict(temperature=1.0, n_samples_per_prompt=2)):
        batch, expected = answer(rollout, NEW_TOKENS, **asked), answer(alone, NEW_TOKENS, **asked)
        assert torch.equal(batch.input_ids, expected.input_ids), first_difference(batch, expected)
        assert (batch.logprobs - expected.logprobs).abs().max() < 5e-3
    layers = len(text_model(whole).layers)
    assert rows and len(rows) % (2 * layers) == 0 and min(rows) > FEW_ROWS[-1]
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_run_as_chains_of_shared_layers(ranks, family):
    call(ranks, prompts_as_chains, family=family)


def rows_as_they_end(family: str) -> list:
    whole = FAMILIES[family]()
    rollout = rollout_over(engine_over(copy.deepcopy(whole).train()))
    sampling = SamplingConfig(
        max_new_tokens=NEW_TOKENS, temperature=0.0, continuous_batch_size=2, stop_token_ids=list(range(0, 256, 9))
    )
    prompts = ragged_prompts(PROMPTS)
    rows = list(rollout.generate_iter(RolloutRequest(*prompts), sampling))
    for row in rows:
        expected = solo(whole, prompt(prompts, row.index), NEW_TOKENS, set(sampling.stop_token_ids))
        assert row.tokens.tolist() == expected.tokens.tolist()
    assert len({len(row.tokens) for row in rows}) > 1, "rows are to end at different times"
    return [row.tokens.tolist() for row in rows]


def test_rows_come_as_they_end_on_both_ranks(ranks):
    call(ranks, rows_as_they_end, family="hybrid")


# -------------------------------------------------------------------------------------------------- weights and losses


def following_weights(family: str, tied: bool, stage: int) -> list:
    """Asserts that answers follow every step, and that memory stays where it is."""
    whole = FAMILIES[family](tied)
    engine = engine_over(copy.deepcopy(whole).train(), stage)
    rollout = rollout_over(engine)
    answers, addresses = [], []
    for step in range(3):
        if step:
            train(engine, step)
        report = rollout.sync_segki_weights()
        assert report.seconds > 0 and report.bytes_copied == rollout.memory_report()["packed_weights"]
        batch = answer(rollout, NEW_TOKENS, temperature=0.0)
        whole.load_state_dict(whole_weights(engine.module))
        prompts = ragged_prompts(PROMPTS)
        oracles = [solo(whole.eval(), prompt(prompts, row), NEW_TOKENS) for row in range(len(PROMPTS))]
        assert_same_answers(batch, oracles, atol=1e-3)
        answers.append(batch.input_ids.tolist())
        addresses.append([fused.weight.data_ptr() for fused in rollout._injection.fused.values()])
    assert addresses[0] == addresses[1] == addresses[2]
    return answers


@pytest.mark.parametrize("family, tied, stage", [("hybrid", False, 1), ("plain", True, 2), ("hybrid", False, 3)])
def test_answers_follow_every_step(ranks, family, tied, stage):
    answers = call(ranks, following_weights, family=family, tied=tied, stage=stage)
    assert answers[0] != answers[1] != answers[2]


def losses(stage: int, rollouts: bool) -> list[float]:
    """Of five steps, with a rollout before each or with none."""
    engine = engine_over(hybrid().train(), stage)
    rollout = rollout_over(engine)
    seen = []
    for step in range(5):
        if rollouts:
            answer(rollout, 4, temperature=1.0)
        seen.append(train(engine, step))
        if rollouts:
            rollout.sync_segki_weights()
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rollouts_leave_training_as_it_is(ranks, stage):
    without = call(ranks, losses, stage=stage, rollouts=False)
    assert len(set(without)) == 5
    assert call(ranks, losses, stage=stage, rollouts=True) == without


# -------------------------------------------------------------------------------------------------- what goes between


def step_costs(use_segki: bool, sizes: dict, sampling: dict, tied: bool = False) -> dict:
    """Collectives of one decode step, and bytes of state."""
    rollout = rollout_over(engine_over(hybrid(tied, **sizes).train()), use_segki=use_segki)
    counts = []
    for new_tokens in (3, 3, 4):
        with counted() as collectives:
            answer(rollout, new_tokens, **sampling)
        counts.append(collectives.counts)
    step = {name: count - counts[1].get(name, 0) for name, count in counts[2].items()}
    described = rollout.describe()
    return {**step, "state": rollout.memory_report()["gdn_state"], "text": described.splitlines()}


GREEDY, SAMPLED = dict(temperature=0.0), dict(temperature=1.0)
GATHER, SUM = "_allgather_base_", "allreduce_"
GDN_LAYERS, LAYERS, ATTENTION_LAYERS = 3, 4, 1
ODD_HEADS = dict(linear_num_key_heads=3, linear_num_value_heads=3)


@pytest.mark.parametrize(
    "options, gathers, sums",
    [
        (dict(), 1, GDN_LAYERS),  # the choice; an output product a layer
        (dict(sizes=ODD_HEADS), 1 + 2 * GDN_LAYERS, 0),  # inputs in one, output
        (dict(use_segki=False), 1 + 5 * GDN_LAYERS, 0),  # as AutoTP has it: four inputs and the output
        (dict(sampling=SAMPLED), 1, GDN_LAYERS),
        (dict(sampling=SAMPLED, sizes=dict(vocab_size=2500)), 2, GDN_LAYERS),  # chunks, and entries of one
        (dict(sampling=dict(temperature=1.0, top_k=3)), 1 + 9, GDN_LAYERS),
        (dict(tied=True), 1, GDN_LAYERS + 1),  # the embedding
    ],
    ids=["heads shared", "heads do not divide", "unfused", "sampled", "several chunks", "truncated", "tied"],
)
def test_collectives_of_a_decode_step(ranks, options, gathers, sums):
    """Beside these, one sum behind each attention and each MLP."""
    costs = call(ranks, step_costs, **{**dict(use_segki=True, sizes={}, sampling=GREEDY), **options})
    assert (costs[GATHER], costs[SUM]) == (gathers, sums + ATTENTION_LAYERS + LAYERS)


def test_state_is_halved_where_heads_are_shared(ranks):
    shared = call(ranks, step_costs, use_segki=True, sizes={}, sampling=GREEDY)
    whole = call(ranks, step_costs, use_segki=False, sizes={}, sampling=GREEDY)
    assert 2 * shared["state"] == whole["state"] > 0
    assert "tensor parallel: 2 ranks share the layers; logits 128 of 256 here" in shared["text"]
    assert sum("of this rank's heads" in line for line in shared["text"]) == GDN_LAYERS
    assert sum("one chain of ops" in line for line in shared["text"]) == LAYERS, "the head shares its ids"
    odd = call(ranks, step_costs, use_segki=True, sizes=ODD_HEADS, sampling=GREEDY)
    undivided = [line for line in odd["text"] if "3 key and 3 value heads do not divide by 2 ranks" in line]
    assert sum("fused_gdn" in line for line in undivided) == GDN_LAYERS
    assert sum("one chain of ops" in line for line in odd["text"]) == ATTENTION_LAYERS


def key_bytes() -> list:
    """Of keys and values: what there is, and what was expected of slots and capacity."""
    rollout = rollout_over(engine_over(plain().train()))
    answer(rollout, 3, temperature=0.0)
    report, cache = rollout.memory_report(), rollout._arena.cache
    slot = SlotBytes.of(rollout.engine.module, torch.float32)
    return [report["kv_keys"] + report["kv_values"], cache_bytes(slot, cache.slots, cache.capacity)]


def test_ranks_hold_the_keys_of_their_heads(ranks):
    held, expected = call(ranks, key_bytes)
    layers, slots, heads, capacity, size, half = 2, 5, 2, 64, 32 * 4, 2
    assert held == expected == 2 * layers * slots * heads * capacity * size // half


# ----------------------------------------------------------------------------------------------- inference, refusals


def inference_engine(family: str) -> list:
    """Under DeepSpeed's inference engine, which shards by names alone."""
    whole = FAMILIES[family]()
    engine = deepspeed.init_inference(copy.deepcopy(whole), tensor_parallel={"tp_size": 2}, dtype=torch.float32)
    batch = answer(HybridEngineRollout(engine, Tokenizer()), NEW_TOKENS, temperature=0.0)
    prompts = ragged_prompts(PROMPTS)
    assert_same_answers(batch, [solo(whole, prompt(prompts, row), NEW_TOKENS) for row in range(len(PROMPTS))])
    return batch.input_ids.tolist()


def test_inference_engine_of_plain_attention(ranks):
    call(ranks, inference_engine, family="plain")


def refusal(family: str, sizes: dict, inference: bool) -> str:
    model = FAMILIES[family](**sizes)
    if inference:
        engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": 2}, dtype=torch.float32)
    else:
        engine = engine_over(model.train())
    with pytest.raises(ValueError) as refused:
        rollout_over(engine)
    return str(refused.value)


def test_what_ranks_cannot_share_is_refused_on_both(ranks):
    message = call(ranks, refusal, family="plain", sizes=dict(num_key_value_heads=1), inference=False)
    assert "layer 0 is not supported" in message and "autotp_size" in message and "key-value heads" in message
    message = call(ranks, refusal, family="hybrid", sizes={}, inference=True)
    assert "cuts across heads" in message and "deepspeed.initialize()" in message


def batch_invariance() -> str:
    with pytest.raises(RuntimeError) as refused:
        rollout_over(engine_over(plain().train()), batch_invariant=True)
    return str(refused.value)


def test_batch_invariance_is_refused(ranks):
    assert "no decode chain" in call(ranks, batch_invariance)
