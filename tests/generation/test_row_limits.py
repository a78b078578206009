# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A limit for each row: it cuts that row alone, on every schedule, and costs no more than the rows need."""

from types import SimpleNamespace

import pytest
import torch
from harness import LateFlags, answers, rollout_of
from models import ragged_prompts, tiny_model
from recorded_graph import capture_steps, recording_accelerator

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail

LENGTHS, SAMPLES, NEW_TOKENS = [3, 11, 1], 2, 40
LIMITS = [1, 40, 7, 2, 13, 8]
STOPS = [30, 31]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen2_5"])
def bench(request):
    model = tiny_model(request.param)
    return SimpleNamespace(model=model, free=sample(rollout_of(model)))


def sample(rollout, limits=None, **changes):
    usual = dict(
        max_new_tokens=NEW_TOKENS, temperature=1.2, seed=9, n_samples_per_prompt=SAMPLES, stop_token_ids=STOPS
    )
    sampling = SamplingConfig(**{**usual, **changes}, max_new_tokens_per_row=limits)
    return rollout.generate(RolloutRequest(*ragged_prompts(LENGTHS)), sampling)


def assert_cut(batch, free, limits) -> None:
    """Every row is the beginning of what it says without a limit, and says why it ended."""
    whole = [row.tolist() for row in answers(free)]
    assert [row.tolist() for row in answers(batch)] == [row[:limit] for row, limit in zip(whole, limits, strict=True)]
    for row, limit, reason, was in zip(whole, limits, batch.finish_reasons, free.finish_reasons, strict=True):
        assert reason == (was if len(row) <= limit else "length")
    width = batch.logprobs.shape[1]
    real = torch.arange(width)[None, :] < batch.response_lengths[:, None]
    torch.testing.assert_close(batch.logprobs, free.logprobs[:, :width] * real, atol=5e-5, rtol=0)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("slots", [None, 1, 2, 4])
def test_a_limit_cuts_its_row_alone(bench, slots, late, monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    if late:
        monkeypatch.setattr(loop, "StopFlags", LateFlags)
    batch = sample(rollout_of(bench.model, poll_every=3), LIMITS, continuous_batch_size=slots)
    assert_cut(batch, bench.free, LIMITS)


def test_one_for_each_prompt(bench):
    assert_cut(sample(rollout_of(bench.model), [5, 3, 9]), bench.free, [5, 5, 3, 3, 9, 9])
    single = sample(rollout_of(bench.model), [5, 3, 9], n_samples_per_prompt=1)
    assert [len(row) for row in answers(single)] == [5, 3, 9]


def test_rows_of_an_iterator(bench):
    request = RolloutRequest(*ragged_prompts(LENGTHS))
    sampling = SamplingConfig(
        max_new_tokens=NEW_TOKENS, temperature=1.2, seed=9, n_samples_per_prompt=SAMPLES, stop_token_ids=STOPS,
        max_new_tokens_per_row=LIMITS, continuous_batch_size=3,
    )  # fmt: skip
    rows = {row.index: row.tokens.tolist() for row in rollout_of(bench.model).generate_iter(request, sampling)}
    whole = [row.tolist() for row in answers(bench.free)]
    assert [rows[index] for index in range(6)] == [row[:limit] for row, limit in zip(whole, LIMITS, strict=True)]


def test_other_limits_are_the_same_graph(bench):
    with recording_accelerator():
        rollout = rollout_of(bench.model, shrink_tail=False)
        graphs = capture_steps(rollout)
        for limits in (LIMITS, LIMITS[::-1], [4] * 6, None):
            batch = sample(rollout, limits)
            assert_cut(batch, bench.free, limits or [NEW_TOKENS] * 6)
    assert graphs.captures == 1


def test_no_step_beyond_the_largest_limit(bench):
    rollout = rollout_of(bench.model, enable_profiling=True)
    sample(rollout, [3, 5, 1, 2, 4, 5], stop_token_ids=None)
    assert rollout.get_last_profile()["num_decode_forwards"] == 4
    sample(rollout, [1] * 6)
    assert rollout.get_last_profile()["num_decode_forwards"] == 0


def test_room_is_for_what_rows_need(bench):
    """A long prompt that has little left, beside a short one that has much."""
    model = tiny_model("qwen2_5")
    model.config.max_position_embeddings = 240
    rollout = rollout_of(model)
    request, sampling = RolloutRequest(*ragged_prompts([200, 4])), dict(max_new_tokens=150, temperature=0.0)
    with pytest.raises(ValueError, match="200 tokens plus max_new_tokens=150 need 350"):
        rollout.generate(request, SamplingConfig(**sampling))
    batch = rollout.generate(request, SamplingConfig(**sampling, max_new_tokens_per_row=[40, 150]))
    assert batch.response_lengths.tolist() == [40, 150]
    assert rollout._arena.cache.capacity == 256
    with pytest.raises(ValueError, match="200 tokens plus a max_new_tokens_per_row=41 need 241"):
        rollout.generate(request, SamplingConfig(**sampling, max_new_tokens_per_row=[41, 150]))


@pytest.mark.parametrize(
    "limits, words",
    [
        ([1] * 5, "6 rows or 3 prompts; got 5"),
        ([], "6 rows or 3 prompts; got 0"),
        ([1, 2, 0], "from 1 to max_new_tokens=40"),
        ([1, 2, 41], "from 1 to max_new_tokens=40"),
        ([1, 2, True], "list of integers"),
        ([1.0, 2, 3], "list of integers"),
        (7, "list of integers"),
    ],
    ids=str,
)
def test_what_is_no_limit_is_refused(bench, limits, words):
    rollout = rollout_of(bench.model)
    with pytest.raises(ValueError, match=f"max_new_tokens_per_row.*{words}"):
        sample(rollout, limits)
    assert rollout._arena.cache is None


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_occupancy_while_rows_wait(bench, slots):
    """Counted by hand: which slots are taken at each step, until the last row has its slot."""
    rollout = rollout_of(bench.model, shrink_tail=False)
    limits = [5, 9, 2, 7, 3, 4]
    sample(rollout, limits, stop_token_ids=None, continuous_batch_size=slots)
    stats = rollout.get_last_continuous_stats()
    queue, left, steps, taken = list(limits), [], 0, 0
    while queue:
        while queue and len(left) < slots:
            left.append(queue.pop(0) - 1)
        if queue:
            steps, taken = steps + 1, taken + len(left)
            left = [one - 1 for one in left if one > 1]
    assert stats["queued_steps"] == steps
    assert stats["queued_occupancy"] == (taken / (steps * slots) if steps else 1.0)
