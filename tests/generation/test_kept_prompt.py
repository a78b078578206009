# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Samples that wait for a slot find their prompt prefilled: how often prompts run, and that answers stay the same."""

from types import SimpleNamespace

import pytest
import torch
from harness import rollout_of
from models import ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop
from deepspeed_hybrid.generation.kept_prompt import KeptPrompt

PROMPTS, SAMPLES = [5, 9, 3], 4


@pytest.fixture(scope="module")
def bench():
    model = tiny_model()
    request = RolloutRequest(*ragged_prompts(PROMPTS))
    alone = rollout_of(model, use_shared_prefill=False)
    return SimpleNamespace(model=model, request=request, wanted=generate(alone, request))


def generate(rollout, request, **options):
    sampling = SamplingConfig(max_new_tokens=11, temperature=1.0, seed=4, n_samples_per_prompt=SAMPLES, **options)
    return rollout.generate(request, sampling)


def prefilled(monkeypatch) -> list[list[int]]:
    """The lengths of the prompts of every prefill from now on."""
    seen: list[list[int]] = []
    original = loop.prefill

    def noted(model, cache, ids, lengths, *args, **kwargs):
        seen.append(lengths)
        return original(model, cache, ids, lengths, *args, **kwargs)

    monkeypatch.setattr(loop, "prefill", noted)
    return seen


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 12])
def test_every_prompt_runs_once(bench, monkeypatch, slots):
    rollout, seen = rollout_of(bench.model), prefilled(monkeypatch)
    batch = generate(rollout, bench.request, continuous_batch_size=slots)
    assert sorted(sum(seen, [])) == sorted(PROMPTS)
    torch.testing.assert_close(batch.logprobs, bench.wanted.logprobs, atol=5e-5, rtol=0)
    assert torch.equal(batch.input_ids, bench.wanted.input_ids)


def test_without_sharing_every_row_runs_its_prompt(bench, monkeypatch):
    rollout, seen = rollout_of(bench.model, use_shared_prefill=False), prefilled(monkeypatch)
    generate(rollout, bench.request, continuous_batch_size=2)
    assert sorted(sum(seen, [])) == sorted(PROMPTS * SAMPLES)


def test_a_prompt_is_kept_as_long_as_somebody_waits_for_it(bench, monkeypatch):
    held = []
    original = loop._admit

    def noted(arena, prompts, plan, placed, kept):
        original(arena, prompts, plan, placed, kept)
        held.append((placed[-1][1], kept.request, len(kept._slot)))

    monkeypatch.setattr(loop, "_admit", noted)
    generate(rollout_of(bench.model), bench.request, continuous_batch_size=3)
    assert held[0] == (2, 0, held[0][2]) and held[0][2] > 0
    for last, request, buffers in held:
        waits = (last + 1) % SAMPLES != 0
        assert request == (last // SAMPLES if waits else None) and (buffers > 0) == waits


def test_what_is_restored_is_what_was_kept(bench):
    rollout = rollout_of(bench.model)
    generate(rollout, bench.request)
    cache, kept = rollout._arena.cache, KeptPrompt()
    kept.keep(cache, 1, 0, torch.zeros(1, 7))
    before = [buffer[1].clone() for buffer in cache.buffers()]
    for buffer in cache.buffers():
        buffer[1].fill_(float("nan"))
    kept.restore(cache, 4)
    assert all(torch.equal(buffer[4], rows) for buffer, rows in zip(cache.buffers(), before, strict=True))
