# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Models and paths that cannot be served are refused by name when the rollout is made, and stay as they were."""

from types import SimpleNamespace

import pytest
import torch
from harness import assert_same_answers, greedy, prompt, rollout_of
from models import VOCAB, Tokenizer, engine_of, ragged_prompts, solo, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deepspeed_hybrid import HybridEngineRollout, HybridEngineRolloutConfig


def refusal(model, engine=None, error=ValueError, **options) -> str:
    """The message with which a rollout over ``model`` is refused; nothing is bound to it."""
    modes = [module.training for module in model.modules()]
    with pytest.raises(error) as caught:
        HybridEngineRollout(engine or engine_of(model), Tokenizer(), HybridEngineRolloutConfig(**options))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    return str(caught.value)


def test_kernelized_model():
    model = tiny_model("qwen3")
    model.__dict__["_use_kernels"] = True
    assert model.use_kernels
    assert "use_kernels=True" in refusal(model)


def test_meta_weights():
    model = tiny_model("qwen3")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"))
    assert "model.layers.1.mlp.up_proj.weight is on the meta device" in refusal(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights(dtype):
    model = tiny_model("qwen3")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    message = refusal(model)
    assert "model.layers.1.mlp.up_proj.weight" in message and str(dtype) in message and "fp32" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_weights_that_became_unfit_between_calls(dtype):
    """The refusal names them, and is none any more once they are as they were."""
    model, prompts = tiny_model("qwen3"), ragged_prompts([3, 7])
    rollout = rollout_of(model)
    expected = [solo(model, prompt(prompts, row), 3) for row in range(2)]
    assert_same_answers(greedy(rollout, prompts, 3), expected)
    parameter = model.model.layers[1].mlp.up_proj.weight
    kept = parameter.data
    parameter.data = kept.to(dtype)
    for call in (rollout.sync_segki_weights, lambda: greedy(rollout, prompts, 3)):
        with pytest.raises(ValueError) as caught:
            call()
        assert "model.layers.1.mlp.up_proj.weight" in str(caught.value) and str(dtype) in str(caught.value)
    parameter.data = kept
    assert_same_answers(greedy(rollout, prompts, 3), expected)


def test_a_model_that_moved_away():
    rollout = rollout_of(tiny_model("qwen3"))
    rollout._paths.device = torch.device("cuda", 3)  # where it is said to have been
    rollout._seen = None
    with pytest.raises(ValueError, match="model is on cpu and was on cuda:3"):
        greedy(rollout, ragged_prompts([3]), 3)


def test_partitioned_weights_without_a_step_count():
    model = tiny_model("qwen3")
    partitioned = SimpleNamespace(module=model, zero_optimization_stage=lambda: 3)
    message = refusal(model, partitioned)
    assert "ZeRO stage 3" in message and "global_steps" in message and "deepspeed.initialize()" in message
    assert rollout_of(model) is not None


def test_parameters_marked_as_partitioned():
    model = tiny_model("qwen3")
    model.lm_head.weight.ds_id = 0
    message = refusal(model)
    assert "ZeRO stage 3" in message and "global_steps" in message


def test_graph_capture_asked_for_without_cuda():
    message = refusal(tiny_model("qwen3"), error=RuntimeError, use_graph_capture=True)
    assert "use_graph_capture=True" in message and "no CUDA device" in message


def test_segments_asked_for_without_any():
    message = refusal(tiny_model("qwen3"), error=RuntimeError, use_segki=True, segki_kernel="fused_gdn")
    assert "use_segki=True" in message and "no segment can be injected" in message and "'fused_gdn'" in message


SMALL = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
PLAIN = dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256)
IDS = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    factor=8.0,
    original_max_position_embeddings=32,
)


def _qwen2_sliding():
    config = Qwen2Config(**SMALL, **PLAIN, **IDS, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return Qwen2ForCausalLM(config)


OTHER_MODELS = {
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SMALL, **PLAIN, **IDS, sliding_window=4)),
    "mistral, full": lambda: MistralForCausalLM(MistralConfig(**SMALL, **PLAIN, **IDS, sliding_window=None)),
    "qwen2, sliding layers": _qwen2_sliding,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, **IDS)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SMALL, **IDS, ffn_dim=64, word_embed_proj_dim=64)),
    "llama, longrope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **PLAIN, **IDS, rope_parameters=LONGROPE)),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_are_hugging_face_or_refused(name):
    """Lengths on both sides of the window and of the original rope length."""
    torch.manual_seed(0)
    model = OTHER_MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    prompts = ragged_prompts([3, 9, 40])
    try:
        rollout = rollout_of(model)
    except ValueError as refusal:
        assert type(model).__name__ in str(refusal) and "not supported" in str(refusal)
        return
    expected = [solo(model, prompt(prompts, row), 16) for row in range(3)]
    assert_same_answers(greedy(rollout, prompts, 16), expected, atol=1e-3)
