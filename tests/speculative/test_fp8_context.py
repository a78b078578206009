# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A draft's context in fp8: half the memory, guesses close to those of the model's own dtype, and the same answers."""

import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import speculative_rollout, tiny_draft

FP8 = "fp8_e4m3"
LENGTHS = [5, 1, 17]


def test_answers_are_the_plain_paths():
    target, prompts = tiny_model(), ragged_prompts(LENGTHS)
    rollout = speculative_rollout(target, draft_kv_cache_dtype=FP8)
    batch, plain = greedy(rollout, prompts, 12), greedy(rollout_of(target), prompts, 12)
    assert torch.equal(batch.input_ids, plain.input_ids)
    torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=1e-4, rtol=0)
    assert "kept in float8_e4m3fn" in rollout.describe()


def test_the_context_is_rounded_and_nothing_else_is():
    """Of a committed token as any cache has it, but for the rounding; rows are copied with their slots."""
    target, draft = tiny_model(), tiny_draft(tiny_model())
    caches, reports = [], []
    for option in ({}, {"draft_kv_cache_dtype": FP8}):
        rollout = speculative_rollout(target, draft, **option)
        greedy(rollout, ragged_prompts(LENGTHS), 6, n_samples_per_prompt=2)
        caches.append(rollout._speculation.drafter.cache)
        reports.append(rollout.memory_report())
        slots, capacity = rollout._arena.cache.slots, rollout._arena.cache.capacity
        bytes_of = rollout._speculation.cache_bytes(slots, capacity)
        assert bytes_of == reports[-1]["draft_keys"] + reports[-1]["draft_values"]
    own, fp8 = caches
    assert fp8.keys.dtype == torch.float8_e4m3fn and reports[0]["draft_keys"] == 4 * reports[1]["draft_keys"]
    for row in range(6):
        known = LENGTHS[row // 2] + 5
        for exact, rounded in ((own.keys, fp8.keys), (own.values, fp8.values)):
            exact, rounded = exact[row, :known], rounded[row, :known].float()
            assert exact.abs().amax() > 0.1 and not torch.equal(exact, rounded)
            torch.testing.assert_close(rounded, exact, rtol=2**-4, atol=2**-9)
