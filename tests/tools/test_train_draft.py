# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""train-draft: from a saved model and a file to a checkpoint that a rollout takes, in the published format."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import greedy, rollout_of
from models import VOCAB, ragged_prompts, tiny_model
from safetensors.torch import load_file
from speculative_cases import draft_config, figures, tiny_draft

from deepspeed_hybrid.cli import main
from deepspeed_hybrid.speculative.config import FULL, SLIDING, DraftConfig
from deepspeed_hybrid.speculative.mtp_weights import load_mtp
from deepspeed_hybrid.speculative.rope import RopeSettings
from deepspeed_hybrid.speculative.weights import load_draft, save_draft
from deepspeed_hybrid.tools import train_draft
from deepspeed_hybrid.tools.train_draft import spread_layers

WORDS = VOCAB - 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model's folder. What stands in for its tokenizer reads numbers."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model()
    model.save_pretrained(folder)

    class Numbers:
        pad_token_id, eos_token_id = None, None

        def __len__(self) -> int:
            return WORDS

        def __call__(self, text: str, **options) -> dict:
            return {"input_ids": [int(word) % WORDS for word in text.split()]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_draft, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda name: Numbers()))
        yield folder


@pytest.mark.parametrize("data", ["--prompts", "--text"])
def test_the_checkpoint_serves_the_model(saved, tmp_path, capsys, data):
    file, out = tmp_path / "data.txt", tmp_path / "draft"
    file.write_text("5 6 7\n\n8 9\n" if data == "--prompts" else " ".join(str(3 * index) for index in range(50)))
    sizes = ["--steps", "3", "--rows", "3", "--tokens", "12", "--layers", "2", "--block", "4", "--anchors", "4"]
    assert main(["train-draft", "--model", str(saved), data, str(file), "--out", str(out), *sizes]) == 0
    assert f"draft_model={str(out)!r}" in capsys.readouterr().out
    raw = json.loads((out / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["dflash_config"]["mask_token_id"] == WORDS
    names = set(load_file(out / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert len(names) == 3 + 2 * 11

    target, prompts = tiny_model(), ragged_prompts([5, 2])
    rollout = rollout_of(target, speculative="dflash", draft_model=str(out), enable_profiling=True)
    assert torch.equal(greedy(rollout, prompts, 10).input_ids, greedy(rollout_of(target), prompts, 10).input_ids)
    assert set(figures(rollout)["steps"]) == {4}


def test_it_learns_a_text(saved, tmp_path, capsys):
    """The same twelve tokens for ever: it has them by heart."""
    file, out = tmp_path / "text.txt", tmp_path / "draft"
    file.write_text(" ".join(str(7 * (index % 12)) for index in range(120)))
    sizes = ["--steps", "60", "--rows", "4", "--tokens", "32", "--layers", "1", "--block", "4", "--rate", "3e-3"]
    assert main(["train-draft", "--model", str(saved), "--text", str(file), "--out", str(out), *sizes]) == 0
    shares = capsys.readouterr().out.split("last: ")[1].split("\n")[0].split()
    assert min(map(float, shares)) > 0.9


def test_an_mtp_head_from_nothing_and_on_from_there(saved, tmp_path, capsys):
    """What was made for a model lies beside its own weights afterwards, as it does in published checkpoints."""
    file, model, out, again = (tmp_path / name for name in ("text.txt", "model", "head", "again"))
    file.write_text(" ".join(str(7 * (index % 12)) for index in range(120)))
    shutil.copytree(saved, model)
    options = ["--kind", "mtp", "--model", str(model), "--text", str(file), "--tokens", "24", "--rows", "3"]
    assert main(["train-draft", *options, "--out", str(out), "--steps", "12", "--rate", "3e-3"]) == 0
    said = capsys.readouterr().out
    assert "starts from random weights" in said and f"speculative='mtp', draft_model={str(out)!r}" in said
    shutil.copy(out / "model.safetensors", model / "mtp.safetensors")
    assert main(["train-draft", *options, "--out", str(again), "--steps", "1"]) == 0
    assert "goes on from the model's own MTP head" in capsys.readouterr().out
    first, second = load_mtp(out), load_mtp(again)
    change = (first.fc.weight - second.fc.weight).abs().max()
    assert 0 < change < 2e-5  # one step at the rate of a head that is there
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    rollout = rollout_of(target, speculative="mtp", draft_model=str(model), enable_profiling=True)
    assert torch.equal(greedy(rollout, prompts, 8).input_ids, greedy(rollout_of(target), prompts, 8).input_ids)

    assert main(["train-draft", *options, "--out", str(model), "--steps", "1"]) == 1
    assert "--out must be another folder than the model's" in capsys.readouterr().out
    assert main(["train-draft", *options, "--out", str(out), "--steps", "1", "--block", "1"]) == 1
    assert "tokens of a block must be at least 2; got 1" in capsys.readouterr().out
    for other in (["--layers", "5"], ["--mask-token", "9"]):
        assert main(["train-draft", *options, "--out", str(out), *other]) == 1
        assert "--layers and --mask-token are of a DFlash draft model" in capsys.readouterr().out


def test_answers_with_nothing_behind_their_first_token_are_passed_over(saved, tmp_path, capsys, monkeypatch):
    """Training does not end there; it does where no answer is longer."""
    file, out = tmp_path / "prompts.txt", tmp_path / "draft"
    file.write_text("5 6 7\n8 9\n11\n")
    generate, calls = train_draft.HybridEngineRollout.generate, []

    def cut_short(rollout, request, sampling):
        calls.append(1)
        return generate(rollout, request, replace(sampling, max_new_tokens=1) if len(calls) != 2 else sampling)

    monkeypatch.setattr(train_draft.HybridEngineRollout, "generate", cut_short)
    sizes = ["--rows", "1", "--tokens", "6", "--layers", "1", "--block", "3", "--reuse", "1"]
    options = ["train-draft", "--model", str(saved), "--prompts", str(file), "--out", str(out), *sizes]
    assert main([*options, "--steps", "1"]) == 0 and len(calls) == 2
    assert main([*options, "--steps", "1"]) == 1 and len(calls) == 5
    assert "answers no prompt of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("\n \n", [], "has no prompt"),
        ("5 6", ["--mask-token", str(VOCAB)], "mask_token_id"),
        ("5", ["--block", "1"], "block"),
    ],
)
def test_what_cannot_be_is_said(saved, tmp_path, capsys, content, options, said):
    file = tmp_path / "prompts.txt"
    file.write_text(content)
    arguments = ["train-draft", "--model", str(saved), "--prompts", str(file), "--out", str(tmp_path / "draft")]
    assert main([*arguments, "--steps", "1", *options]) == 1
    assert said in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- saving


CONFIGS = {
    "plain": {},
    "bias": dict(attention_bias=True, num_target_layers=4),
    "mixed": dict(layer_types=(SLIDING, FULL)),
    "all causal": dict(causal=(True, True)),
    "none causal": dict(layer_types=(SLIDING, SLIDING), causal=(False, False)),
    "linear": dict(rope=RopeSettings(16, 1e6, "linear", 4.0)),
    "yarn": dict(rope=RopeSettings(16, 1e7, "yarn", 8.0, 4096, 16.0, 2.0, 1.25, False)),
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_what_was_saved_is_read(tmp_path, options):
    target = tiny_model()
    draft = tiny_draft(target, **options)
    save_draft(draft, tmp_path)
    again = load_draft(tmp_path)
    assert again.config == draft.config
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), draft.parameters(), strict=True))
    save_draft(draft, tmp_path, torch.bfloat16)
    assert load_draft(tmp_path).fc.weight.dtype == torch.bfloat16


def test_what_has_no_spelling_is_refused(tmp_path):
    config = replace(draft_config(tiny_model()), causal=(True, False))
    with pytest.raises(ValueError, match="cannot say which layers are causal"):
        config.to_json()
    assert DraftConfig.from_json(replace(config, causal=()).to_json()).causal == (False, False)


def test_layers_are_spread_as_published():
    assert spread_layers(32, 5) == (1, 8, 15, 22, 29)
    assert spread_layers(4, 5) == (0, 1, 2, 3) and spread_layers(4, 1) == (2,)
