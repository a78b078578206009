# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fused segments inside a real engine: nothing is copied, every optimizer step is seen, and training knows nothing."""

import copy

import pytest
import torch
from harness import greedy, record_logits
from models import Tokenizer, ragged_prompts, tiny_model

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig
from deepspeed_hybrid.segments.plan import plan_segments

PROMPTS, NEW_TOKENS, STEPS = [3, 7, 5], 12, 5
RELATIVE = 2e-5  # of the largest logit
STAGES = [0, 1, 2]


def training_batch(step: int) -> dict[str, torch.Tensor]:
    ids, mask = ragged_prompts([20, 13], seed=40 + step)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)


def train_step(engine, step: int) -> float:
    loss = engine(**training_batch(step)).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def rollout_in(engine, use_segki: bool | None) -> HybridEngineRollout:
    return HybridEngineRollout(engine, Tokenizer(), HybridEngineRolloutConfig(use_segki=use_segki))


def fused_addresses(rollout: HybridEngineRollout) -> dict[str, list[int]]:
    return {
        path: [tensor.data.data_ptr() for tensor in linear.tensors]
        for path, linear in rollout._injection.fused.items()
    }


def fused_weights_are_right(rollout: HybridEngineRollout) -> bool:
    return all(
        torch.equal(tensor.data, torch.cat([parameter.detach() for parameter in tensor.parameters]))
        for linear in rollout._injection.fused.values()
        for tensor in linear.tensors
    )


def both_answer(fused: HybridEngineRollout, plain: HybridEngineRollout):
    """The fused rollout's answer, equal to the other's."""
    prompts = ragged_prompts(PROMPTS)
    records = [record_logits(rollout) for rollout in (fused, plain)]
    batch, expected = (greedy(rollout, prompts, NEW_TOKENS, n_samples_per_prompt=2) for rollout in (fused, plain))
    for rollout in (fused, plain):
        del rollout._paths.call.logits
    assert torch.equal(batch.input_ids, expected.input_ids)
    bound = RELATIVE * max(float(logits.abs().max()) for logits in records[1])
    assert max(float((one - other).abs().max()) for one, other in zip(*records, strict=True)) <= bound
    return batch


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3", "llama", "gdn_only"])
def test_every_step_is_seen_and_nothing_is_copied(make_engine, family, stage):
    model = tiny_model(family).train()
    engine = make_engine(model, learning_rate=1e-2, stage=stage)
    flat = [parameter.data_ptr() for parameter in model.parameters()]
    fused, plain = rollout_in(engine, True), rollout_in(engine, False)
    if stage:
        assert [parameter.data_ptr() for parameter in model.parameters()] == flat, "ZeRO's buffers must stay"
    paths = [segment.path for segment in plan_segments(model)]
    addresses = fused_addresses(fused)
    batches = [both_answer(fused, plain)]
    for step in range(STEPS):
        train_step(engine, step)

        batches.append(both_answer(fused, plain))

        report = fused.sync_segki_weights()
        assert report.modes == dict.fromkeys(paths, "aliased") and report.bytes_copied == 0
        assert fused.memory_report()["packed_weights"] == 0
        assert fused_addresses(fused) == addresses
        assert fused_weights_are_right(fused)
    changes = [not torch.equal(one.logprobs, other.logprobs) for one, other in zip(batches, batches[1:], strict=False)]
    assert changes == [True] * STEPS
    assert not torch.equal(batches[0].input_ids, batches[-1].input_ids)


@pytest.mark.parametrize("stage", STAGES)
def test_layers_with_biases_follow_every_step(make_engine, stage):
    """ZeRO lays a bias between two weights, so that q, k and v of Qwen2.5 are copies there, at addresses that stay."""
    model = tiny_model("qwen2_5").train()
    engine = make_engine(model, learning_rate=1e-2, stage=stage)
    fused, plain = rollout_in(engine, True), rollout_in(engine, False)
    addresses = fused_addresses(fused)
    attention = "packed" if stage else "aliased"
    expected = {
        segment.path: attention if segment.kind == "fused_attention" else "aliased" for segment in plan_segments(model)
    }
    copied = 0
    if stage:
        for layer in model.model.layers:
            projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            copied += sum(4 * (one.weight.numel() + one.bias.numel()) for one in projections)
    batches = [both_answer(fused, plain)]
    for step in range(STEPS):
        train_step(engine, step)
        batches.append(both_answer(fused, plain))
        assert fused_weights_are_right(fused)
        report = fused.sync_segki_weights()
        assert report.modes == expected and report.bytes_copied == copied
        assert fused.memory_report()["packed_weights"] == copied
        assert fused_addresses(fused) == addresses
    for one, other in zip(batches, batches[1:], strict=False):
        assert not torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5"])
def test_bf16_engine_keeps_the_addresses(make_engine, family, stage):
    model = tiny_model(family).train()
    engine = make_engine(model, learning_rate=1e-2, stage=stage, bf16={"enabled": True})
    rollout = rollout_in(engine, True)
    addresses, outputs = fused_addresses(rollout), []
    for step in range(3):
        train_step(engine, step)
        outputs.append(greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS))
        assert fused_weights_are_right(rollout)
        assert fused_addresses(rollout) == addresses
    assert not torch.equal(outputs[0].logprobs, outputs[1].logprobs)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_parameter_per_group(make_engine, stage):
    """Each group is a flat buffer of its own, which its one parameter fills: it is ZeRO's all the same."""
    model = tiny_model().train()
    engine = make_engine(model, stage=stage, groups=[{"params": [parameter]} for parameter in model.parameters()])
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fused, plain = rollout_in(engine, True), rollout_in(engine, False)
    addresses = fused_addresses(fused)
    for step in range(2):
        both_answer(fused, plain)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert fused_addresses(fused) == addresses
        train_step(engine, step)
    both_answer(fused, plain)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen2_5"])
def test_training_is_the_same_to_the_bit(make_engine, family, stage):
    """With fused rollouts in between, with plain ones, and with none."""
    start = tiny_model(family).train()
    losses, weights = {}, {}
    for use_segki in (True, False, None):
        model = copy.deepcopy(start)
        engine = make_engine(model, learning_rate=1e-2, stage=stage)
        rollout = None if use_segki is None else rollout_in(engine, use_segki)
        losses[use_segki] = []
        for step in range(STEPS):
            if rollout is not None:
                greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS, n_samples_per_prompt=2)
                rollout.sync_segki_weights()
            losses[use_segki].append(train_step(engine, step))
        weights[use_segki] = list(model.parameters())
    assert losses[True] == losses[False] == losses[None] and len(set(losses[True])) == STEPS
    for fused, plain, alone in zip(*weights.values(), strict=True):
        assert torch.equal(fused, alone) and torch.equal(plain, alone)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_loads_into_an_engine_with_a_rollout(make_engine, stage, tmp_path):
    """A checkpoint of an engine that never generated, loaded into one that does."""
    start = tiny_model().train()
    source = make_engine(copy.deepcopy(start), stage=stage)
    for step in range(2):
        train_step(source, step)
    source.save_checkpoint(str(tmp_path), tag="saved")
    engine = make_engine(copy.deepcopy(start), stage=stage)
    fused, plain = rollout_in(engine, True), rollout_in(engine, False)
    before = both_answer(fused, plain)

    engine.load_checkpoint(str(tmp_path), tag="saved")

    after = both_answer(fused, plain)
    assert not torch.equal(before.logprobs, after.logprobs)
    assert [train_step(engine, step) for step in (2, 3)] == [train_step(source, step) for step in (2, 3)]
    both_answer(fused, plain)
