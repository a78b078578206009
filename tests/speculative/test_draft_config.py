# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft checkpoint's config.json in all its spellings, and what is refused by name."""

import json

import pytest
import torch
from models import tiny_model
from safetensors.torch import save_file
from speculative_cases import tiny_draft
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepspeed_hybrid.speculative.config import FULL, SLIDING, DraftConfig
from deepspeed_hybrid.speculative.weights import load_draft

PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    "num_target_layers": 32,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 248320,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "layer_types": [FULL] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def read(**changes) -> DraftConfig:
    raw = {**PUBLISHED, **changes}
    return DraftConfig.from_json({name: value for name, value in raw.items() if value is not ...})


def test_the_published_format():
    config = read()
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 248070, 32)
    assert config.target_layer_ids == (1, 8, 15, 22, 29)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (5, 32, 8, 128)
    assert config.layer_types == (FULL,) * 5 and config.causal == (False,) * 5
    assert config.rope.theta == 1e7
    config.check_target(2560, 32, 248320, 248320)


def test_null_is_as_good_as_nothing():
    nested = {"mask_token_id": 5, "target_layer_ids": None, "block_size": None, "causal": True}
    config = read(dflash_config=nested, target_layer_ids=[3, 1], block_size=8, is_causal=None, rms_norm_eps=None)
    assert (config.target_layer_ids, config.block_size, config.rms_norm_eps) == ((3, 1), 8, 1e-6)
    assert config.causal == (True,) * 5


def test_settings_that_have_a_default():
    assert read(rms_norm_eps=1e-5).rms_norm_eps == 1e-5 and read(rms_norm_eps=None).rms_norm_eps == 1e-6
    assert read(num_key_value_heads=None).num_kv_heads == 32
    assert read(head_dim=None).head_dim == 2560 // 32


def test_settings_on_top_or_nested():
    nested = {"mask_token_id": 5, "target_layer_ids": [3, 1], "block_size": 8, "num_target_layers": 12}
    config = read(dflash_config=nested, num_target_layers=...)
    assert (config.block_size, config.mask_token_id) == (8, 5)
    assert config.target_layer_ids == (3, 1) and config.num_target_layers == 12
    config = read(dflash_config=..., mask_token_id=6, target_layer_ids=[4])
    assert (config.mask_token_id, config.target_layer_ids) == (6, (4,))


@pytest.mark.parametrize(
    ("targets", "layers", "expected"),
    [(32, 5, (1, 8, 15, 22, 29)), (36, 5, (1, 9, 17, 25, 33)), (24, 1, (12,)), (28, 2, (1, 25))],
)
def test_target_layers_that_are_not_named(targets, layers, expected):
    config = read(
        dflash_config={"mask_token_id": 1},
        num_target_layers=targets,
        num_hidden_layers=layers,
        layer_types=...,
    )
    assert config.target_layer_ids == expected


# ---------------------------------------------------------------------------------------------------------------- rope


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e6},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_theta": 5e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": ..., "rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_theta": 5e6, "rope_scaling": {"type": "default"}},
        {"rope_theta": ..., "rope_parameters": {FULL: {"rope_theta": 5e6}, SLIDING: {"rope_theta": 5e6}}},
    ],
    ids=["top", "parameters", "parameters without theta", "scaling", "scaling without theta", "by layer type"],
)
def test_every_spelling_of_theta(spelling):
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](
        Qwen3Config(head_dim=128, rope_parameters={"rope_type": "linear", "factor": 1.0, "rope_theta": 5e6}), "cpu"
    )
    torch.testing.assert_close(read(**spelling).rope.inv_freq(), expected, atol=0, rtol=1e-6)


def test_theta_where_there_is_none():
    assert read(rope_theta=...).rope.theta == 10000.0


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope_is_transformers(name, kind):
    settings = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 4096}
    for more in ({}, {"truncate": False, "beta_fast": 24, "beta_slow": 1.5, "attention_factor": 0.75}):
        parameters = {**settings, **more, "rope_theta": 1e6}
        oracle = Qwen3Config(head_dim=128, max_position_embeddings=16384, rope_parameters=parameters)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](oracle, "cpu")
        spelled = {**settings, **more}
        if name == "rope_scaling":  # as it was called there
            spelled["type"] = spelled.pop("rope_type")
        rope = read(rope_theta=1e6, **{name: spelled}).rope
        torch.testing.assert_close(rope.inv_freq(), inv_freq, atol=0, rtol=1e-6)
        assert rope.scaling == pytest.approx(scaling)


# -------------------------------------------------------------------------------------------------- layers and windows


def test_layer_types_count_more_than_flags():
    """transformers' own class would drop the window, since use_sliding_window is False."""
    types = [SLIDING] * 4 + [FULL]
    config = read(layer_types=types, sliding_window=2048, use_sliding_window=False)
    assert config.layer_types == tuple(types) and config.sliding_window == 2048
    assert config.causal == (True,) * 4 + (False,)


def test_flags_where_there_are_no_layer_types():
    config = read(layer_types=..., sliding_window=64, use_sliding_window=True, max_window_layers=3)
    assert config.layer_types == (FULL,) * 3 + (SLIDING,) * 2
    config = read(layer_types=..., sliding_window=64, use_sliding_window=False)
    assert config.layer_types == (FULL,) * 5
    nested = {**PUBLISHED["dflash_config"], "use_swa": True, "swa_window_size": 32, "causal": False}
    config = read(layer_types=..., dflash_config=nested)
    assert config.layer_types == (SLIDING,) * 5 and config.sliding_window == 32 and config.causal == (False,) * 5


def test_who_says_what_is_causal():
    nested = {**PUBLISHED["dflash_config"], "causal": True}
    assert read(dflash_config=nested).causal == (True,) * 5
    assert read(dflash_config=nested, is_causal=False).causal == (False,) * 5
    sliding = dict(layer_types=[SLIDING] * 5, sliding_window=8)
    assert read(**sliding).causal == (True,) * 5
    assert read(**sliding, is_causal=False).causal == (False,) * 5


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "projector_type": "domino"}}, "projector_type"),
        ({"conv_kernel_size": 2}, "conv_kernel_size"),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "selector_rank": 16}}, "selector_rank"),
        ({"markov_rank": 64}, "markov_rank"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10]}}, "mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e6}}}, "layer type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
        ({"block_size": ...}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": ...}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 1]}}, "target_layer_ids"),
        ({"layer_types": [FULL] * 4}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types"),
        ({"layer_types": [SLIDING] * 5}, "sliding_window"),
        ({"num_key_value_heads": 5}, "num_attention_heads"),
        ({"hidden_size": ...}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        read(**changes)


@pytest.mark.parametrize(
    "name",
    [
        "conv_group_size",
        "selector_top_k",
        "top_k_selector",
        "confidence_head",
        "embed_scale",
        "attn_logit_softcapping",
        "projector_type",
    ],
)
def test_a_null_among_nested_settings_hides_nothing_on_top(name):
    nested = PUBLISHED["dflash_config"]
    null = {"dflash_config": {**nested, name: None}}
    for changes in ({name: 3}, {"dflash_config": {**nested, name: 3}}, {name: 3, **null}):
        with pytest.raises(ValueError, match=f"{name}=?.*3"):
            read(**changes)
    read(**{name: None})


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ((2048, 32, 248320, 248320), "hidden_size"),
        ((2560, 36, 248320, 248320), "num_target_layers"),
        ((2560, 32, 151936, 248320), "vocab_size"),
        ((2560, 32, 248320, 248000), "mask_token_id"),
    ],
)
def test_another_target_is_named(target, named):
    with pytest.raises(ValueError, match=named):
        read().check_target(*target)
    if named == "num_target_layers":
        with pytest.raises(ValueError, match="target_layer_ids"):
            read(num_target_layers=...).check_target(2560, 24, 248320, 248320)


# ------------------------------------------------------------------------------------------------------------- weights


def saved(folder, config, weights: dict) -> None:
    raw = {
        **PUBLISHED,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "layer_types": [FULL] * config.num_layers,
        "num_target_layers": None,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("spelling", ["plain", "prefixed", "encoder", "midlayer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_under_every_name(tmp_path, spelling, dtype):
    draft = tiny_draft(tiny_model(), num_layers=1).to(dtype)
    renamed = {
        "plain": lambda name: name,
        "prefixed": lambda name: f"model.{name}",
        "encoder": lambda name: name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."),
        "midlayer": lambda name: name.replace("layers.0.", "midlayer."),
    }[spelling]
    saved(tmp_path, draft.config, {renamed(name): weight for name, weight in draft.state_dict().items()})
    loaded = load_draft(tmp_path).state_dict()
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded[name], weight) and loaded[name].dtype == dtype


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop("layers.1.self_attn.q_norm.weight"), "lacks layers.1.self_attn.q_norm.weight"),
        (lambda weights: weights.update({"layers.2.mlp.up_proj.weight": torch.ones(1)}), "has layers.2.mlp"),
        (lambda weights: weights.update({"embed_tokens.weight": torch.ones(1)}), "embed_tokens.weight"),
        (lambda weights: weights.update({"model.d2t": torch.ones(1)}), "d2t"),
        (lambda weights: weights.update({"fc.weight": torch.ones(2, 2)}), "fc.weight"),
        (lambda weights: weights.update({"fc.weight": torch.ones(2, 2, dtype=torch.int8)}), "int8"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, named):
    draft = tiny_draft(tiny_model())
    weights = dict(draft.state_dict())
    change(weights)
    saved(tmp_path, draft.config, weights)
    with pytest.raises(ValueError, match=named):
        load_draft(tmp_path)


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        load_draft(tmp_path)
    draft = tiny_draft(tiny_model())
    saved(tmp_path, draft.config, draft.state_dict())
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        load_draft(tmp_path)
    (tmp_path / "mask_embedding.pt").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load_draft(tmp_path)
