# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speculative is plain: the same tokens, logprobs and ends, whatever a drafter proposes and however much is right."""

import itertools
from dataclasses import replace

import pytest
import torch
from harness import LateFlags, answers, assert_same_answers, greedy, prompt, rollout_of
from models import VOCAB, ragged_prompts, solo, tiny_model
from speculative_cases import MASK, Schedule, ScriptedDrafter, figures, script_of, speculative_rollout, tiny_draft

from deepspeed_hybrid import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail

LENGTHS, SAMPLES, NEW_TOKENS = [5, 1, 17, 2], 2, 24
KINDS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=1.3),
    "top_k": dict(temperature=1.0, top_k=12),
    "top_p": dict(temperature=1.1, top_p=0.9),
    "min_p": dict(temperature=1.2, min_p=0.05),
    "all": dict(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    "penalised": dict(temperature=0.0, repetition_penalty=1.3),
    "raw": dict(temperature=0.7, logprobs_mode="raw"),
}


def run(rollout, prompts, samples: int = SAMPLES, **options) -> RolloutBatch:
    options = {"max_new_tokens": NEW_TOKENS, "seed": 11, **options}
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(n_samples_per_prompt=samples, **options))


def assert_same(one: RolloutBatch, other: RolloutBatch, atol: float = 5e-5) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.attention_mask, other.attention_mask)
    assert torch.equal(one.response_lengths, other.response_lengths)
    assert one.finish_reasons == other.finish_reasons
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=atol, rtol=0)


def cut(batch: RolloutBatch, tokens: int) -> RolloutBatch:
    """What a smaller ``max_new_tokens`` leaves of rows that are all longer."""
    start = int(batch.response_start_idx[0])
    assert min(batch.response_lengths.tolist()) >= tokens
    return replace(
        batch,
        input_ids=batch.input_ids[:, : start + tokens],
        attention_mask=batch.attention_mask[:, : start + tokens],
        logprobs=batch.logprobs[:, :tokens],
        response_lengths=torch.full_like(batch.response_lengths, tokens),
        finish_reasons=["length"] * len(batch.finish_reasons),
    )


@pytest.fixture(scope="module")
def target():
    return tiny_model()


# ----------------------------------------------------------------------------------------------- every count of rights


@pytest.mark.core
def test_greedy_is_hugging_face_for_every_number_of_right_drafts(target):
    """Rows of one batch have another number each, and in the course of a run each has every one."""
    prompts = ragged_prompts([6, 1, 13, 3, 2, 30, 9, 4])
    expected = [solo(target, prompt(prompts, row), NEW_TOKENS) for row in range(8)]
    script = {(row, 0): one.tokens.tolist() for row, one in enumerate(expected)}
    seen = set()

    def right(request: int, sample: int, length: int) -> int:
        seen.add((request + length) % 8)
        return (request + length) % 8

    rollout = speculative_rollout(target, ScriptedDrafter(script, right))
    assert_same_answers(greedy(rollout, prompts, NEW_TOKENS), expected)
    assert seen == set(range(8))


@pytest.mark.parametrize("right", range(8))
def test_each_number_of_right_drafts_alone(target, right):
    prompts = ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, **KINDS["greedy"])
    rollout = speculative_rollout(target, ScriptedDrafter(script_of(plain, SAMPLES), lambda *_: right))
    assert_same(run(rollout, prompts, **KINDS["greedy"]), plain)
    whole, rest = divmod(NEW_TOKENS - 1, right + 1)
    assert rollout.get_last_profile()["num_decode_forwards"] == whole + (rest > 0)
    reached = [whole * (place <= right) + (place < rest) for place in range(8)]  # of a row, by place in a block
    shares = [there / before if before else None for before, there in itertools.pairwise(reached)]
    assert figures(rollout)["acceptance"] == {8: shares}
    assert figures(rollout)["tokens_per_step"] == (NEW_TOKENS - 1) / (whole + (rest > 0))


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3_5_conditional", "gdn_only", "qwen2_5", "qwen3", "llama"])
def test_other_families(family):
    target, prompts = tiny_model(family), ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, 1, **KINDS["all"])
    script = ScriptedDrafter(script_of(plain), lambda request, sample, length: (3 * length + request) % 9)
    assert_same(run(speculative_rollout(target, script), prompts, 1, **KINDS["all"]), plain)
    assert_same(run(speculative_rollout(target), prompts, 1, **{**KINDS["all"], "max_new_tokens": 8}), cut(plain, 8))


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("proposes", ["model", "script"])
def test_seeded_tokens_are_the_plain_paths(target, kind, proposes):
    prompts = ragged_prompts(LENGTHS, width=20)
    plain = run(rollout_of(target), prompts, **kind)
    draft = None
    if proposes == "script":
        draft = ScriptedDrafter(script_of(plain, SAMPLES), lambda request, sample, length: (length + sample) % 8)
    assert_same(run(speculative_rollout(target, draft), prompts, **kind), plain)


def test_batch_invariant_rows_have_the_plain_paths_bits(target):
    prompts = ragged_prompts([5, 1])
    for kind in ("greedy", "all"):
        plain = run(rollout_of(target, batch_invariant=True), prompts, 1, **KINDS[kind])
        script = ScriptedDrafter(script_of(plain), lambda request, sample, length: (length + request) % 8)
        rollout = speculative_rollout(target, script, batch_invariant=True)
        assert_same(run(rollout, prompts, 1, **KINDS[kind]), plain, atol=0)


# ---------------------------------------------------------------------------------------------------------------- ends


def ending(batch: RolloutBatch, row: int, index: int) -> int:
    """A token that a row says first at that place."""
    tokens = answers(batch)[row].tolist()
    assert tokens[index] not in tokens[:index]
    return tokens[index]


@pytest.mark.parametrize("index", range(1, 9))
def test_a_stop_at_every_place_of_a_block(target, index):
    """Among the drafts, as the target's own last token, and as the anchor of the next block."""
    prompts = ragged_prompts([9, 4])
    free = run(rollout_of(target), prompts, 1, temperature=1.5)
    options = dict(temperature=1.5, stop_token_ids=[ending(free, 0, index)])
    plain = run(rollout_of(target), prompts, 1, **options)
    assert plain.response_lengths[0] == index + 1 and plain.finish_reasons[0] == "stop"
    # The drafter knows nothing of stops: what follows one in its block is what would have come.
    for right in (3, 7):
        rollout = speculative_rollout(target, ScriptedDrafter(script_of(free), lambda *_, right=right: right))
        assert_same(run(rollout, prompts, 1, **options), plain)


@pytest.mark.parametrize("new_tokens", range(1, 12))
def test_a_limit_at_every_place_of_a_block(target, new_tokens):
    prompts = ragged_prompts([9, 4])
    free = run(rollout_of(target), prompts, 1, **KINDS["greedy"])
    plain = run(rollout_of(target), prompts, 1, max_new_tokens=new_tokens, **KINDS["greedy"])
    rollout = speculative_rollout(target, ScriptedDrafter(script_of(free), lambda *_: 7))
    assert_same(run(rollout, prompts, 1, max_new_tokens=new_tokens, **KINDS["greedy"]), plain)
    assert set(plain.finish_reasons) == {"length"}


def test_rows_of_different_limits(target):
    prompts, limits = ragged_prompts(LENGTHS), [1, 9, 24, 2, 3, 17, 8, 10]
    options = dict(max_new_tokens_per_row=limits, **KINDS["sampled"])
    plain = run(rollout_of(target), prompts, **options)
    assert plain.response_lengths.tolist() == limits
    script = ScriptedDrafter(script_of(plain, SAMPLES), lambda *_: 5)
    for draft in (None, script):
        assert_same(run(speculative_rollout(target, draft), prompts, **options), plain)


def test_the_last_positions_of_cache_and_model():
    """Blocks reach beyond the capacity of slots, and beyond the positions that the model has."""
    target = tiny_model()
    target.config.max_position_embeddings = 64
    prompts = ragged_prompts([40, 64 - NEW_TOKENS])
    plain = run(rollout_of(target), prompts, 1, **KINDS["greedy"])
    script = ScriptedDrafter(script_of(plain), lambda request, sample, length: 3 + request)
    for draft in (None, script):
        rollout = speculative_rollout(target, draft, continuous_cache_capacity=64)
        assert_same(run(rollout, prompts, 1, **KINDS["greedy"]), plain)
        assert rollout._arena.cache.capacity == 64


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("blocks", [(1, 8, 4), (8, 1, 1, 2), (4, 16, 1)], ids=str)
def test_blocks_of_changing_length(target, blocks):
    prompts = ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, 1, **KINDS["all"])
    script = ScriptedDrafter(script_of(plain), lambda request, sample, length: (length + request) % 5)
    for drafter in (tiny_draft(target, block_size=16), script):
        rollout = speculative_rollout(target, drafter, Schedule(*blocks))
        assert_same(run(rollout, prompts, 1, **KINDS["all"]), plain)
        assert set(figures(rollout)["steps"]) == set(blocks)
        assert figures(rollout)["tokens"] == len(LENGTHS) * (NEW_TOKENS - 1)  # but for those that prompts give


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_continuous_batching(target, slots, late, monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    if late:
        monkeypatch.setattr(loop, "StopFlags", LateFlags)
    prompts = ragged_prompts(LENGTHS)
    free = run(rollout_of(target), prompts, **KINDS["sampled"])
    options = dict(stop_token_ids=[ending(free, row, row + 3) for row in (0, 2, 5)], **KINDS["sampled"])
    plain = run(rollout_of(target), prompts, **options)
    script = ScriptedDrafter(script_of(free, SAMPLES), lambda request, sample, length: (length + request) % 8)
    for draft in (None, script):
        rollout = speculative_rollout(target, draft, poll_every=3)
        assert_same(run(rollout, prompts, continuous_batch_size=slots, **options), plain)
        assert rollout.get_last_continuous_stats()["refills"] == 8 - slots


def test_rows_one_at_a_time(target):
    prompts = ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, **KINDS["sampled"])
    rollout = speculative_rollout(target)
    request, sampling = RolloutRequest(*prompts), SamplingConfig(NEW_TOKENS, n_samples_per_prompt=SAMPLES, seed=11)
    sampling.temperature = KINDS["sampled"]["temperature"]
    rows = {row.index: row.tokens.tolist() for row in rollout.generate_iter(request, sampling)}
    assert rows == {row: tokens.tolist() for row, tokens in enumerate(answers(plain))}


# --------------------------------------------------------------------------------------------------------- adversaries


class Adversary(ScriptedDrafter):
    """Proposes stop ids, masks, and whatever else one may come up with."""

    def __init__(self, tokens: list[int]):
        super().__init__({}, lambda *_: 0)
        self.tokens = itertools.cycle(tokens)

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        rows = [[next(self.tokens) for _ in range(tokens - 1)] for _ in range(state.token.numel())]
        return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("tokens", [[0], [MASK], [7, 9], list(range(VOCAB))], ids=["pad", "mask", "stops", "all"])
def test_adversarial_drafts(target, tokens):
    prompts = ragged_prompts(LENGTHS)
    options = dict(stop_token_ids=[7, 9], **KINDS["all"])
    plain = run(rollout_of(target), prompts, **options)
    assert_same(run(speculative_rollout(target, Adversary(tokens)), prompts, **options), plain)


class Echo(ScriptedDrafter):
    """Wrong at once, and then again and again what the model says in that place."""

    def propose(self, state, tokens: int, kv_length: int) -> torch.Tensor:
        keys = zip(state.request.tolist(), state.sample.tolist(), state.length.tolist(), strict=True)
        coming = [(self.answers.get((request, sample), []) + [0] * 99)[length] for request, sample, length in keys]
        return torch.tensor([[(token + 1) % VOCAB] + [token] * (tokens - 2) for token in coming])


@pytest.mark.parametrize("kind", ["greedy", "penalised"])
def test_what_is_right_behind_something_wrong_does_not_count(target, kind):
    prompts = ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, 1, **KINDS[kind])
    rollout = speculative_rollout(target, Echo(script_of(plain), lambda *_: 0))
    assert_same(run(rollout, prompts, 1, **KINDS[kind]), plain)
    assert figures(rollout)["tokens_per_step"] == 1


def test_the_mask_token_may_be_an_answer(target):
    """It is a token of the vocabulary like others: nothing strips it."""
    prompts = ragged_prompts([6, 3])
    plain = run(rollout_of(target), prompts, 1, **KINDS["greedy"])
    mask = answers(plain)[0].tolist()[4]
    draft = tiny_draft(target, mask_token_id=mask)
    assert_same(run(speculative_rollout(target, draft), prompts, 1, **KINDS["greedy"]), plain)


def test_a_second_call_and_one_after_other_prompts(target):
    """What a drafter keeps of slots begins anew with each row."""
    prompts, others = ragged_prompts(LENGTHS), ragged_prompts([30, 2, 8], seed=5)
    rollout = speculative_rollout(target)
    first = run(rollout, prompts, **KINDS["greedy"])
    counts = figures(rollout)
    run(rollout, others, **KINDS["sampled"])
    assert_same(run(rollout, prompts, **KINDS["greedy"]), first, atol=0)
    assert figures(rollout) == counts


@pytest.mark.parametrize("slots", [1, 2])
def test_figures_of_lanes_are_of_steps_and_not_of_tokens(target, slots):
    prompts = ragged_prompts(LENGTHS)
    plain = run(rollout_of(target), prompts, 1, **KINDS["greedy"])
    rollout = speculative_rollout(target, ScriptedDrafter(script_of(plain), lambda *_: 7), shrink_tail=False)
    run(rollout, prompts, 1, continuous_batch_size=slots, **KINDS["greedy"])
    stats = rollout.get_last_continuous_stats()
    assert stats["wasted_lane_steps"] == stats["lane_steps"] - figures(rollout)["row_steps"] == 0
    assert stats["occupancy"] == stats["queued_occupancy"] == 1
