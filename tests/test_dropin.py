# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Code written for DeepSpeed's own rollout runs after changing the import, and gets what it got."""

import dataclasses
import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import rollout as ds
from deepspeed.runtime.rollout import base as ds_base
from deepspeed.runtime.rollout import hybrid_engine_rollout as ds_hybrid
from deepspeed.utils import logger
from harness import assert_same_answers, force_tokens, greedy, prompt, rollout_of
from models import PAD, Tokenizer, engine_of, ragged_prompts, solo, tiny_model

import deepspeed_hybrid
from deepspeed_hybrid import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)

LENGTHS, NEW_TOKENS = [3, 7, 5], 10


@pytest.fixture(scope="module")
def bench():
    """Qwen2.5, and an end-of-sequence id that ends one answer early while another runs to the limit."""
    model, prompts = tiny_model("qwen2_5"), ragged_prompts(LENGTHS)
    oracle = [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(3)]
    answers = [row.tokens.tolist() for row in oracle]
    eos = next(token for token in answers[0][2:-1] if token not in answers[1])
    assert all(PAD not in answer for answer in answers)
    return SimpleNamespace(model=model, prompts=prompts, oracle=oracle, eos=eos, tokenizer=Tokenizer(eos=eos))


def theirs(bench, samples: int = 1):
    """DeepSpeed's engine and its batch."""
    engine = ds.HybridEngineRollout(
        engine_of(bench.model), bench.tokenizer, ds_hybrid.HybridEngineRolloutConfig(enable_profiling=True)
    )
    batch = engine.generate(
        ds.RolloutRequest(*bench.prompts),
        ds.SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, n_samples_per_prompt=samples),
    )
    return engine, batch


def assert_same_batch(batch, wanted) -> None:
    for field in dataclasses.fields(ds_base.RolloutBatch):
        ours, other = getattr(batch, field.name), getattr(wanted, field.name)
        assert ours.dtype == other.dtype and ours.device == other.device
        assert torch.equal(ours, other), field.name
    assert (batch.batch_size, batch.seq_len) == (wanted.batch_size, wanted.seq_len)


# ------------------------------------------------------------------------------------------- the same in and out


@pytest.mark.parametrize("samples", [1, 4])
def test_batch_is_deepspeeds(bench, samples):
    _, wanted = theirs(bench, samples)
    rollout = rollout_of(bench.model, bench.tokenizer)
    batch = rollout.generate(
        ds.RolloutRequest(*bench.prompts),
        ds.SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, n_samples_per_prompt=samples),
    )
    assert_same_batch(batch, wanted)
    assert isinstance(batch, ds.RolloutBatch) and isinstance(rollout, ds.RolloutEngine)
    lengths = batch.response_lengths.tolist()
    assert lengths[:samples] == [lengths[0]] * samples and lengths[0] < lengths[samples] == NEW_TOKENS


@pytest.mark.parametrize("module", ["deepspeed.runtime.rollout", "deepspeed_hybrid"])
def test_one_script_for_both(bench, module):
    rollouts = importlib.import_module(module)
    rollout = rollouts.HybridEngineRollout(engine_of(bench.model), bench.tokenizer)
    ids, mask = bench.prompts
    batch = rollout.generate(
        rollouts.RolloutRequest(prompt_ids=ids, prompt_attention_mask=mask), rollouts.SamplingConfig(NEW_TOKENS, 0.0)
    )
    assert rollout.sync_weights(step=3) is rollout.sync_weights(4) is None
    for answer, wanted in zip(batch.input_ids[:, LENGTHS[1] :], bench.oracle, strict=True):
        length = wanted.tokens.tolist().index(bench.eos) + 1 if bench.eos in wanted.tokens else NEW_TOKENS
        assert answer.tolist() == wanted.tokens[:length].tolist() + [PAD] * (NEW_TOKENS - length)
    assert rollout.get_last_profile() is None
    rollout.shutdown()


CONFIGS = [
    None,
    ds_hybrid.HybridEngineRolloutConfig(),
    ds_hybrid.HybridEngineRolloutConfig(False, True, True, False, False, 64),
    ds.RolloutConfig(),
    ds.RolloutConfig(engine="deepspeed_hybrid"),
    HybridEngineRolloutConfig(False, True, True, False, False, 64),
    SimpleNamespace(enable_profiling=True, something_else=3),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg).__module__ + "." + type(cfg).__name__)
def test_configurations_of_all_classes(bench, cfg):
    rollout = HybridEngineRollout(engine_of(bench.model), Tokenizer(), cfg)
    assert_same_answers(greedy(rollout, bench.prompts, NEW_TOKENS, continuous_batch_size=2), bench.oracle)
    assert (rollout.get_last_profile() is not None) == getattr(cfg, "enable_profiling", False)


def test_every_field_of_deepspeeds_classes():
    for parent, child in (
        (ds_hybrid.HybridEngineRolloutConfig, HybridEngineRolloutConfig),
        (ds.SamplingConfig, SamplingConfig),
        (ds.RolloutRequest, RolloutRequest),
        (ds.RolloutBatch, RolloutBatch),
    ):
        names = [field.name for field in dataclasses.fields(parent)]
        assert [field.name for field in dataclasses.fields(child)][: len(names)] == names
    ours, parents = SamplingConfig(max_new_tokens=3), ds.SamplingConfig(max_new_tokens=3)
    assert {name: getattr(ours, name) for name in vars(parents)} == vars(parents)


def test_profile_has_deepspeeds_keys(bench):
    engine, _ = theirs(bench)
    rollout = rollout_of(bench.model, bench.tokenizer, enable_profiling=True)
    batch = greedy(rollout, bench.prompts, NEW_TOKENS)
    profile, wanted = rollout.get_last_profile(), engine.get_last_profile()

    assert set(wanted) <= set(profile)
    for name in ("batch_size", "num_samples_per_prompt", "prompt_length", "response_length", "num_decode_forwards"):
        assert profile[name] == wanted[name], name
    assert profile["num_generated_tokens"] == int(batch.response_lengths.sum())
    assert profile["tokens_per_second"] == pytest.approx(profile["num_generated_tokens"] * 1e3 / profile["total_ms"])
    assert 0 < profile["prefill_forward_ms"] < profile["generation_ms"] <= profile["total_ms"]
    assert rollout.get_last_continuous_stats() is None


# What DeepSpeed 0.19.8 has here; its own continuous path does not run on the transformers versions we support.
CONTINUOUS_PROFILE = {
    "num_prefill_forwards",
    "scheduler_overhead_ms",
    "cache_management_overhead_ms",
    "active_batch_size",
    "continuous_batch_size",
}
CONTINUOUS_STATS = {
    "cache_capacity",
    "peak_cache_length",
    "cache_memory_bytes",
    "trim_count",
    "trimmed_columns",
    "trim_latency_ms",
    "trim_bytes_moved",
    "trim_frequency",
    "decode_steps",
    "end_to_end_ms",
    "tokens_per_second",
}


def test_continuous_profile_and_stats_have_deepspeeds_keys(bench):
    engine, _ = theirs(bench)
    rollout = rollout_of(bench.model, bench.tokenizer, enable_profiling=True)
    batch = greedy(rollout, bench.prompts, NEW_TOKENS, continuous_batch_size=2)
    profile, stats = rollout.get_last_profile(), rollout.get_last_continuous_stats()

    assert set(engine.get_last_profile()) | CONTINUOUS_PROFILE <= set(profile)
    assert CONTINUOUS_STATS <= set(stats)
    assert profile["continuous_batch_size"] == profile["active_batch_size"] == stats["slots"] == 2
    assert 2 <= profile["num_prefill_forwards"] <= 3 and stats["refills"] == 1
    assert stats["decode_steps"] == profile["num_decode_forwards"]
    assert stats["peak_cache_length"] == LENGTHS[1] + NEW_TOKENS <= stats["cache_capacity"]
    useful = int(batch.response_lengths.sum()) - 3
    assert stats["occupancy"] == pytest.approx(useful / (2 * stats["decode_steps"]))
    greedy(rollout, bench.prompts, 2)
    assert rollout.get_last_continuous_stats() == stats


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_no_more_rows_in_flight_than_asked_for(bench, slots):
    rollout = rollout_of(bench.model, enable_profiling=True)
    greedy(rollout, bench.prompts, NEW_TOKENS, continuous_batch_size=slots, n_samples_per_prompt=4)
    profile, stats = rollout.get_last_profile(), rollout.get_last_continuous_stats()
    assert profile["active_batch_size"] == slots
    assert stats["refills"] == 12 - slots


@pytest.mark.parametrize("name", ["align_decode_fronts", "enable_cache_trimming"])
def test_fields_without_effect_are_said_to_be_so(bench, name):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        rollout = rollout_of(bench.model, **{name: True})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any(name in text for text in [*said, rollout.describe()])
    assert_same_answers(greedy(rollout, bench.prompts, NEW_TOKENS, continuous_batch_size=2), bench.oracle)


# ------------------------------------------------------------------------------------------------------- the factory


def test_factory_builds_ours(bench):
    cfg = SimpleNamespace(engine="deepspeed_hybrid", enable_profiling=True, poll_every=3)
    rollout = build_rollout(cfg, student_engine=engine_of(bench.model), tokenizer=bench.tokenizer)
    assert type(rollout) is HybridEngineRollout and rollout.name == "deepspeed_hybrid"
    assert rollout.cfg == HybridEngineRolloutConfig(enable_profiling=True, poll_every=3)
    assert (
        type(build_rollout(ds.RolloutConfig(engine="deepspeed_hybrid"), engine_of(bench.model), bench.tokenizer))
        is HybridEngineRollout
    )


def test_factory_passes_other_names_on(bench):
    rollout = build_rollout(ds.RolloutConfig(), engine_of(bench.model), bench.tokenizer)
    assert type(rollout) is ds.HybridEngineRollout


@pytest.mark.parametrize("name", ["hybrid_engine", "deepspeed_hybrid", "another"])
def test_factory_errors_are_alike(name):
    cfg = ds.RolloutConfig(engine=name)
    with pytest.raises(ValueError) as ours:
        build_rollout(cfg)
    with pytest.raises(ValueError) as deepspeeds:
        ds.build_rollout(cfg if name != "deepspeed_hybrid" else ds.RolloutConfig(engine="hybrid_engine"))
    assert str(ours.value) == str(deepspeeds.value).replace("hybrid_engine rollout", f"{name} rollout")


# ----------------------------------------------------------------------------------------------------- configuration

BAD_CONFIG = {
    "use_graph_capture": ["yes", 2, 0, 1],
    "use_shared_prefill": ["no", 0],
    "use_segki": ["x", 1],
    "enable_profiling": [None, 1],
    "align_decode_fronts": [None],
    "enable_cache_trimming": ["x"],
    "continuous_cache_capacity": [0, -1, 2.5, True],
    "segki_kernel": ["fused", None],
    "segki_backend": ["hip", None],
    "state_dtype": ["float8", torch.int64, None, "nn"],
    "max_graphs": [0, None],
    "poll_every": [0, 1.5],
    "batch_invariant": [None, 1],
    "train_consistent": [None, 1],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_CONFIG.items() for value in values])
def test_bad_configuration_names_the_field(name, value):
    for made in (
        lambda: HybridEngineRolloutConfig(**{name: value}),
        lambda: HybridEngineRolloutConfig.from_object(SimpleNamespace(**{name: value})),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must be .*\w.*; got ") as caught:
            made()
        assert repr(value) in str(caught.value)


def test_configuration_is_frozen_and_normal():
    cfg = HybridEngineRolloutConfig(state_dtype="bfloat16")
    assert cfg.state_dtype is torch.bfloat16
    assert HybridEngineRolloutConfig().state_dtype is torch.float32
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.poll_every = 3


# ----------------------------------------------------------------------------------------------------------- outputs


def test_losses_take_our_batch(bench):
    model = tiny_model("qwen2_5").train()
    batch = rollout_of(model, bench.tokenizer).generate(
        RolloutRequest(*bench.prompts), SamplingConfig(max_new_tokens=NEW_TOKENS, seed=1, n_samples_per_prompt=2)
    )
    tokens = ds.ResponseTokenBatch.from_rollout(batch)
    assert int(tokens.response_mask.sum()) == int(batch.response_lengths.sum())

    logits = tokens.select_causal_logits(model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits)
    distillation = ds.generalized_jsd_loss(logits, torch.randn_like(logits), tokens.response_mask)
    chosen = logits.log_softmax(-1).gather(2, tokens.target_ids[..., None])[..., 0]
    answer = slice(int(batch.response_start_idx[0]) - 1, None)
    ratio = (chosen[:, answer] - batch.logprobs).exp()
    (distillation.loss + ratio[tokens.response_mask[:, answer]].mean()).backward()

    assert float(model.lm_head.weight.grad.abs().sum()) > 0
    torch.testing.assert_close(
        ratio[tokens.response_mask[:, answer]], torch.ones(int(tokens.response_mask.sum())), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3_5"])
def test_no_inference_tensors_even_when_called_in_inference_mode(family):
    """And what such a call leaves behind serves a call outside."""
    model, prompts = tiny_model(family), ragged_prompts(LENGTHS)
    rollout = rollout_of(model)
    with torch.inference_mode():
        inside = greedy(rollout, prompts, 4)
        rows = list(rollout.generate_iter(RolloutRequest(*prompts), SamplingConfig(4, 0.0)))
    outside = greedy(rollout, prompts, 4)
    for batch in (inside, outside):
        tensors = (
            batch.input_ids,
            batch.attention_mask,
            batch.response_start_idx,
            batch.logprobs,
            batch.response_lengths,
        )
        assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
    assert not any(row.tokens.is_inference() or row.logprobs.is_inference() for row in rows)
    assert torch.equal(inside.input_ids, outside.input_ids)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_dtypes_of_requests(bench, mask_dtype, id_dtype):
    ids, mask = bench.prompts
    batch = greedy(rollout_of(bench.model), (ids.to(id_dtype), mask.to(mask_dtype)), NEW_TOKENS)
    assert_same_answers(batch, bench.oracle)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.long
    assert torch.equal(batch.attention_mask[:, : ids.shape[1]], mask)


def test_requests_are_not_changed(bench):
    ids, mask = (part.clone() for part in bench.prompts)
    batch = greedy(rollout_of(bench.model), (ids, mask), 3)
    batch.input_ids.zero_(), batch.attention_mask.zero_()
    assert torch.equal(ids, bench.prompts[0]) and torch.equal(mask, bench.prompts[1])


def test_no_bookkeeping_is_shared_between_batches(bench):
    rollout = rollout_of(bench.model)
    first = greedy(rollout, bench.prompts, NEW_TOKENS)
    kept = {name: value.clone() for name, value in vars(first).items() if isinstance(value, torch.Tensor)}
    greedy(rollout, ragged_prompts(LENGTHS, seed=9), NEW_TOKENS)
    assert all(torch.equal(getattr(first, name), value) for name, value in kept.items())


# ------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("own_pad, eos, pad", [(9, [21, 22], 9), (None, [21, 22], 21), (None, 21, 21)])
def test_stops_lengths_masks_and_padding(bench, own_pad, eos, pad):
    """Every source of stop ids, a stop on the last allowed token, and a sampled pad id."""
    tokenizer = Tokenizer(own_pad, eos)
    model, last = bench.model, 22 if isinstance(tokenizer.eos_token_id, list) else 21
    script = torch.tensor(
        [[50, last, 60, 61], [21, 50, 50, 50], [50, 51, 31, 60], [50, 51, 52, 41], [50, 9, 0, 51], [32, 60, 60, 60]]
    )
    lengths, reasons = [2, 1, 3, 4, 4, 1], ["stop", "stop", "stop", "stop", "length", "stop"]
    prompts = ragged_prompts([2, 5, 3, 4, 1, 2])
    rollout = rollout_of(model, tokenizer)
    force_tokens(rollout, script)
    model.generation_config.eos_token_id = [31, 32]
    try:
        batch = greedy(rollout, prompts, 4, stop_token_ids=[41], n_samples_per_prompt=2)
    finally:
        model.generation_config.eos_token_id = None

    twice = [length for length in lengths for _ in range(2)]
    assert batch.response_lengths.tolist() == twice
    assert batch.finish_reasons == [reason for reason in reasons for _ in range(2)]
    valid = torch.arange(4)[None, :] < torch.tensor(twice)[:, None]
    expected = script.repeat_interleave(2, dim=0)
    assert torch.equal(batch.input_ids[:, 5:], torch.where(valid, expected, pad))
    assert torch.equal(batch.attention_mask[:, 5:], valid.long())
    assert torch.equal(batch.attention_mask[:, :5], prompts[1].repeat_interleave(2, dim=0))
    assert torch.equal(batch.input_ids[:, :5], prompts[0].repeat_interleave(2, dim=0))
    assert torch.equal(batch.logprobs != 0, valid)


def test_width_is_that_of_the_longest_answer(bench):
    rollout = rollout_of(bench.model, Tokenizer(eos=21))
    force_tokens(rollout, torch.tensor([[50, 21, 0, 0], [21, 0, 0, 0], [50, 51, 21, 0]]))
    batch = greedy(rollout, bench.prompts, 200)
    assert batch.input_ids.shape == (3, LENGTHS[1] + 3) and batch.logprobs.shape == (3, 3)


def test_public_names():
    assert set(deepspeed_hybrid.__all__) >= {
        "HybridEngineRollout",
        "HybridEngineRolloutConfig",
        "RolloutRequest",
        "SamplingConfig",
        "RolloutBatch",
        "build_rollout",
    }
    assert all(hasattr(deepspeed_hybrid, name) for name in deepspeed_hybrid.__all__)
