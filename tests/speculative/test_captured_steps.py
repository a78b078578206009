# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Captured speculative steps, recorded and replayed on the CPU: eager's answers, and as many captures as lengths.

tests/gpu/test_speculative_gpu.py holds the same on a GPU.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from harness import greedy, rollout_of
from models import ragged_prompts, tiny_model
from recorded_graph import RecordingAccelerator, capture_prompts, capture_steps, recording_accelerator
from speculative_cases import DeviceScript, Schedule, figures, script_of, speculative_rollout, tiny_draft

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import tail
from deepspeed_hybrid.generation.graph import WARMUPS

KINDS = {
    "sampled": dict(temperature=1.2, seed=3),
    "all": dict(temperature=0.9, seed=3, top_k=40, top_p=0.95, repetition_penalty=1.2),
}
LENGTHS, NEW_TOKENS = [5, 1, 17, 2], 20


@pytest.fixture
def accelerator() -> Iterator[RecordingAccelerator]:
    with recording_accelerator() as recorder:
        yield recorder


def run(rollout, prompts, **options):
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(**{"max_new_tokens": NEW_TOKENS, **options}))


def assert_same(one, other) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.attention_mask, other.attention_mask)
    assert one.finish_reasons == other.finish_reasons
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=5e-5, rtol=0)


def script(batch, modulus: int = 6) -> DeviceScript:
    return DeviceScript(script_of(batch), lambda request, sample, length: (length + request) % modulus)


@pytest.mark.parametrize("proposes, kind", [("model", "sampled"), ("script", "all")])
def test_captured_is_plain(accelerator, proposes, kind):
    """Twice, with other prompts between; the draft's context, too, is what eager steps leave."""
    target, prompts, kind = tiny_model(), ragged_prompts(LENGTHS), KINDS[kind]
    plain = run(rollout_of(target), prompts, **kind)
    rollouts = []
    for captured in (False, True):
        draft = script(plain) if proposes == "script" else tiny_draft(target)
        rollout = speculative_rollout(target, draft, Schedule(8, 1, 4))
        graphs = capture_steps(rollout) if captured else None
        rollouts.append(rollout)
        assert_same(run(rollout, prompts, **kind), plain)
    assert graphs.captures == 3 and len(accelerator.graphs) == 3
    counts = figures(rollout)
    assert counts == figures(rollouts[0]) and set(counts["steps"]) == {1, 4, 8}
    for mine, theirs in zip(rollout._arena.cache.buffers(), rollouts[0]._arena.cache.buffers(), strict=True):
        torch.testing.assert_close(mine[:4], theirs[:4], atol=2e-4, rtol=1e-3)
    run(rollout, ragged_prompts([3, 9, 2, 2], seed=5), **kind)
    assert_same(run(rollout, prompts, **kind), plain)
    assert graphs.captures == 3


def test_a_capture_in_the_midst_of_rows_touches_none_of_them(accelerator):
    """Warm-ups run for real, several times; a recurrent state would notice."""
    target, prompts = tiny_model(), ragged_prompts(LENGTHS)
    plain = greedy(rollout_of(target), prompts, NEW_TOKENS)
    rollout = speculative_rollout(target, script(plain), Schedule(*[4] * 3, 8))
    capture_steps(rollout)
    ran, original = [], rollout._speculation.step

    def watched(*arguments) -> None:
        ran.append((arguments[-1], len(accelerator.graphs)))
        original(*arguments)

    rollout._speculation.step = watched
    assert_same(greedy(rollout, prompts, NEW_TOKENS), plain)
    assert ran == [(4, 0)] * WARMUPS + [(4, 1)] + [(8, 1)] * WARMUPS + [(8, 2)]


def test_slots_that_are_taken_again_and_fewer_lanes(accelerator, monkeypatch):
    """Prompts are captured too, and a graph more for every number of lanes."""
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    target, prompts = tiny_model(), ragged_prompts(LENGTHS)
    free = run(rollout_of(target), prompts, n_samples_per_prompt=2, **KINDS["sampled"])
    options = dict(n_samples_per_prompt=2, max_new_tokens_per_row=[4, 9, 3, 8, 1, 20, 5, 2], **KINDS["sampled"])
    plain = run(rollout_of(target), prompts, **options)
    script = DeviceScript(script_of(free, 2), lambda *key: sum(key) % 8)
    rollout = speculative_rollout(target, tiny_draft(target), poll_every=3)
    graphs, prompt_graphs = capture_steps(rollout), capture_prompts(rollout)
    for draft in (rollout._speculation.drafter, script):
        propose = draft.propose
        rollout._speculation.drafter.propose = propose
        rollout._arena.drop_graphs()
        for _ in range(2):
            assert_same(run(rollout, prompts, continuous_batch_size=2, **options), plain)
    assert graphs.captures == 4 and prompt_graphs.captures >= 1


def test_weights_of_now_at_addresses_that_stay(accelerator):
    """Optimizer steps of both models, in place, and a sync: no capture more, and never the tokens of before."""
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    draft = tiny_draft(target)
    rollout = speculative_rollout(target, draft, Schedule(1, 8))
    graphs, drafter, outputs, addresses = capture_steps(rollout), rollout._speculation.drafter, [], []
    for step in range(4):
        outputs.append(greedy(rollout, prompts, 12))
        assert_same(outputs[-1], greedy(rollout_of(target), prompts, 12))
        held = [*rollout._arena.cache.buffers(), *drafter.draft.tensors()]
        held += rollout._speculation.stats.reached.values()
        addresses.append([buffer.data_ptr() for buffer in held])
        generator = torch.Generator().manual_seed(step)
        for parameter in (*target.parameters(), *draft.parameters()):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        rollout.sync_weights(step)
    assert graphs.captures == 2 and all(now == addresses[0] for now in addresses)
    assert all(not torch.equal(one.input_ids, other.input_ids) for one, other in itertools.pairwise(outputs))
    expected = speculative_rollout(target, draft, Schedule(1, 8))
    greedy(expected, prompts, 12)
    greedy(rollout, prompts, 12)
    fresh = expected._speculation.drafter.cache
    for mine, theirs in ((drafter.cache.keys, fresh.keys), (drafter.cache.values, fresh.values)):
        for row, length in enumerate([5, 2]):  # behind them are the last block's
            known = length + 12 - 1
            torch.testing.assert_close(mine[row, :known], theirs[row, :known], atol=2e-4, rtol=1e-3)


def test_lengths_that_pay_are_found_over_graphs(accelerator):
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    plain = greedy(rollout_of(target), prompts, 100)
    rollout = speculative_rollout(target, tiny_draft(target, block_size=12), draft_block_size="auto")
    rollout._speculation.drafter = script(plain, 3)
    graphs = capture_steps(rollout)
    for _ in range(2):
        assert_same(greedy(rollout, prompts, 100), plain)
    assert graphs.captures == 4 and set(rollout._speculation.controller.seconds) == {(2, n) for n in (1, 4, 8, 12)}


def test_released_graphs_and_counts_are_made_anew(accelerator):
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    rollout = speculative_rollout(target)
    graphs = capture_steps(rollout)
    first = greedy(rollout, prompts, 12)
    counts = figures(rollout)
    rollout.release_memory()
    assert not len(graphs) and not rollout._speculation.stats.reached
    assert_same(greedy(rollout, prompts, 12), first)
    assert figures(rollout) == counts and graphs.captures == 2
