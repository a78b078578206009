# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Bad input is refused by name before anything changes, and the next good call is right."""

import math
from types import SimpleNamespace

import pytest
import torch
from harness import answers, assert_same_answers, greedy, prompt, rollout_of
from models import COMMON, VOCAB, Tokenizer, ragged_prompts, solo, tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig

LENGTHS, NEW_TOKENS = [3, 7], 6


@pytest.fixture(scope="module")
def bench():
    """A model in a mixed training mode, its rollout, a good request and the right answer to it."""
    model = tiny_model().train()
    model.get_submodule("model.layers.1").eval()
    prompts = ragged_prompts(LENGTHS)
    oracle = [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(LENGTHS))]
    modes = {name: module.training for name, module in model.named_modules()}
    return SimpleNamespace(model=model, rollout=rollout_of(model), prompts=prompts, oracle=oracle, modes=modes)


def assert_intact(bench) -> None:
    """Nothing is bound, no mode has changed, and a good call is right."""
    assert [name for name, module in bench.model.named_modules() if "forward" in module.__dict__] == []
    assert {name: module.training for name, module in bench.model.named_modules()} == bench.modes
    assert_same_answers(greedy(bench.rollout, bench.prompts, NEW_TOKENS), bench.oracle)


def assert_refused(bench, request: RolloutRequest, sampling, fragments: tuple[str, ...]) -> None:
    """ValueError with all of ``fragments`` in its message, from both entrances, and no trace left."""
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    for call in (bench.rollout.generate, bench.rollout.generate_iter):
        with pytest.raises(ValueError) as caught:
            call(request, sampling)
        assert [part for part in fragments if part not in str(caught.value)] == [], str(caught.value)
    assert torch.equal(torch.get_rng_state(), generator), "a refused call drew random numbers"
    assert_intact(bench)


# ----------------------------------------------------------------------------------------------------------- prompts


def with_mask(*rows: list[float], dtype: torch.dtype = torch.long) -> RolloutRequest:
    mask = torch.tensor(rows, dtype=dtype)
    return RolloutRequest(torch.full(mask.shape, 9), mask)


def with_ids(ids: torch.Tensor) -> RolloutRequest:
    return RolloutRequest(ids, torch.ones(ids.shape, dtype=torch.long))


BAD_REQUESTS = {
    "no rows": (with_ids(torch.zeros(0, 4).long()), ("prompt_ids", "(0, 4)", "at least one")),
    "no columns": (with_ids(torch.zeros(2, 0).long()), ("prompt_ids", "(2, 0)", "at least one")),
    "a row all padding": (with_mask([0, 1, 1], [0, 0, 0]), ("prompt_attention_mask", "row 1", "padding")),
    "holes": (with_mask([1, 1, 1], [1, 0, 1]), ("prompt_attention_mask", "row 1", "holes", "left-padded")),
    "holes after padding": (with_mask([0, 1, 0, 1]), ("prompt_attention_mask", "row 0", "holes")),
    "right padding": (with_mask([1, 1, 0]), ("prompt_attention_mask", "row 0", "right", "left-padded")),
    "padding on both sides": (with_mask([0, 1, 1, 0]), ("prompt_attention_mask", "row 0", "right")),
    "mask of twos": (with_mask([0, 2, 1]), ("prompt_attention_mask", "row 0", "2", "0 and 1")),
    "mask of minus ones": (with_mask([0, 1, -1]), ("prompt_attention_mask", "row 0", "-1", "0 and 1")),
    "mask of halves": (with_mask([0.0, 0.5, 1.0], dtype=torch.float), ("prompt_attention_mask", "0.5", "0 and 1")),
    "mask of nan": (with_mask([0.0, math.nan, 1.0], dtype=torch.float), ("prompt_attention_mask", "nan", "0 and 1")),
    "negative id": (with_ids(torch.tensor([[4, 5], [3, -7]])), ("prompt_ids", "row 1", "-7", f"[0, {VOCAB})")),
    "id of the vocabulary's size": (
        with_ids(torch.tensor([[VOCAB, 5]])),
        ("prompt_ids", "row 0", f"{VOCAB}", f"[0, {VOCAB})"),
    ),
    "huge id": (with_ids(torch.tensor([[1, 2**40]])), ("prompt_ids", "row 0", str(2**40), f"[0, {VOCAB})")),
    "float ids": (with_ids(torch.ones(1, 3)), ("prompt_ids", "float32", "integer")),
    "bool ids": (with_ids(torch.ones(1, 3).bool()), ("prompt_ids", "bool", "integer")),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_prompts(bench, name):
    request, fragments = BAD_REQUESTS[name]
    assert_refused(bench, request, SamplingConfig(max_new_tokens=3), fragments)


@pytest.mark.parametrize("filler", [-100, VOCAB, 2**40, 17])
def test_any_id_may_stand_on_padding(bench, filler):
    ids, mask = bench.prompts
    odd = ids.masked_fill(mask == 0, filler)

    batch = greedy(bench.rollout, (odd, mask), NEW_TOKENS)

    assert_same_answers(batch, bench.oracle)
    assert torch.equal(batch.input_ids[:, : odd.shape[1]], odd)


# ---------------------------------------------------------------------------------------------------------- sampling

BAD_SAMPLING = {
    "max_new_tokens": [0, -1, 2.0, True, None, 10**30],
    "temperature": [-0.5, math.nan, math.inf, -math.inf, "1", None, 1e300, 10**400],
    "top_p": [0.0, -0.1, 1.5, math.nan, None],
    "top_k": [2.5, None, "4"],
    "min_p": [-0.1, 1.5, math.nan],
    "repetition_penalty": [0.0, -1.3, math.nan, math.inf, 1e300, 1e-300, 10**400],
    "n_samples_per_prompt": [0, -2, 1.5, None, 10**30],
    "seed": [2**63, -(2**63) - 1, 1.5, "7"],
    "continuous_batch_size": [0, -3, 2.0, "all"],
    "logprobs_mode": ["none", None],
    "stop_token_ids": [[VOCAB], [-1], [3, 2.5], ["a"], [None], 5, "stop", torch.tensor([VOCAB])],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_SAMPLING.items() for value in values])
def test_bad_sampling(bench, name, value):
    sampling = SamplingConfig(**{"max_new_tokens": 3, name: value})
    assert_refused(bench, RolloutRequest(*bench.prompts), sampling, (name, repr(value)))


def test_more_rows_than_any_memory_can_address(bench):
    sampling = SamplingConfig(max_new_tokens=3, n_samples_per_prompt=2**31 - 1, continuous_batch_size=1)
    rollout = rollout_of(bench.model, continuous_cache_capacity=2**30)
    with pytest.raises(ValueError, match="n_samples_per_prompt=2147483647, max_new_tokens=3"):
        rollout.generate(RolloutRequest(*bench.prompts), sampling)
    assert_intact(bench)


@pytest.mark.parametrize("sampling", [None, {"max_new_tokens": 3}])
def test_sampling_of_another_type(bench, sampling):
    """Its options must not be replaced by defaults in silence."""
    assert_refused(bench, RolloutRequest(*bench.prompts), sampling, ("max_new_tokens",))


# ------------------------------------------------------------------------------------------------- generation_config

REFUSED_THERE = {
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [[5]],
    "sequence_bias": [[[5], 2.0]],
    "min_new_tokens": 4,
    "min_length": 9,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "forced_eos_token_id": 3,
    "forced_bos_token_id": 3,
    "exponential_decay_length_penalty": (2, 1.1),
    "guidance_scale": 1.5,
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "stop_strings": ["x"],
    "max_time": 1.0,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "top_h": 0.5,
}


@pytest.fixture
def generation_config(bench):
    """The model's, with its fields as they were at the end."""
    config = bench.model.generation_config
    before = dict(vars(config))
    yield config
    vars(config).clear()
    vars(config).update(before)


@pytest.mark.parametrize("name", REFUSED_THERE)
def test_processors_in_generation_config_are_refused_by_name(bench, generation_config, name):
    setattr(generation_config, name, REFUSED_THERE[name])
    request, sampling = RolloutRequest(*bench.prompts), SamplingConfig(max_new_tokens=3)

    with pytest.raises(ValueError) as caught:
        bench.rollout.generate(request, sampling)

    assert f"generation_config.{name}={REFUSED_THERE[name]!r}" in str(caught.value)
    setattr(generation_config, name, None)
    assert_intact(bench)


@pytest.mark.parametrize("penalty", [-1.3, 0.0, math.nan])
def test_bad_repetition_penalty_in_generation_config(bench, generation_config, penalty):
    generation_config.repetition_penalty = penalty
    with pytest.raises(ValueError, match="repetition_penalty"):
        greedy(bench.rollout, bench.prompts, 3)
    generation_config.repetition_penalty = None
    assert_intact(bench)


def test_sampling_defaults_in_generation_config_do_not_overrule(bench, generation_config):
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.0, seed=3, n_samples_per_prompt=4)
    plain = bench.rollout.generate(RolloutRequest(*bench.prompts), sampling)
    for name, value in dict(do_sample=False, temperature=0.01, top_k=1, top_p=0.01, min_p=0.9).items():
        setattr(generation_config, name, value)

    again = bench.rollout.generate(RolloutRequest(*bench.prompts), sampling)

    assert torch.equal(again.input_ids, plain.input_ids)
    assert torch.equal(again.logprobs, plain.logprobs)


@pytest.mark.parametrize(
    "name, neutral",
    [
        ("no_repeat_ngram_size", 0),
        ("num_beams", 1),
        ("min_length", 0),
        ("guidance_scale", 1.0),
        ("diversity_penalty", 0.0),
        ("typical_p", 1.0),
    ],
)
def test_neutral_fields_of_generation_config_are_accepted(bench, generation_config, name, neutral):
    setattr(generation_config, name, neutral)
    assert_intact(bench)


# --------------------------------------------------------------------------------------------------------- positions


@pytest.fixture(scope="module")
def short_model():
    torch.manual_seed(0)
    config = Qwen2Config(**{**COMMON, "max_position_embeddings": 24}, num_hidden_layers=1)
    return Qwen2ForCausalLM(config).eval()


def test_prompt_and_answer_beyond_the_positions(short_model):
    rollout = rollout_of(short_model)
    prompts = ragged_prompts([3, 20])

    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"prompt_ids.*20.*max_new_tokens=5.*25.*24"):
        greedy(rollout, prompts, 5)
    assert torch.equal(torch.get_rng_state(), generator), "a refused call drew random numbers"

    assert_same_answers(greedy(rollout, prompts, 4), [solo(short_model, prompt(prompts, row), 4) for row in range(2)])


def test_padding_takes_no_position(short_model):
    prompts = ragged_prompts([3, 20], width=60)
    batch = greedy(rollout_of(short_model), prompts, 4)
    assert_same_answers(batch, [solo(short_model, prompt(prompts, row), 4) for row in range(2)])


@pytest.mark.parametrize("capacity", [1, 12])
def test_a_cache_capacity_that_is_too_small(bench, capacity):
    rollout = rollout_of(bench.model, continuous_cache_capacity=capacity)
    with pytest.raises(ValueError, match=rf"continuous_cache_capacity={capacity}\b.*13"):
        greedy(rollout, bench.prompts, NEW_TOKENS, continuous_batch_size=2)
    assert_intact(bench)


# ---------------------------------------------------------------------------------------------------- the tokenizer


@pytest.mark.parametrize("eos", [None, []])
def test_a_tokenizer_without_pad_and_eos(bench, eos):
    rollout = rollout_of(bench.model, Tokenizer(pad=None, eos=eos))
    with pytest.raises(ValueError, match="tokenizer.*pad_token_id.*eos_token_id"):
        greedy(rollout, bench.prompts, 3)
    assert_intact(bench)


# --------------------------------------------------------------------------------------------------------- the engine


def test_another_model_in_the_engine_is_refused():
    engine = SimpleNamespace(module=tiny_model("qwen2_5"))
    rollout = HybridEngineRollout(engine, Tokenizer())
    kept, engine.module = engine.module, tiny_model("qwen2_5")
    prompts = ragged_prompts([3, 2])
    with pytest.raises(RuntimeError, match="engine.module is another model"):
        greedy(rollout, prompts, 3)
    engine.module = kept
    assert answers(greedy(rollout, prompts, 3))


def test_rows_of_a_padded_embedding_are_ids():
    """A sampled id of the padding must be fit to be read in the next turn."""
    model = tiny_model("qwen2_5")
    model.config.vocab_size -= 8
    ids = torch.tensor([[3, VOCAB - 1]])
    request = RolloutRequest(ids, torch.ones_like(ids))
    batch = rollout_of(model).generate(request, SamplingConfig(max_new_tokens=2, temperature=0.0))
    expected = solo(model, ids[0], 2)
    assert batch.input_ids[0, 2:].tolist() == expected.tokens.tolist()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        rollout_of(model).generate(RolloutRequest(ids + 1, request.prompt_attention_mask), SamplingConfig(2))


# ------------------------------------------------------------------------------------------- failures while running


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("forwards", [1, 2, 4])
def test_a_call_cut_short_leaves_no_trace(bench, error, forwards):
    seen = []

    def fail(module, args):
        seen.append(module)
        if len(seen) == forwards:
            raise error("cut")

    hook = bench.model.get_submodule("model.layers.2").register_forward_pre_hook(fail)
    try:
        with pytest.raises(error, match="cut"):
            greedy(bench.rollout, bench.prompts, NEW_TOKENS)
    finally:
        hook.remove()
    assert len(seen) == forwards
    assert_intact(bench)


def test_generate_after_shutdown():
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    greedy(rollout, ragged_prompts([3]), 2)
    rollout.shutdown()
    for call in (rollout.generate, rollout.generate_iter):
        with pytest.raises(RuntimeError, match="shutdown"):
            call(RolloutRequest(*ragged_prompts([3])), SamplingConfig(max_new_tokens=2))


@pytest.mark.parametrize("stage", [1, 3])
def test_sync_after_shutdown_takes_no_memory(make_engine, stage):
    """Under ZeRO-3 it would gather every weight, for nobody."""
    rollout = HybridEngineRollout(make_engine(tiny_model("qwen3").train(), stage=stage), Tokenizer())
    greedy(rollout, ragged_prompts([3]), 2)
    rollout.shutdown()
    for sync in (rollout.sync_segki_weights, lambda: rollout.sync_weights(1)):
        with pytest.raises(RuntimeError, match="a sync was asked for after shutdown"):
            sync()
    assert rollout.memory_report()["packed_weights"] == 0
