# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""MTP heads from checkpoints, wherever their tensors lie in them; and what is refused, by name."""

import json

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from mtp_cases import mtp_rollout, taught_mtp, tiny_mtp
from safetensors.torch import save_file
from speculative_cases import figures, tiny_draft

from deepspeed_hybrid.speculative.mtp_config import MtpConfig
from deepspeed_hybrid.speculative.mtp_weights import has_mtp, load_mtp, save_mtp


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def published(target, folder, prefix: str = "", change=lambda weights: None, shards: int = 1, **settings):
    """A checkpoint as they are published: the model's own tensors, and its head's in another of the files."""
    draft = tiny_mtp(target)
    weights = {f"{prefix}mtp.{name}": weight.clone() for name, weight in draft.state_dict().items()}
    change(weights)
    weights["model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    names = sorted(weights)
    for shard in range(shards):
        save_file({name: weights[name] for name in names[shard::shards]}, folder / f"model-{shard}.safetensors")
    config = {**target.config.to_dict(), "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return draft


def assert_same_head(one, other) -> None:
    assert one.config == other.config
    mine, theirs = one.state_dict(), other.state_dict()
    assert {name: weight.dtype for name, weight in mine.items()} == {name: theirs[name].dtype for name in theirs}
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_wherever_the_tensors_are(target, tmp_path, prefix, shards):
    draft = published(target, tmp_path, prefix, shards=shards)
    assert has_mtp(tmp_path)
    assert_same_head(load_mtp(tmp_path), draft)
    if shards == 1:  # a file alone has the shape of the model that it is for
        assert_same_head(load_mtp(str(tmp_path / "model-0.safetensors"), target.config.to_dict()), draft)


def test_of_a_model_that_reads_images(tmp_path):
    target = tiny_model("qwen3_5_conditional")
    draft = published(target, tmp_path, "model.language_model.")
    assert_same_head(load_mtp(tmp_path), draft)
    rollout = rollout_of(target, speculative="mtp", draft_model=str(tmp_path / "model-0.safetensors"))
    assert_same_head(rollout._speculation.drafter.source, draft)


def test_a_folder_serves(target, tmp_path):
    prompts = ragged_prompts([5, 2])
    save_mtp(taught_mtp(target, prompts, 12), tmp_path)
    rollout = mtp_rollout(target, str(tmp_path))
    assert torch.equal(greedy(rollout, prompts, 12).input_ids, greedy(rollout_of(target), prompts, 12).input_ids)
    assert figures(rollout)["tokens_per_step"] > 3 and set(figures(rollout)["steps"]) == {4}
    assert "MTP head, up to 3 passes" in rollout.describe()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_what_was_saved_is_read(target, tmp_path, dtype):
    draft = tiny_mtp(target, attention_bias=True, rms_norm_eps=1e-5)
    assert draft.layers[0].self_attn.q_proj.bias is not None
    save_mtp(draft, tmp_path / "new", dtype)
    assert_same_head(load_mtp(tmp_path / "new"), draft.to(dtype or torch.float32))


def test_weights_of_several_dtypes(target, tmp_path):
    """Are read as the widest."""

    def halve(weights) -> None:
        weights["mtp.fc.weight"] = weights["mtp.fc.weight"].bfloat16()

    published(target, tmp_path, change=halve)
    assert {weight.dtype for weight in load_mtp(tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(mtp_num_hidden_layers=2), "sets mtp_num_hidden_layers=2, which is not supported; 1 is"),
        (dict(mtp_num_hidden_layers=0), "sets mtp_num_hidden_layers=0"),
        (dict(mtp_use_dedicated_embeddings=True), "sets mtp_use_dedicated_embeddings=True"),
        (dict(hidden_act="gelu"), "sets hidden_act='gelu'"),
        (dict(attn_output_gate=False), "sets attn_output_gate=False"),
        (dict(model_type="qwen3_5_moe_text"), "model_type 'qwen3_5_moe_text', whose MTP head is not supported"),
        (dict(head_dim=None), "must have head_dim"),
        (dict(num_key_value_heads=3), "num_attention_heads must be a multiple of kv heads; got 4"),
        (dict(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'"),
        (dict(rope_parameters={"partial_rotary_factor": 0.1}), "partial_rotary_factor must be an even number"),
        (dict(intermediate_size=64), r"mtp.layers.0.mlp.\w+.weight must have shape .*64.* got .*256"),
    ],
    ids=str,
)
def test_configurations_of_other_heads(target, tmp_path, settings, named):
    published(target, tmp_path, **settings)
    with pytest.raises(ValueError, match=named):
        load_mtp(tmp_path)


def remove(weights) -> None:
    del weights["mtp.layers.0.self_attn.q_norm.weight"]


def change(name: str, weight: torch.Tensor):
    return lambda weights: weights.update({f"mtp.{name}": weight})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (remove, "lacks mtp.layers.0.self_attn.q_norm.weight"),
        (change("layers.1.mlp.up_proj.weight", torch.zeros(2)), ": it has mtp.layers.1.mlp.up_proj.weight"),
        (change("layers.0.mlp.experts.0.up_proj.weight", torch.zeros(2)), "has mtp.layers.0.mlp.experts.0"),
        (change("embed_tokens.weight", torch.zeros(2)), "has mtp.embed_tokens.weight"),
        (change("fc.weight", torch.zeros(128, 128)), r"mtp.fc.weight must have shape \(128, 256\) .* \(128, 128\)"),
        (change("fc.weight", torch.zeros(128, 256, dtype=torch.int8)), "mtp.fc.weight are torch.int8"),
        (lambda weights: weights.update({"model.mtp.fc.weight": torch.zeros(2)}), "weights fc.weight twice; .*mtp.fc"),
        (lambda weights: weights.clear(), "has no MTP head: no tensor's name begins with mtp., model.mtp., "),
    ],
    ids=["missing", "second layer", "experts", "vocabulary", "shape", "dtype", "twice", "none"],
)
def test_weights_of_other_heads(target, tmp_path, changed, named):
    published(target, tmp_path, change=changed)
    with pytest.raises(ValueError, match=named):
        load_mtp(tmp_path)


@pytest.mark.parametrize(
    ("draft", "options", "named"),
    [
        (
            lambda target: "/nowhere",
            {},
            "draft_model must be a folder, a .safetensors file or an MtpDraft.*'/nowhere'",
        ),
        (tiny_draft, {}, "draft_model must be a folder, a file or an MtpDraft; got DFlashDraft"),
        (lambda target: tiny_mtp(target, hidden_size=64), {}, "its hidden_size is 64, the model has 128"),
        (tiny_mtp, dict(draft_block_size=17), "draft_block_size must be at most 16 with speculative='mtp'; got 17"),
    ],
    ids=["nowhere", "another kind", "another model", "too long"],
)
def test_what_a_rollout_refuses(target, draft, options, named):
    with pytest.raises(ValueError, match=named):
        rollout_of(target, speculative="mtp", draft_model=draft(target), **options)


def test_a_folder_without_files(target, tmp_path):
    with pytest.raises(ValueError, match="must be a folder with a config.json, or an MtpDraft"):
        load_mtp(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(target.config.to_dict()))
    with pytest.raises(ValueError, match="has no .safetensors file"):
        load_mtp(tmp_path)
    assert not has_mtp(tmp_path)


def test_a_file_for_a_model_of_another_family(target, tmp_path):
    published(target, tmp_path)
    with pytest.raises(ValueError, match="the model has model_type 'llama', whose MTP head is not supported"):
        rollout_of(tiny_model("llama"), speculative="mtp", draft_model=tmp_path / "model-0.safetensors")


def test_settings_that_are_elsewhere_or_left_out(target):
    raw = {**target.config.to_dict(), "rms_norm_eps": 1e-6}
    config = MtpConfig.from_json(raw)
    assert MtpConfig.from_json({"model_type": "qwen3_5", "hidden_size": 1, "text_config": raw}) == config
    assert MtpConfig.from_json({**raw, "rms_norm_eps": None}) == config
    assert MtpConfig.from_json({**raw, "num_key_value_heads": None}).num_kv_heads == config.num_heads
    rope = {"rope_type": "yarn", "factor": 4.0}
    older = {**raw, "rope_parameters": None, "partial_rotary_factor": 0.5, "rope_theta": 7e6, "rope_scaling": rope}
    found = MtpConfig.from_json({**older, "max_position_embeddings": 512}).rope
    assert (found.head_dim, found.theta, found.kind, found.original_positions) == (16, 7e6, "yarn", 512)


def test_ropes_of_long_contexts_and_without_a_share(target):
    raw = target.config.to_dict()
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 4096}
    assert MtpConfig.from_json({**raw, "rope_parameters": yarn}).rope.head_dim == 8  # a quarter of 32
    assert MtpConfig.from_json({**raw, "rope_parameters": yarn}).rope.kind == "yarn"
    whole = MtpConfig.from_json({**raw, "rope_parameters": {**yarn, "partial_rotary_factor": 1.0}})
    assert whole.rope.head_dim == 32 and MtpConfig.from_json(whole.to_json()) == whole
