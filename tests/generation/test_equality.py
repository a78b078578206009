# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Continuous is fixed is alone: any number of slots, prompts of 1 to 200 tokens, rows that end at every moment."""

import random
from types import SimpleNamespace

import pytest
import torch
from harness import LateFlags, answers, assert_same_answers, prompt, rollout_of
from models import ragged_prompts, solo, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail
from deepspeed_hybrid.generation.scheduler import SlotScheduler

pytestmark = pytest.mark.core

LENGTHS, SAMPLES, NEW_TOKENS = [1, 2, 31, 200, 64, 5, 130, 33, 3, 65, 17, 1], 2, 10
SLOTS = [1, 2, 3, 7]
GREEDY, SEEDED = dict(temperature=0.0), dict(temperature=1.2, seed=77, top_p=0.95)


def ends(free: list[list[int]], stops: set[int]) -> list[tuple[int, str]]:
    """Length and reason of each row, given what it would say without stops."""
    found = []
    for tokens in free:
        length = next((at + 1 for at, token in enumerate(tokens) if token in stops), None)
        found.append((length or len(tokens), "stop" if length else "length"))
    return found


def every_moment(free: list[list[int]]) -> list[int]:
    """Stop ids by which rows end with their first token, their second, in the midst, several at one step, with the
    very last one they may have, and by their limit."""
    chance = random.Random(0)
    tokens = sorted({token for row in free for token in row})
    for _ in range(20000):
        stops = set(chance.sample(tokens, chance.randint(2, 8)))
        found = ends(free, stops)
        inner = [length for length, _ in found if 2 < length < NEW_TOKENS]
        wanted = {(1, "stop"), (2, "stop"), (NEW_TOKENS, "stop"), (NEW_TOKENS, "length")}
        if wanted <= set(found) and len(set(inner)) > 1 and len(inner) > len(set(inner)):
            return sorted(stops)
    raise AssertionError("no stop ids for this model")


def run(rollout, prompts, stops, slots=None, **options):
    sampling = SamplingConfig(
        max_new_tokens=NEW_TOKENS,
        n_samples_per_prompt=SAMPLES,
        stop_token_ids=stops,
        continuous_batch_size=slots,
        **options,
    )
    return rollout.generate(RolloutRequest(*prompts), sampling)


@pytest.fixture(scope="module")
def bench():
    """Greedy against Hugging Face on each prompt alone; seeded against a fixed batch, whose noise goes by row."""
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    free = [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(LENGTHS))]
    stops = every_moment([one.tokens.tolist() for one in free])
    oracle = [
        SimpleNamespace(tokens=one.tokens[:length], logprobs=one.logprobs[:length])
        for one, (length, _) in zip(free, ends([one.tokens.tolist() for one in free], set(stops)), strict=True)
    ]
    seeded = run(rollout_of(model), prompts, None, **SEEDED)
    own_stops = every_moment([row.tolist() for row in answers(seeded)])
    fixed = run(rollout_of(model, shrink_tail=False), prompts, own_stops, **SEEDED)
    return SimpleNamespace(
        model=model, prompts=prompts, stops=stops, oracle=oracle, free=seeded, own_stops=own_stops, fixed=fixed
    )


@pytest.fixture(params=[None, 3], ids=["at once", "late"])
def poll_every(request, monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    if request.param:
        monkeypatch.setattr(loop, "StopFlags", LateFlags)
    return request.param or 8


@pytest.fixture
def refilled(monkeypatch):
    """Slots that have had a second row."""
    used, again, admit = set(), set(), SlotScheduler.admit

    def noted(scheduler):
        placed = admit(scheduler)
        slots = {slot for slot, _ in placed}
        again.update(slots & used)
        used.update(slots)
        return placed

    monkeypatch.setattr(SlotScheduler, "admit", noted)
    return again


@pytest.mark.parametrize("slots", SLOTS)
def test_greedy(bench, slots, poll_every, refilled):
    rollout = rollout_of(bench.model, poll_every=poll_every)
    batch = run(rollout, bench.prompts, bench.stops, slots, **GREEDY)
    assert_same_answers(batch, bench.oracle, SAMPLES)
    assert refilled == set(range(slots))
    found = list(zip(batch.response_lengths.tolist(), batch.finish_reasons, strict=True))
    assert {(1, "stop"), (2, "stop"), (NEW_TOKENS, "stop"), (NEW_TOKENS, "length")} <= set(found)


def test_greedy_in_a_fixed_batch(bench):
    assert_same_answers(run(rollout_of(bench.model), bench.prompts, bench.stops, **GREEDY), bench.oracle, SAMPLES)


@pytest.mark.parametrize("slots", SLOTS)
def test_seeded(bench, slots, poll_every, refilled):
    rollout = rollout_of(bench.model, poll_every=poll_every)
    batch = run(rollout, bench.prompts, bench.own_stops, slots, **SEEDED)
    assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(bench.fixed)]
    assert batch.finish_reasons == bench.fixed.finish_reasons
    torch.testing.assert_close(batch.logprobs, bench.fixed.logprobs, atol=5e-5, rtol=0)
    assert refilled == set(range(slots))


def test_stops_only_cut_what_is_said_without_them(bench):
    whole = [row.tolist() for row in answers(bench.free)]
    lengths = [length for length, _ in ends(whole, set(bench.own_stops))]
    assert [row.tolist() for row in answers(bench.fixed)] == [
        row[:length] for row, length in zip(whole, lengths, strict=True)
    ]
