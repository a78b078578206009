# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The demo of speculative decoding: its language, its output, and what it calls a failure."""

import json

import pytest
import torch

from deepspeed_hybrid.cli import main
from deepspeed_hybrid.tools import speculative_demo as demo
from deepspeed_hybrid.tools.strides import JUMPS, STRIDES, WORDS, sentences


def test_sentences_are_strides_with_a_few_jumps():
    said = sentences(400, 40, torch.Generator().manual_seed(0))
    steps = (said[:, 1:] - said[:, :-1]) % WORDS
    usual = steps.mode(dim=1).values
    assert said.min() == 0 and said.max() == WORDS - 1
    assert set(usual.tolist()) == set(range(1, STRIDES + 1))
    jumps = float((steps != usual[:, None]).float().mean())
    assert JUMPS * 0.8 < jumps < JUMPS * 1.2


def test_a_short_run_prints_and_writes(tmp_path, capsys, monkeypatch):
    for name, value in (("TARGET_STEPS", 3), ("ROLLOUTS", 1), ("ROLLOUT_ROWS", 8), ("ANSWER", 16)):
        monkeypatch.setattr(demo, name, value)
    assert main(["demo", "--speculative", "dflash", "--steps", "2", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("identical") == 2 and "the guesses are not judged" in said
    rows = json.loads((tmp_path / "speculative.json").read_text())["rows"]
    assert [(row["sampling"], row["identical"], row["plain_steps"]) for row in rows] == [
        ("greedy", True, 15),
        ("sampled", True, 15),
    ]


@pytest.mark.parametrize(
    ("identical", "tokens", "judged", "code"),
    [(True, 4.0, True, 0), (True, 3.9, True, 1), (True, 1.0, False, 0), (False, 8.0, True, 1), (False, 8.0, False, 1)],
)
def test_verdict(identical, tokens, judged, code, capsys):
    rows = [
        {"sampling": "greedy", "identical": True, "tokens_per_step": tokens},
        {"sampling": "sampled", "identical": identical, "tokens_per_step": 1.0},
    ]
    assert demo.verdict(rows, judged) == code
    assert ("sampled" in capsys.readouterr().out) == (not identical)


@pytest.mark.slow
def test_a_trained_draft_is_right_about_half_of_a_block(tmp_path):
    """What the command itself is for; under half a minute of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TARGET_STEPS", 240), ("ROLLOUTS", 8), ("DRAFT_STEPS", 650)):
            patch.setattr(demo, name, value)
        assert main(["demo", "--speculative", "dflash", "--out", str(tmp_path)]) == 0
    greedy, sampled = json.loads((tmp_path / "speculative.json").read_text())["rows"]
    assert greedy["tokens_per_step"] >= 4 and greedy["steps"] * 2 < greedy["plain_steps"]
    assert greedy["identical"] and sampled["identical"]
