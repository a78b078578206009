# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The examples that need no other project do what they say; test_trl.py runs the third."""

import importlib
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def example(monkeypatch, one_process):
    """Name -> the module; in this process, which has a torch.distributed of its own."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return lambda name: importlib.import_module(f"examples.{name}")


@pytest.mark.filterwarnings("ignore")  # other packages', when an engine is made
def test_distillation_halves_the_divergence_with_segments_and_without(example):
    distill = example("distill").distill
    losses = distill(steps=20, use_segki=True)
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    assert distill(steps=20, use_segki=False) == pytest.approx(losses, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_loop_learns(example):
    rewards = example("grpo_loop").train(steps=16)
    assert sum(rewards[-3:]) > 3 * sum(rewards[:3])
