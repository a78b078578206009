# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reported faults once more, where slots are refilled, the last rows move to fewer lanes and prompts are captured."""

from functools import partial

import pytest
import torch
from harness import answers, assert_same_answers, greedy, prompt, rollout_of
from models import VOCAB, ragged_prompts, solo, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator
from test_reports_api import LargestOutput
from test_reports_graph import train_step
from transformers import Qwen3_5ForCausalLM

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail
from deepspeed_hybrid.generation.prefill import prefill

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def eager_tail(monkeypatch):
    """Moves that pay at once, so that short runs have several."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)


@pytest.fixture
def accelerator():
    with recording_accelerator() as recorder:
        yield recorder


def captured(model, **options):
    """A rollout with captured steps and prompts, and the runner of its steps."""
    rollout = rollout_of(model, **options)
    runner = capture_steps(rollout, max_graphs=16)
    capture_prompts(rollout)
    return rollout, runner


def oracles(model, prompts, limits: list[int]) -> list:
    return [solo(model, prompt(prompts, row), limit) for row, limit in enumerate(limits)]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "gdn_only"])
@pytest.mark.parametrize("budget", [16, 33])
def test_chunks_enter_a_slot_beside_rows_in_flight(accelerator, family, budget, monkeypatch):
    """huggingface/transformers#45513, fla-org/flash-linear-attention#285: several tokens on a state, in a refill."""
    monkeypatch.setattr(loop, "prefill", partial(prefill, token_budget=budget))
    model, limits = tiny_model(family), [9, 3, 12, 5, 7]
    prompts = ragged_prompts([4, 70, 9, 100, 34])
    rollout, _ = captured(model)
    expected = oracles(model, prompts, limits)
    for _ in range(3):  # eager, captured, replayed
        batch = greedy(rollout, prompts, 12, continuous_batch_size=2, max_new_tokens_per_row=limits)
        assert_same_answers(batch, expected)


@pytest.mark.parametrize("rows", [3, 5, 9])
def test_fewer_rows_than_lanes_of_a_tail(accelerator, rows):
    """vllm-project/vllm#28202: lanes of the tail's graph that hold nobody, or a row that has moved away."""
    model = tiny_model()
    limits = [4, 20, 2, 20, 9, 20, 3, 5, 6][:rows]
    prompts = ragged_prompts([3, 7, 5, 1, 9, 2, 8, 4, 6][:rows])
    rollout, runner = captured(model)
    wide = ragged_prompts([5] * 16, seed=4)
    greedy(rollout, wide, 20)  # what their slots hold is left there
    expected = oracles(model, prompts, limits)
    for _ in range(2):
        batch = greedy(rollout, prompts, 20, continuous_batch_size=rows, max_new_tokens_per_row=limits)
        assert_same_answers(batch, expected)
        assert rollout.get_last_continuous_stats()["shrinks"] > 0
    assert runner.captures == len(runner)


def parked_slots(arena) -> dict[int, list[torch.Tensor]]:
    """Copies of all that the cache holds for slots that are not in flight."""
    parked = [slot for slot, ended in enumerate(arena.state.parked.tolist()) if ended]
    return {slot: [buffer[slot].clone() for buffer in arena.cache.buffers()] for slot in parked}


def test_rows_that_ended_or_moved_write_into_no_slot(accelerator):
    """vllm-project/vllm#37728, vllm-project/vllm-ascend#12040: behind a move, and in a refill afterwards."""
    model = tiny_model()
    limits = [2, 30, 5, 14, 3, 9, 4, 12]
    prompts = ragged_prompts([3, 7, 5, 1, 9, 2, 8, 4])
    rollout, _ = captured(model)
    arena, expected = rollout._arena, oracles(model, prompts, limits)
    sampling = SamplingConfig(max_new_tokens=30, temperature=0.0, max_new_tokens_per_row=limits)
    ended: dict[int, list[torch.Tensor]] = {}  # what is in the slots of rows that have ended, since the last move
    shrink, got, moves, seen = arena.shrink, {}, [], 0

    def shrink_and_look(lanes, moved, plan):
        step = shrink(lanes, moved, plan)
        moves.extend(moved)
        ended.clear()
        ended.update(parked_slots(arena))
        return step

    arena.shrink = shrink_and_look
    for row in rollout.generate_iter(RolloutRequest(*prompts), sampling):
        got[row.index] = row.tokens.tolist()
        parked = parked_slots(arena)
        for slot, bits in ended.items():
            assert all(torch.equal(old, new) for old, new in zip(bits, parked[slot], strict=True)), slot
        seen += len(ended) if moves else 0
        ended.clear()
        ended.update(parked)
    moved = moves and seen
    assert moved and [got[row] for row in range(8)] == [one.tokens.tolist() for one in expected]
    assert_same_answers(greedy(rollout, prompts, 30, continuous_batch_size=3, max_new_tokens_per_row=limits), expected)


def test_nine_rows_on_buffers_captured_for_eight(accelerator):
    """sglang#37531, #23330: slots, samples and 'auto' grow and shrink between calls."""
    model = tiny_model()
    prompts = ragged_prompts([3, 7, 5, 1, 9, 2, 8, 4, 6])
    expected = oracles(model, prompts, [8] * 9)
    rollout, runner = captured(model)
    for slots in (8, 9, 8, "auto", 1, 9):
        assert_same_answers(greedy(rollout, prompts, 8, continuous_batch_size=slots), expected)
    assert rollout._arena.cache.slots == 16 and runner.captures >= 3
    first = tuple(part[:4] for part in prompts)
    batch = greedy(rollout, first, 8, n_samples_per_prompt=5, continuous_batch_size=17)
    assert_same_answers(batch, expected[:4], samples=5)


@pytest.mark.parametrize("slots", [3, "auto"])
def test_profile_of_a_run_that_shrinks(accelerator, slots):
    """deepspeedai/DeepSpeed#8459"""
    model = tiny_model("qwen2_5")
    prompts, limits = ragged_prompts([3, 7, 5]), [2, 12, 3, 4, 9, 5]
    options = dict(n_samples_per_prompt=2, continuous_batch_size=slots, max_new_tokens_per_row=limits)
    plain, _ = captured(model)
    profiled, _ = captured(model, enable_profiling=True)
    for _ in range(2):
        expected, batch = greedy(plain, prompts, 12, **options), greedy(profiled, prompts, 12, **options)
        assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.logprobs, expected.logprobs)
        profile, stats = profiled.get_last_profile(), profiled.get_last_continuous_stats()
        assert plain.get_last_profile() is None
        assert profile["num_generated_tokens"] == sum(limits) and profile["response_length"] == 12
        assert profile["num_tail_shrinks"] == stats["shrinks"] > 0
        assert profile["num_decode_forwards"] == stats["decode_steps"]
        assert profile["continuous_batch_size"] == (6 if slots == "auto" else 3)
        assert profile["prefill_forward_ms"] > 0 and profile["decode_forward_ms"] > 0
        assert stats["wasted_lane_steps"] == stats["lane_steps"] - (sum(limits) - 6)
        assert 0 < stats["occupancy"] <= stats["queued_occupancy"] <= 1
        assert stats["refills"] == (0 if slots == "auto" else 3)


def test_optimizer_steps_capture_each_size_of_lanes_once(accelerator):
    """DeepSpeed 0.19.8's new graph at every call: slots refill, the tail shrinks, the weights move on."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    prompts, limits = ragged_prompts([3, 7, 5, 1, 9, 2]), [2, 14, 3, 5, 14, 4]
    rollout, runner = captured(model)
    outputs, captures = [], []
    for _ in range(5):
        batch = greedy(rollout, prompts, 14, continuous_batch_size=4, max_new_tokens_per_row=limits)
        fresh = greedy(rollout_of(model), prompts, 14, max_new_tokens_per_row=limits)
        assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(fresh)]
        outputs.append(batch.input_ids)
        captures.append((runner.captures, len(runner), rollout._arena.prefill_captures))
        train_step(model, optimizer)
        rollout.sync_segki_weights()
    steps = [count for count, _, _ in captures]
    assert steps == [steps[0]] * 5 and steps[0] == len(runner) > 1
    assert captures[-1] == captures[-2], "prompts are captured at their second use, and never again"
    assert all(not torch.equal(before, after) for before, after in zip(outputs, outputs[1:], strict=False))


@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.2)], ids=["plain", "penalised"])
def test_captured_prompts_make_last_position_logits_only(accelerator, options):
    """DeepSpeed 0.19.8 makes [B, T, vocabulary] logits."""
    config = tiny_model().config
    config.vocab_size = 60_000
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).eval()
    rollout, _ = captured(model)
    prompts, rows = ragged_prompts([200, 3, 100]), 6
    for _ in range(3):  # eager, captured, replayed
        with LargestOutput() as watch:
            greedy(rollout, prompts, 2, n_samples_per_prompt=2, continuous_batch_size=rows, **options)
        assert watch.largest <= 8 * config.vocab_size  # a step has eight lanes
    assert config.vocab_size > 200 * VOCAB
