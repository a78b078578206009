# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a row's tokens depend on: the seed, its request and sample index and its prompt. Nothing else."""

from types import SimpleNamespace

import pytest
import torch
from harness import LateFlags, answers, rollout_of
from models import PAD, ragged_prompts, tiny_model

from deepspeed_hybrid import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop

LENGTHS, SAMPLES = [3, 11, 1, 7], 3
NEW_TOKENS, STOPS = 14, list(range(40, 70))  # an answer has about eight tokens
SEED = 2024


@pytest.fixture(scope="module", params=["qwen3_5", "qwen2_5"])
def bench(request):
    """A model, prompts, and the answers that every test compares with."""
    model, prompts = tiny_model(request.param), ragged_prompts(LENGTHS)
    wanted = sample(rollout_of(model), prompts)
    lengths = wanted.response_lengths.tolist()
    assert min(lengths) < 5 and max(lengths) > 8, "the rows must end at different steps"
    return SimpleNamespace(model=model, prompts=prompts, wanted=wanted)


def sample(rollout, prompts, **options) -> RolloutBatch:
    usual = dict(
        max_new_tokens=NEW_TOKENS,
        temperature=1.3,
        top_p=0.95,
        n_samples_per_prompt=SAMPLES,
        seed=SEED,
        stop_token_ids=STOPS,
        repetition_penalty=1.1,
    )
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(**{**usual, **options}))


def assert_same(batch: RolloutBatch, wanted: RolloutBatch) -> None:
    """Equal tokens, ends and reasons; logprobs up to the rounding of batches of another size."""
    assert batch.finish_reasons == wanted.finish_reasons
    assert [row.tolist() for row in answers(batch)] == [row.tolist() for row in answers(wanted)]
    torch.testing.assert_close(batch.logprobs, wanted.logprobs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 100, None])
@pytest.mark.parametrize("shared_prefill", [True, False])
def test_slots_and_shared_prefill(bench, slots, shared_prefill):
    rollout = rollout_of(bench.model, use_shared_prefill=shared_prefill)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=slots), bench.wanted)


@pytest.mark.parametrize("capacity", [31, 1000])
def test_larger_buckets(bench, capacity):
    rollout = rollout_of(bench.model, continuous_cache_capacity=capacity)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=4), bench.wanted)


def test_slots_left_over_by_a_larger_call(bench):
    """More lanes, longer buffers and old rows in them."""
    rollout = rollout_of(bench.model)
    sample(rollout, ragged_prompts([90] * 9, seed=8), seed=1, max_new_tokens=30)
    assert_same(sample(rollout, bench.prompts), bench.wanted)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=2), bench.wanted)


def test_padding(bench):
    ids, mask = bench.prompts
    wide = [torch.cat([torch.full((len(LENGTHS), 9), fill), part], dim=1) for fill, part in ((PAD, ids), (0, mask))]
    assert_same(sample(rollout_of(bench.model), tuple(wide)), bench.wanted)


@pytest.mark.parametrize("slots", [None, 2])
def test_batch_mates(bench, slots):
    """Other prompts beside it, of other lengths: row 1's request index and prompt are what they were."""
    ids, mask = ragged_prompts([15, 11, 8, 2, 4], seed=6)
    ids[1, -LENGTHS[1] :] = bench.prompts[0][1, -LENGTHS[1] :]

    batch = sample(rollout_of(bench.model), (ids, mask), continuous_batch_size=slots)

    rows = slice(1 * SAMPLES, 2 * SAMPLES)
    got, wanted = answers(batch), answers(bench.wanted)
    assert [row.tolist() for row in got[rows]] == [row.tolist() for row in wanted[rows]]
    assert [row.tolist() for row in got[:SAMPLES]] != [row.tolist() for row in wanted[:SAMPLES]]


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_number_of_samples(bench, samples):
    """Sample 0 is the same whether others are asked for or not."""
    batch = sample(rollout_of(bench.model), bench.prompts, n_samples_per_prompt=samples)
    got, wanted = answers(batch), answers(bench.wanted)
    for prompt in range(len(LENGTHS)):
        for index in range(min(samples, SAMPLES)):
            assert got[prompt * samples + index].tolist() == wanted[prompt * SAMPLES + index].tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 9, 40])
def test_a_limit_only_cuts(bench, new_tokens):
    batch = sample(rollout_of(bench.model), bench.prompts, max_new_tokens=new_tokens)
    shortest = min(new_tokens, NEW_TOKENS)
    assert [row[:shortest].tolist() for row in answers(batch)] == [
        row[:shortest].tolist() for row in answers(bench.wanted)
    ]


@pytest.mark.parametrize("poll_every", [1, 3, 1000])
@pytest.mark.parametrize("slots", [3, None])
def test_looking_late_and_seldom(bench, monkeypatch, poll_every, slots):
    monkeypatch.setattr(loop, "StopFlags", LateFlags)
    rollout = rollout_of(bench.model, poll_every=poll_every, enable_profiling=True)
    assert_same(sample(rollout, bench.prompts, continuous_batch_size=slots), bench.wanted)
    exact = int(bench.wanted.response_lengths.max()) - 1
    forwards = rollout.get_last_profile()["num_decode_forwards"]
    if slots is None:
        assert exact <= forwards <= min(NEW_TOKENS - 1, exact + 2 * poll_every)


def test_the_same_rollout_again(bench):
    rollout = rollout_of(bench.model)
    first, second = (sample(rollout, bench.prompts) for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.logprobs, second.logprobs)


# -------------------------------------------------------------------------------------------- what does change tokens


@pytest.mark.parametrize("seed", [0, SEED + 1, -1, 2**32 + SEED, -(2**63), 2**63 - 1])
def test_another_seed(bench, seed):
    """All 64 bits count."""
    batch = sample(rollout_of(bench.model), bench.prompts, seed=seed)
    same = [torch.equal(one, other) for one, other in zip(answers(batch), answers(bench.wanted), strict=True)]
    assert sum(same) <= 1


def test_samples_and_equal_prompts_differ(bench):
    ids, mask = (part[1:2].repeat(6, 1) for part in bench.prompts)
    batch = sample(rollout_of(bench.model), (ids, mask), n_samples_per_prompt=4, stop_token_ids=None)
    assert len({tuple(row.tolist()) for row in answers(batch)}) == 24


def test_greedy_samples_do_not_differ(bench):
    batch = sample(rollout_of(bench.model), bench.prompts, temperature=0.0)
    for prompt in range(len(LENGTHS)):
        rows = batch.input_ids[prompt * SAMPLES : (prompt + 1) * SAMPLES]
        assert torch.equal(rows, rows[:1].expand_as(rows))


# --------------------------------------------------------------------------------------------------- torch's generator


def test_no_seed_is_fresh_at_every_call_and_follows_torch(bench):
    rollout = rollout_of(bench.model)
    torch.manual_seed(77)
    first, second = (sample(rollout, bench.prompts, seed=None).input_ids for _ in range(2))
    torch.manual_seed(77)
    again = sample(rollout, bench.prompts, seed=None).input_ids
    torch.manual_seed(78)
    other = sample(rollout, bench.prompts, seed=None).input_ids
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_seeded_call_leaves_torchs_generator_alone(bench, temperature):
    rollout = rollout_of(bench.model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sample(rollout, bench.prompts, temperature=temperature)
    list(rollout.generate_iter(RolloutRequest(*bench.prompts), SamplingConfig(max_new_tokens=4, seed=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_torchs_generator_does_not_touch_a_seeded_call(bench):
    rollout = rollout_of(bench.model)
    torch.manual_seed(123)
    assert_same(sample(rollout, bench.prompts), bench.wanted)
