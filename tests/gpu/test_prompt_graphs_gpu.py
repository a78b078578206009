# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Captured prompt forwards on a GPU: eager's bits, Hugging Face's tokens, no host sync, steady memory."""

import gc
import statistics
import time

import pytest
import torch
from harness import answers, greedy, prompt, rollout_of
from models import ragged_prompts, solo, tiny_model

from deepspeed_hybrid import HybridEngineRollout, RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.prompt_graphs import PromptGraphs
from deepspeed_hybrid.tools.models import build_model, load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

FAMILIES_ON_GPU = ["qwen3_5", "qwen3_5_conditional", "gdn_only", "qwen2_5", "qwen3", "llama"]
LENGTHS = [[3], [32], [128], [3, 40, 5], [64, 64], [1, 9, 2, 33, 70], [130, 257, 200]]


def on_gpu(family: str = "qwen3_5", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(family).to("cuda", dtype)


def captured(model: torch.nn.Module, **options) -> tuple[HybridEngineRollout, PromptGraphs]:
    rollout = rollout_of(model, use_graph_capture=True, **options)
    return rollout, rollout._arena.prompts


def eager(model: torch.nn.Module) -> HybridEngineRollout:
    return rollout_of(model, use_graph_capture=False)


def counts(graphs: PromptGraphs) -> tuple[int, int]:
    return graphs.captures, graphs.replays


def cached(rollout: HybridEngineRollout, rows: int) -> list[torch.Tensor]:
    """Of the first slots, without the last place of keys and values, where any of a row's padding may be the last."""
    kept = []
    for layer in rollout._arena.cache.layers:
        for kind, buffer in layer.tensors().items():
            kept.append((buffer[:rows, :, :-1] if kind.startswith("kv") else buffer[:rows]).clone())
    return kept


def assert_equal(batch: RolloutBatch, expected: RolloutBatch) -> None:
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.logprobs, expected.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES_ON_GPU)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "-".join(map(str, lengths)))
def test_replays_are_the_eager_forward(family, dtype, lengths):
    """Bit by bit in the first token and in all of the cache; the second use is captured."""
    model = on_gpu(family, dtype)
    prompts = ragged_prompts(lengths)
    plain = eager(model)
    expected = greedy(plain, prompts, 1)
    wanted = cached(plain, len(lengths))
    rollout, graphs = captured(model)
    seen = []
    for _ in range(4):
        assert_equal(greedy(rollout, prompts, 1), expected)
        assert all(torch.equal(*pair) for pair in zip(cached(rollout, len(lengths)), wanted, strict=True))
        seen.append(counts(graphs))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("family", FAMILIES_ON_GPU)
def test_tokens_are_hugging_faces(family):
    """fp32, ragged, each prompt alone as the oracle; eager, captured and replayed."""
    model = on_gpu(family)
    prompts = ragged_prompts([1, 2, 5, 17, 70])
    expected = [solo(model, prompt(prompts, row).cuda(), 64).tokens.tolist() for row in range(5)]
    rollout, graphs = captured(model)
    for _ in range(3):
        assert [tokens.tolist() for tokens in answers(greedy(rollout, prompts, 64))] == expected
    assert counts(graphs) == (1, 2)


def test_other_prompts_through_a_graph_with_stale_buffers():
    model = on_gpu()
    rollout, graphs = captured(model)
    for seed, lengths in enumerate([[64, 33, 1], [3, 40, 5], [2, 2, 50], [33, 1, 63]]):
        prompts = ragged_prompts(lengths, seed=seed, width=64 + seed)
        if seed:
            for buffer in rollout._arena.cache.buffers():
                buffer.fill_(1e4)
        assert_equal(greedy(rollout, prompts, 10), greedy(eager(model), prompts, 10))
    assert counts(graphs) == (1, 3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("lengths", [[128], [3, 40, 5, 9, 2]], ids=str)
def test_a_prefill_does_not_wait_for_the_device(lengths):
    """From its inputs to its logits, eager (once its kernels are tuned), captured and replayed. A capture itself
    synchronizes, so that the guard leaves it out."""
    model = on_gpu()
    prompts = ragged_prompts(lengths)
    rollout, graphs = captured(model)
    expected = greedy(rollout, prompts, 4)
    greedy(rollout, prompts, 4)
    logits, guarded = graphs.logits, []

    def guarded_logits(*arguments) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return logits(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            guarded.append(1)

    graphs.logits = guarded_logits
    for _ in range(3):
        assert_equal(greedy(rollout, prompts, 4), expected)
    graphs.runner = None  # eager from here on
    assert_equal(greedy(rollout, prompts, 4), expected)
    assert len(guarded) == 4 and counts(graphs)[1] == 4


def test_memory_is_steady():
    model = on_gpu()
    rollout, _ = captured(model)
    shapes = [ragged_prompts(lengths) for lengths in ([128], [3, 40, 5], [64] * 8)]
    allocated, reserved = [], []
    for _ in range(10):
        for prompts in shapes:
            greedy(rollout, prompts, 8, n_samples_per_prompt=2)
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(allocated[4:])) == len(set(reserved[4:])) == 1
    held = torch.cuda.memory_allocated()
    rollout.release_memory()
    assert torch.cuda.memory_allocated() < held


def test_optimizer_steps_need_one_capture_and_moved_weights_another():
    model = on_gpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator("cuda").manual_seed(0)
    prompts = ragged_prompts([3, 40, 5])
    rollout, graphs = captured(model)
    for _ in range(4):
        assert_equal(greedy(rollout, prompts, 8), greedy(eager(model), prompts, 8))
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        optimizer.step()
        rollout.sync_segki_weights()
    assert counts(graphs) == (1, 3)
    kept = [parameter.data for parameter in model.parameters()]  # else the allocator may give the old address again
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2
    for _ in range(3):
        assert_equal(greedy(rollout, prompts, 8), greedy(eager(model), prompts, 8))
    assert counts(graphs) == (2, 5) and kept


def test_slots_refill_through_graphs():
    """Samples share a prefill, prompts enter one by one, and rows of other shapes go on meanwhile."""
    model = on_gpu()
    prompts = ragged_prompts([3, 40, 1, 7, 70, 9])
    config = dict(max_new_tokens=24, temperature=1.0, n_samples_per_prompt=2, seed=3, stop_token_ids=list(range(40)))
    wanted = eager(model).generate(RolloutRequest(*prompts), SamplingConfig(**config))
    rollout, graphs = captured(model)
    for _ in range(3):
        batch = rollout.generate(RolloutRequest(*prompts), SamplingConfig(**config, continuous_batch_size=3))
        assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(wanted)]
    assert graphs.replays > 6


def test_launching_a_prefill_takes_little_of_the_host():
    """Most of a short prompt's eager prefill is launches, of which a replay is one."""
    config = load_config("qwen3.5-4b")
    config.num_hidden_layers, config.vocab_size, config.eos_token_id = 8, 8192, None
    model = build_model(config, seed=0)
    prompts = ragged_prompts([128])
    rollout, graphs = captured(model)
    logits, host = graphs.logits, []

    def timed_logits(*arguments) -> torch.Tensor:
        start = time.perf_counter()
        result = logits(*arguments)
        host.append(time.perf_counter() - start)
        return result

    graphs.logits = timed_logits
    for _ in range(12):
        greedy(rollout, prompts, 2)
    replays = host[2:]
    graphs.runner = None
    for _ in range(10):
        greedy(rollout, prompts, 2)
    launches = host[12:]
    replayed, launched = statistics.median(replays), statistics.median(launches)
    print(f"host: {replayed * 1e3:.2f} ms replayed, {launched * 1e3:.2f} ms eager")
    assert replayed < 0.25 * launched
