# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Draft checkpoints that are not what they should be: each is refused by the name of what is wrong."""

import json
import shutil

import pytest
from models import tiny_model
from mtp_cases import tiny_mtp
from safetensors.torch import load_file, save_file
from speculative_cases import tiny_draft

from deepspeed_hybrid.speculative.mtp_weights import load_mtp, save_mtp
from deepspeed_hybrid.speculative.weights import load_draft, save_draft

LOADERS = {"dflash": load_draft, "mtp": load_mtp}
GOOD_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
YARN = {**GOOD_YARN, "original_max_position_embeddings": "4k"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    target, folder = tiny_model(), tmp_path_factory.mktemp("drafts")
    save_draft(tiny_draft(target), folder / "dflash")
    save_mtp(tiny_mtp(target), folder / "mtp")
    return folder


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\n", None])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_file_that_is_no_safetensors_file(saved, tmp_path, kind, content):
    shutil.copytree(saved / kind, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match="draft_model's model.safetensors is no whole .safetensors file: "):
        LOADERS[kind](tmp_path)


@pytest.mark.parametrize("config", ["", "{", "[]", "null"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_config_that_is_none(saved, tmp_path, kind, config):
    shutil.copytree(saved / kind, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="draft_model's config.json (is no JSON|must be a JSON object)"):
        LOADERS[kind](tmp_path)


def test_weights_that_are_there_twice(saved, tmp_path):
    shutil.copytree(saved / "dflash", tmp_path, dirs_exist_ok=True)
    save_file({"model.fc.weight": load_file(tmp_path / "model.safetensors")["fc.weight"]}, tmp_path / "z.safetensors")
    with pytest.raises(ValueError, match="has weights fc.weight twice; the second are model.fc.weight in z.safetens"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("dflash", dict(layer_types=1), "layer_types must be a list; got 1"),
        ("dflash", dict(architectures=True), "architectures must be a list; got True"),
        ("dflash", dict(dflash_config=[1]), r"dflash_config must be an object; got \[1\]"),
        ("dflash", dict(dflash_config={"target_layer_ids": 3, "mask_token_id": 1}), "target_layer_ids must be a list"),
        ("dflash", dict(num_hidden_layers="2", layer_types=None), "num_hidden_layers must be an integer .*; got '2'"),
        ("dflash", dict(num_attention_heads=0, head_dim=None), "num_attention_heads must be an integer .*; got 0"),
        ("dflash", dict(is_causal="no"), "is_causal must be true or false; got 'no'"),
        ("mtp", dict(head_dim="32"), "head_dim must be an integer .*; got '32'"),
        ("mtp", dict(text_config=[1]), r"text_config must be an object; got \[1\]"),
        ("mtp", dict(rope_parameters={"partial_rotary_factor": "x"}), "partial_rotary_factor must be a number above"),
        *(
            (kind, settings, named)
            for kind in LOADERS
            for settings, named in (
                (dict(rms_norm_eps="1e-6"), "rms_norm_eps must be a number above 0; got '1e-6'"),
                (dict(rms_norm_eps=-1), "rms_norm_eps must be a number above 0; got -1"),
                (dict(attention_bias="no"), "attention_bias must be true or false; got 'no'"),
                (dict(rope_parameters=[1]), r"rope_parameters must be an object; got \[1\]"),
                (dict(rope_parameters={"rope_theta": -1}), "rope_theta must be a number above 1; got -1"),
                (dict(rope_parameters={"rope_type": "linear", "factor": 0}), "rope factor must be a number above 0"),
                (dict(rope_parameters={**GOOD_YARN, "beta_fast": "x"}), "rope beta_fast must be a number above 0"),
                (dict(rope_parameters={**GOOD_YARN, "beta_slow": -1}), "rope beta_slow must be a number above 0"),
                (dict(rope_parameters={**GOOD_YARN, "attention_factor": "1"}), "rope attention_factor must be a"),
                (dict(rope_parameters={**GOOD_YARN, "truncate": "no"}), "rope truncate must be true or false"),
                (dict(rope_parameters=YARN), "original_max_position_embeddings must be an integer .*; got '4k'"),
            )
        ),
    ],
    ids=str,
)
def test_settings_of_another_kind(saved, tmp_path, kind, settings, named):
    shutil.copytree(saved / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(ValueError, match=f"the draft's {named}"):
        LOADERS[kind](tmp_path)
