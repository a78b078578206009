# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Cycles of generation, training and release on a GPU: memory comes back whole, and nothing piles up."""

import gc

import pytest
import torch
from cycle_cases import assert_steady, generate, run_cycles
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid.tools.models import build_model, load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

WARM = 10


def trainer(model):
    """A real step for attention alone; FLA's backward takes minutes to tune, so that elsewhere gradients are drawn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    ids = ragged_prompts([12, 12], seed=21)[0].to(device)
    recurrent = any(hasattr(module, "A_log") for module in model.modules())

    def train() -> None:
        if recurrent:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


@pytest.mark.parametrize("family, cycles", [("qwen3_5", 200), ("qwen3", 40)])
def test_nothing_piles_up(family, cycles):
    model = tiny_model(family).cuda()
    train = trainer(model)
    rollout = rollout_of(model, use_graph_capture=True)
    left, tokens = run_cycles(rollout, train, cycles)
    assert left[-1].captures > 0 and len(rollout._graphs) == 0
    assert tokens[0] != tokens[-1], "training has changed nothing"
    assert generate(rollout) == generate(rollout_of(model, use_graph_capture=False))
    assert_steady(left, WARM, objects=cycles, resident=64 * 2**20)


def test_released_memory_is_what_there_was_before():
    """A gigabyte or two of weights, so that one percent is more than the workspaces of libraries."""
    config = load_config("qwen3.5-4b")
    config.num_hidden_layers, config.eos_token_id = 12, None
    model = build_model(config, seed=0)
    prompts = ragged_prompts([100, 40, 3])
    with torch.no_grad():
        model(input_ids=prompts[0].cuda(), use_cache=False, logits_to_keep=1)  # as a trainer has before
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, tokens = torch.cuda.memory_allocated(), []
    rollout = rollout_of(model, use_graph_capture=True)
    for _ in range(3):
        batches = [greedy(rollout, prompts, 40, n_samples_per_prompt=8, continuous_batch_size=16) for _ in range(2)]
        tokens += [batch.input_ids.tolist() for batch in batches]
        held = torch.cuda.memory_allocated()
        del batches
        rollout.release_memory()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        print(f"allocated before {before / 1e6:.1f} MB, held {held / 1e6:.1f}, after {after / 1e6:.1f}")
        assert held > 1.05 * before and after <= 1.01 * before
        assert torch.cuda.memory_reserved() <= 1.02 * before + 64 * 2**20
    # A first prompt forward is eager, the second is captured, with the same kernels on the same numbers.
    assert all(one == tokens[0] for one in tokens)
