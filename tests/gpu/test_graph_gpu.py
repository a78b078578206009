# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Captured decode steps on a GPU: eager's tokens, one capture, no host sync, the weights of now."""

import gc
import os
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import answers, assert_same_answers, greedy, prompt, rollout_of
from models import Tokenizer, ragged_prompts, solo, tiny_model

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation.graph import GraphRunner
from deepspeed_hybrid.tools.models import build_model, load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_fp32"),
]

FAMILIES_ON_GPU = ["qwen3_5", "qwen3_5_conditional", "gdn_only", "qwen2_5", "qwen3", "llama"]
KINDS = [
    dict(temperature=0.0),
    dict(temperature=1.0, seed=3),
    dict(temperature=0.7, seed=3, top_k=20, top_p=0.9),
    dict(temperature=0.0, repetition_penalty=1.3),
    dict(temperature=0.8, seed=3, repetition_penalty=1.2, min_p=0.05),
    dict(temperature=1.0, seed=3, logprobs_mode="raw"),
]


def on_gpu(family: str = "qwen3_5") -> torch.nn.Module:
    return tiny_model(family).cuda()


def captured(model: torch.nn.Module, **options) -> HybridEngineRollout:
    return rollout_of(model, use_graph_capture=True, **options)


def eager(model: torch.nn.Module) -> HybridEngineRollout:
    return rollout_of(model, use_graph_capture=False)


def assert_same_batch(batch, expected) -> None:
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.attention_mask, expected.attention_mask)
    torch.testing.assert_close(batch.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert batch.finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("family", FAMILIES_ON_GPU)
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_graph_is_eager(family, rows):
    """Also vllm-project/vllm#28202: rows fewer than lanes."""
    model = on_gpu(family)
    prompts = ragged_prompts([3, 7, 5, 1, 9, 70, 2][:rows])
    rollout = captured(model)
    batches = [greedy(rollout, prompts, 64), greedy(rollout, prompts, 64)]
    for batch in batches:
        assert_same_batch(batch, greedy(eager(model), prompts, 64))
    assert rollout._graphs.captures == 1


@pytest.mark.parametrize("family", FAMILIES_ON_GPU)
def test_tokens_are_hugging_faces(family):
    """fp32, 128 steps, ragged, each prompt alone as the oracle."""
    model = on_gpu(family)
    lengths = [1, 2, 5, 17, 70]
    prompts = ragged_prompts(lengths)
    batch = greedy(captured(model), prompts, 128)
    for row, tokens in enumerate(answers(batch)):
        expected = solo(model, prompt(prompts, row).cuda(), 128)
        assert tokens.tolist() == expected.tokens.tolist()


def test_three_rows_on_a_graph_of_four_lanes():
    """vllm-project/vllm#28202: the free lane holds the rest of an earlier row, then large numbers."""
    model = on_gpu()
    rollout = captured(model)
    greedy(rollout, ragged_prompts([9, 8, 7, 6], seed=5), 20)
    prompts = ragged_prompts([3, 7, 5])
    expected = greedy(eager(model), prompts, 20)
    assert_same_batch(greedy(rollout, prompts, 20), expected)
    for buffer in rollout._arena.cache.buffers():
        buffer.fill_(1e4)
    assert_same_batch(greedy(rollout, prompts, 20), expected)
    assert all(bool((buffer[3] == 1e4).all()) for buffer in rollout._arena.cache.buffers())
    assert rollout._graphs.captures == 1


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_five_optimizer_steps_need_one_capture(family):
    """NVIDIA-NeMo/RL#2895, and DeepSpeed 0.19.8's capture after every step."""
    model = on_gpu(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator("cuda").manual_seed(0)
    prompts = ragged_prompts([3, 7, 5])
    rollout = captured(model)
    outputs, addresses = [], []
    for _ in range(5):
        batch = greedy(rollout, prompts, 32)
        assert_same_batch(batch, greedy(eager(model), prompts, 32))
        outputs.append(batch.input_ids)
        addresses.append([buffer.data_ptr() for buffer in rollout._arena.cache.buffers()])
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        optimizer.step()
        rollout.sync_segki_weights()
    assert rollout._graphs.captures == 1
    assert all(now == addresses[0] for now in addresses)
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


def test_engine_steps_reach_the_graph(make_engine):
    """The same with a real ZeRO-1 engine and its flat weights."""
    model = on_gpu("qwen3").train()
    engine = make_engine(model, learning_rate=1e-2)
    prompts = ragged_prompts([3, 7, 5])
    ids = ragged_prompts([12], seed=21)[0].cuda()
    rollout = HybridEngineRollout(engine, Tokenizer())
    outputs = []
    for _ in range(5):
        batch = greedy(rollout, prompts, 16)
        outputs.append(batch.input_ids)
        assert_same_batch(batch, greedy(eager(model), prompts, 16))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        rollout.sync_weights(engine.global_steps)
    assert rollout._graphs.captures == 1
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


def test_replaced_weights_are_never_read_through_an_old_graph():
    model = on_gpu()
    prompts = ragged_prompts([3, 7, 5])
    rollout = captured(model)
    before = greedy(rollout, prompts, 16)
    kept = [parameter.data for parameter in model.parameters()]  # else the allocator may give the old address again
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2
    after = greedy(rollout, prompts, 16)
    assert not torch.equal(before.input_ids, after.input_ids)
    assert_same_batch(after, greedy(eager(model), prompts, 16))
    assert rollout._graphs.captures == 2 and len(kept) > 0


def test_every_sampling_kind_is_captured_once():
    model = on_gpu()
    prompts = ragged_prompts([3, 7, 5])
    rollout, plain = captured(model), eager(model)
    for _ in range(2):
        for options in KINDS:
            config = SamplingConfig(max_new_tokens=24, n_samples_per_prompt=2, **options)
            batch = rollout.generate(RolloutRequest(*prompts), config)
            assert_same_batch(batch, plain.generate(RolloutRequest(*prompts), config))
    assert rollout._graphs.captures == len(KINDS)


def test_least_recently_used_graph_is_dropped_and_captured_again():
    model = on_gpu()
    rollout = captured(model, max_graphs=2)
    four, two, one = ragged_prompts([3, 7, 5, 9]), ragged_prompts([6, 2]), ragged_prompts([4])
    greedy(rollout, four, 100)  # the arena is at its largest: what follows changes lanes, not addresses
    captures = []
    for prompts, length in ((one, 16), (four, 16), (one, 100), (two, 16), (one, 16), (four, 16), (one, 16)):
        assert_same_batch(greedy(rollout, prompts, length), greedy(eager(model), prompts, length))
        assert len(rollout._graphs) <= 2
        captures.append(rollout._graphs.captures)
    assert captures == [2, 2, 2, 3, 3, 4, 4]  # two drops four, which drops two; a length is no other graph


def test_a_graph_that_becomes_garbage_while_another_is_captured():
    """As an old rollout does, whose parts refer to each other; here a collection is due at every allocation."""
    count = torch.zeros(4, device="cuda")
    old, step_ran = GraphRunner(1), []
    old.prepare("old", lambda: count.add_(1), nullcontext)
    old.itself = old
    olds, thresholds = [old], gc.get_threshold()
    del old

    def step():
        count.add_(1)
        olds.clear()
        step_ran.append([[] for _ in range(1000)])
        count.add_(1)

    count.zero_()
    gc.set_threshold(1, 1, 1)
    try:
        replay = GraphRunner(1).prepare("new", step, nullcontext, warmups=0)
    finally:
        gc.set_threshold(*thresholds)
    replay(), replay()
    assert len(step_ran) == 1 and count.tolist() == [4.0] * 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("use_graph", [True, False], ids=["replayed", "eager"])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_steps_do_not_wait_for_the_device(use_graph, options):
    """Every step after the first call runs while a host sync is an error."""
    model = on_gpu()
    prompts = ragged_prompts([3, 7, 5])
    rollout = rollout_of(model, use_graph_capture=use_graph)
    config = SamplingConfig(max_new_tokens=24, **options)
    expected = rollout.generate(RolloutRequest(*prompts), config)
    begin, guarded = rollout._arena.begin, []

    def begin_guarded(plan):
        step = begin(plan)

        def run() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            guarded.append(1)

        return run

    rollout._arena.begin = begin_guarded
    batch = rollout.generate(RolloutRequest(*prompts), config)
    assert len(guarded) == 23
    assert_same_batch(batch, expected)


def test_the_device_does_not_wait_between_replays():
    """Events around every replay: what lies between two of them is no more than a launch takes."""
    config = load_config("qwen3.5-4b")
    config.num_hidden_layers, config.vocab_size, config.eos_token_id = 8, 8192, None
    rollout = captured(build_model(config, seed=0))
    prompts = ragged_prompts([3, 7, 5, 9])
    greedy(rollout, prompts, 100)
    begin, events = rollout._arena.begin, []

    def begin_timed(plan):
        step = begin(plan)

        def run() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            events.append((start, end))

        return run

    rollout._arena.begin = begin_timed
    greedy(rollout, prompts, 100)
    torch.cuda.synchronize()
    assert len(events) == 99
    steps = [start.elapsed_time(end) for start, end in events]
    gaps = [before[1].elapsed_time(after[0]) for before, after in zip(events, events[1:], strict=False)]
    print(f"median step {statistics.median(steps):.4f} ms, gap {statistics.median(gaps):.4f} ms, max {max(gaps):.4f}")
    assert statistics.median(gaps) < 0.02
    assert sum(gaps) < 0.03 * sum(steps)


@pytest.mark.parametrize("poll_every", [1, 3, 8, 64])
def test_rows_end_and_slots_refill_whenever_the_host_looks(poll_every):
    """vllm-project/vllm#37728: rows that ended go on as parked lanes until the host has seen it."""
    model = on_gpu()
    stops = set(range(12, 30))
    prompts = ragged_prompts([3, 7, 5, 9, 2, 4, 30])
    rollout = captured(model, poll_every=poll_every)
    batch = greedy(rollout, prompts, 60, continuous_batch_size=2, stop_token_ids=sorted(stops))
    expected = [solo(model, prompt(prompts, row).cuda(), 60, stops) for row in range(7)]
    for oracle in expected:
        oracle.tokens, oracle.logprobs = oracle.tokens.cpu(), oracle.logprobs.cpu()
    assert len({len(row) for row in answers(batch)}) > 2
    assert_same_answers(batch, expected, atol=1e-3)
    assert rollout._graphs.captures == 1 + rollout.get_last_continuous_stats()["shrinks"]


def test_warm_up_leaves_live_rows_alone():
    """fla-org/flash-linear-attention#860: a fresh runner's first decode is its second's and eager's."""
    model = on_gpu()
    prompts = ragged_prompts([3, 7, 5, 2])
    expected = greedy(eager(model), prompts, 2)
    rollout = captured(model)
    first, second = greedy(rollout, prompts, 2), greedy(rollout, prompts, 2)
    assert torch.equal(first.logprobs, second.logprobs)
    assert_same_batch(first, expected)


FRESH_PROCESS = """
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
rollout = rollout_of(tiny_model().cuda())
prompts = ragged_prompts([3, 7, 5, 2])
first, second = greedy(rollout, prompts, 16), greedy(rollout, prompts, 16)
assert first.input_ids.tolist() == second.input_ids.tolist(), "tokens"
assert first.logprobs.tolist() == second.logprobs.tolist(), "logprobs"
print("same")
"""


@pytest.mark.slow
def test_first_decode_of_a_fresh_process_is_the_second(tmp_path):
    """fla-org/flash-linear-attention ca89d201: autotuning from an empty cache, on buffers written in place."""
    tests = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("same")
