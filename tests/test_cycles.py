# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Cycles of generation, training and release: the tokens of the weights of now, and nothing that piles up."""

from contextlib import nullcontext

import pytest
import torch
from cycle_cases import assert_steady, generate, run_cycles
from harness import greedy, rollout_of
from models import Tokenizer, ragged_prompts, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator
from test_memory_report import held_bytes

from deepspeed_hybrid import HybridEngineRollout

CYCLES, WARM = 6, 2


def trainer(model, optimizer):
    ids = ragged_prompts([12, 12], seed=21)[0]

    def train() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


@pytest.mark.parametrize("family, captured", [("qwen3_5", True), ("qwen3", False)], ids=["captured", "eager"])
def test_nothing_piles_up(family, captured):
    model = tiny_model(family)
    train = trainer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with recording_accelerator() if captured else nullcontext() as accelerator:
        rollout = rollout_of(model)
        if captured:
            capture_steps(rollout)
            capture_prompts(rollout)

        def trained() -> None:
            train()
            if captured:
                accelerator.graphs.clear()  # the recorder's own list

        left, tokens = run_cycles(rollout, trained, CYCLES)
        assert left[-1].captures == (4 if captured else 0)
        assert held_bytes(rollout) == 0
        assert tokens[0] != tokens[-1], "training has changed nothing"
        assert generate(rollout) == generate(rollout_of(model))
    assert_steady(left, WARM, objects=20, resident=32 * 2**20)


def test_an_engine_that_trains(make_engine):
    model = tiny_model()
    engine = make_engine(model, learning_rate=1e-3)
    rollout = HybridEngineRollout(engine, Tokenizer())
    ids = ragged_prompts([12, 12], seed=21)[0]

    def train() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    left, tokens = run_cycles(rollout, train, CYCLES)
    assert tokens[0] != tokens[-1]
    assert_steady(left, WARM, objects=20, resident=32 * 2**20)


def test_released_and_rebuilt_is_the_same():
    model = tiny_model()
    rollout = rollout_of(model)
    wanted = generate(rollout)
    for _ in range(3):
        rollout.release_memory()
        assert held_bytes(rollout) == 0
        assert generate(rollout) == wanted


def test_what_piles_up_is_seen():
    """The measure itself: a tensor kept in each cycle, or an object, is growth."""
    model = tiny_model("qwen2_5")
    for kept in (lambda: torch.zeros(8), lambda: [[] for _ in range(100)]):
        pile: list = []
        left, _ = run_cycles(rollout_of(model), lambda kept=kept, pile=pile: pile.append(kept()), 4)
        with pytest.raises(AssertionError):
            assert_steady(left, 1, objects=50, resident=2**30)


def test_a_profile_counts_captures_of_released_graphs():
    with recording_accelerator():
        rollout = rollout_of(tiny_model("qwen2_5"), enable_profiling=True)
        capture_steps(rollout)
        greedy(rollout, ragged_prompts([3]), 4)
        rollout.release_memory()
        greedy(rollout, ragged_prompts([3]), 1)  # needs no graph
        assert rollout.get_last_profile()["graph_captures"] == 1
