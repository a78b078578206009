# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reported faults a user meets at the interface: crashes, ignored settings, holes in masks, memory."""

import contextlib

import pytest
import torch
from harness import answers, assert_same_answers, force_tokens, greedy, prompt, record_logits, rollout_of
from models import COMMON, MROPE, VOCAB, Tokenizer, engine_of, ragged_prompts, solo, tiny_model
from recorded_graph import capture_steps, recording_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig

pytestmark = pytest.mark.core

PROMPTS = [3, 7, 5]
PATHS = ["eager", "captured", "continuous"]


@pytest.fixture(params=PATHS)
def run(request):
    """rollout, prompts, steps, options -> greedy answers, on each of the paths that DeepSpeed 0.19.8 keeps apart."""
    with recording_accelerator() if request.param == "captured" else contextlib.nullcontext():

        def call(rollout, prompts, new_tokens, **options):
            if request.param == "captured" and rollout._graphs is None:
                capture_steps(rollout)
            if request.param == "continuous":
                options["continuous_batch_size"] = 2
            return greedy(rollout, prompts, new_tokens, **options)

        yield call


# ----------------------------------------------------------------------------------------------- models not for us


def learned_positions(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **sizes)).eval()
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
            **sizes,
        )
    ).eval()


def sliding_window(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=8)).eval()


@pytest.mark.parametrize(
    "build, kind", [(learned_positions, "gpt2"), (learned_positions, "opt"), (sliding_window, "mistral")]
)
def test_padded_batch_on_other_positions_is_right_or_refused(build, kind):
    """deepspeedai/DeepSpeed#1797: learned positions; the same for windows."""
    model = build(kind)
    prompts = ragged_prompts([3, 17])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        batch = greedy(rollout_of(model), prompts, 20)
    except ValueError as refusal:
        assert "not supported" in str(refusal)
        assert ("sliding" if kind == "mistral" else "positions") in str(refusal)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any("forward" in module.__dict__ for module in model.modules())
    else:
        assert_same_answers(batch, [solo(model, prompt(prompts, row), 20) for row in range(2)])


# --------------------------------------------------------------------------------------------------------- profile


@pytest.mark.parametrize("slots", [None, 1, 2, 8])
def test_profile_is_filled_on_every_path(slots):
    """deepspeedai/DeepSpeed#8459"""
    model = tiny_model()
    prompts = ragged_prompts(PROMPTS)
    options = dict(n_samples_per_prompt=2, continuous_batch_size=slots)
    plain, profiled = rollout_of(model), rollout_of(model, enable_profiling=True)

    expected, batch = greedy(plain, prompts, 9, **options), greedy(profiled, prompts, 9, **options)

    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.logprobs, expected.logprobs)
    assert plain.get_last_profile() is None
    profile = profiled.get_last_profile()
    assert profile["num_generated_tokens"] == 3 * 2 * 9
    assert (profile["batch_size"], profile["num_samples_per_prompt"]) == (3, 2)
    assert (profile["prompt_length"], profile["response_length"]) == (7, 9)
    waves = -(-6 // (slots or 6))
    assert profile["num_decode_forwards"] == 8 * waves
    assert profile["prefill_forward_ms"] > 0 and profile["decode_forward_ms"] > 0
    assert profile["total_ms"] >= profile["generation_ms"] >= profile["decode_forward_ms"]
    assert profile["tokens_per_second"] == pytest.approx(54 / profile["total_ms"] * 1000)
    stats = profiled.get_last_continuous_stats()
    if slots is None:
        assert stats is None and "continuous_batch_size" not in profile
    else:
        assert profile["continuous_batch_size"] == slots
        assert (stats["decode_steps"], stats["peak_cache_length"]) == (8 * waves, 16)
        assert 0 < stats["occupancy"] <= 1


# ------------------------------------------------------------------------------------------------- degenerate decay


@pytest.mark.parametrize("heads", ["all", "one", "none forgets"])
def test_decay_that_underflows_stays_finite(heads):
    """huggingface/transformers#47842: A_log = -inf means A = 0, a head that never forgets."""
    model = tiny_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter[slice(None) if heads == "all" else 1] = float("-inf") if heads != "none forgets" else -100.0
    prompts = ragged_prompts(PROMPTS)

    batch = greedy(rollout_of(model), prompts, 20)

    assert bool(batch.logprobs.isfinite().all())
    assert_same_answers(batch, [solo(model, prompt(prompts, row), 20) for row in range(3)], atol=1e-4)


def test_model_initialised_in_bf16_generates_or_is_refused():
    """The same report at its own size: 64 heads x 48 layers drawn in bf16."""
    torch.manual_seed(0)
    sizes = {**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 48}
    config = Qwen3_5TextConfig(
        **sizes,
        linear_num_key_heads=8,
        linear_num_value_heads=64,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention"] * 47 + ["full_attention"],
        rope_parameters=dict(MROPE),
        dtype="bfloat16",
    )
    model = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    rates = torch.cat([parameter.float() for name, parameter in model.named_parameters() if name.endswith("A_log")])
    assert rates.numel() == 64 * 47
    with torch.no_grad():
        model.model.layers[3].linear_attn.A_log[5] = float("-inf")  # whatever this version's drawing gave
    try:
        rollout = rollout_of(model)
        seen = record_logits(rollout)
        batch = greedy(rollout, ragged_prompts(PROMPTS), 6)
    except ValueError as refusal:
        assert "A_log" in str(refusal)
    else:
        assert all(bool(logits.isfinite().all()) for logits in seen)
        assert bool(batch.logprobs.isfinite().all())


# ------------------------------------------------------------------------------------------- paths of DeepSpeed 0.19.8


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3"])
def test_every_path_runs(run, family):
    """DeepSpeed 0.19.8 raises AttributeError on its graph and continuous paths."""
    model = tiny_model(family)
    prompts = ragged_prompts(PROMPTS)
    expected = [solo(model, prompt(prompts, row), 12) for row in range(3)]
    assert_same_answers(run(rollout_of(model), prompts, 12), expected)


@pytest.mark.parametrize(
    "where",
    ["generation_config list", "tokenizer list", "one each", "other way round", "sampling", "sampling and both"],
)
def test_first_of_several_stop_ids_ends_a_row(run, where):
    """DeepSpeed 0.19.8 ignores a second EOS in generation_config, and a list in the tokenizer on its graph path."""
    model = tiny_model()
    tokenizer, extra = Tokenizer(), None
    if where in ("generation_config list", "sampling and both"):
        model.generation_config.eos_token_id = [17, 255]
    if where in ("tokenizer list", "sampling and both"):
        tokenizer.eos_token_id = [17, 255]
    if where == "one each":
        tokenizer.eos_token_id, model.generation_config.eos_token_id = 17, 255
    if where == "other way round":
        tokenizer.eos_token_id, model.generation_config.eos_token_id = 255, [17]
    if where in ("sampling", "sampling and both"):
        extra = [17, 255]
    script = torch.randint(18, 255, (3, 12), generator=torch.Generator().manual_seed(3))
    script[0, 6], script[0, 8] = 255, 17
    script[1, 2], script[1, 3] = 17, 255
    script[2, 11] = 255
    rollout = HybridEngineRollout(engine_of(model), tokenizer)
    force_tokens(rollout, script)

    batch = run(rollout, ragged_prompts(PROMPTS), 12, stop_token_ids=extra)

    assert batch.response_lengths.tolist() == [7, 3, 12]
    assert batch.finish_reasons == ["stop"] * 3, "a stop id on the last allowed token is a stop"
    assert [row.tolist() for row in answers(batch)] == [
        script[0, :7].tolist(),
        script[1, :3].tolist(),
        script[2].tolist(),
    ]


@pytest.mark.parametrize("places", [(0,), (3,), (11,), (0, 1, 5, 11)], ids=str)
def test_pad_id_that_was_sampled_is_a_token(run, places):
    """DeepSpeed 0.19.8 leaves a hole in attention_mask there."""
    model = tiny_model()
    prompts = ragged_prompts(PROMPTS)
    script = torch.randint(1, 254, (3, 12), generator=torch.Generator().manual_seed(3))
    script[1, list(places)] = 0
    script[2, 4] = 254
    rollout = rollout_of(model)
    force_tokens(rollout, script)

    batch = run(rollout, prompts, 12, stop_token_ids=[254])

    assert batch.response_lengths.tolist() == [12, 12, 5]
    assert batch.input_ids[1, 7:].tolist() == script[1].tolist()
    assert torch.equal(batch.attention_mask[:, :7], prompts[1])
    assert batch.attention_mask[:, 7:].tolist() == [[1] * 12, [1] * 12, [1] * 5 + [0] * 7]
    assert batch.input_ids[2, 12:].tolist() == [0] * 7
    assert bool((batch.logprobs[1] < 0).all()), "a pad token has a logprob as any other"
    with torch.no_grad():
        fed = torch.cat([prompt(prompts, 1), script[1, :-1]])
        expected = model(input_ids=fed[None]).logits[0, 6:].log_softmax(-1).gather(1, script[1][:, None])[:, 0]
    torch.testing.assert_close(batch.logprobs[1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("penalty", [1.3, 0.8, 2.0])
@pytest.mark.parametrize("source", ["generation_config", "sampling", "sampling over generation_config"])
def test_repetition_penalty_is_hugging_faces(run, penalty, source):
    """DeepSpeed 0.19.8's graph path ignores it. The oracle is generate() on each prompt without padding."""
    model = tiny_model("qwen3")  # its answers repeat themselves, so that the penalty shows
    prompts = ragged_prompts(PROMPTS)
    options = {} if source == "generation_config" else dict(repetition_penalty=penalty)
    model.generation_config.repetition_penalty = {"generation_config": penalty, "sampling": 1.0}.get(source, 5.0)
    batch = run(rollout_of(model), prompts, 30, **options)

    without = greedy(rollout_of(model), prompts, 30, repetition_penalty=1.0)
    model.generation_config.repetition_penalty = 1.0
    for row, tokens in enumerate(answers(batch)):
        alone = prompt(prompts, row)
        output = model.generate(
            input_ids=alone[None],
            attention_mask=torch.ones_like(alone)[None],
            do_sample=False,
            max_new_tokens=30,
            repetition_penalty=penalty,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert tokens.tolist() == output.sequences[0, len(alone) :].tolist()
        scores = torch.cat(output.scores).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(batch.logprobs[row], scores, atol=1e-4, rtol=0)
    assert not torch.equal(batch.input_ids, without.input_ids)


# ---------------------------------------------------------------------------------------------------------- memory


class LargestOutput(TorchDispatchMode):
    """The most elements of any tensor that an operator makes; views make none."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in function._schema.returns):
            sizes = [leaf.numel() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            self.largest = max([self.largest, *sizes])
        return outputs


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("lengths", [[256] * 4, [256, 3, 100, 1], [16] * 4], ids=["long", "ragged", "short"])
def test_prefill_makes_last_position_logits_only(kind, lengths):
    """DeepSpeed 0.19.8 makes [B, T, vocabulary] logits: here nothing is larger than [B, vocabulary]."""
    torch.manual_seed(0)
    vocabulary = 150_000  # B of these are more than the widest layer makes of all tokens
    options = {**COMMON, "vocab_size": vocabulary, "num_hidden_layers": 2, "layer_types": [kind] * 2}
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **options,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            rope_parameters=dict(MROPE),
        )
    ).eval()
    rollout = rollout_of(model)
    kept = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: kept.append(kwargs["logits_to_keep"]), with_kwargs=True
    )
    with LargestOutput() as watch:
        rollout.generate(RolloutRequest(*ragged_prompts(lengths)), SamplingConfig(max_new_tokens=2, temperature=0.0))
    handle.remove()
    assert kept == [1, 1]
    assert watch.largest == 4 * vocabulary
