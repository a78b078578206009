# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""With an MTP head answers are the plain path's: greedy and sampled, at stops and limits, over slots and graphs."""

import itertools

import pytest
import torch
from harness import LateFlags, answers, greedy, rollout_of
from models import PAD, ragged_prompts
from mtp_cases import mtp_rollout, taught_mtp, tiny_mtp, tiny_target
from recorded_graph import capture_prompts, capture_steps, recording_accelerator
from speculative_cases import Schedule, figures

from deepspeed_hybrid import RolloutBatch, RolloutRequest, SamplingConfig
from deepspeed_hybrid.generation import loop, tail

LENGTHS, NEW_TOKENS = [5, 1, 17, 2], 14
KINDS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.1, n_samples_per_prompt=2),
    "all": dict(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, n_samples_per_prompt=2),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompts():
    return ragged_prompts(LENGTHS, width=20)


@pytest.fixture(scope="module")
def taught(target, prompts):
    return taught_mtp(target, prompts, NEW_TOKENS)


def run(rollout, prompts, **options) -> RolloutBatch:
    sampling = SamplingConfig(**{"max_new_tokens": NEW_TOKENS, "seed": 11, **options})
    return rollout.generate(RolloutRequest(*prompts), sampling)


def assert_same(one: RolloutBatch, other: RolloutBatch) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.attention_mask, other.attention_mask)
    assert one.finish_reasons == other.finish_reasons
    torch.testing.assert_close(
        one.logprobs, other.logprobs, atol=5e-4, rtol=0
    )  # a temperature of 0.1 makes ten of 5e-5


@pytest.mark.parametrize(
    ("kind", "proposes"), [("greedy", "taught"), ("sampled", "taught"), ("sampled", "random"), ("all", "random")]
)
def test_seeded_tokens_are_the_plain_paths(target, prompts, taught, kind, proposes):
    plain = run(rollout_of(target), prompts, **KINDS[kind])
    rollout = mtp_rollout(target, taught if proposes == "taught" else None)
    assert_same(run(rollout, prompts, **KINDS[kind]), plain)
    if proposes == "taught":
        assert figures(rollout)["tokens_per_step"] > (3 if kind == "greedy" else 1.1)


def test_a_head_that_gives_no_numbers(target, prompts, taught):
    """Not even NaN reaches an answer; nor does what it left in slots reach the guesses for later rows."""
    draft = tiny_mtp(target)
    draft.fc.weight.fill_(float("nan"))
    plain = run(rollout_of(target), prompts, **KINDS["greedy"])
    rollout = mtp_rollout(target, draft)
    assert_same(run(rollout, prompts, **KINDS["greedy"]), plain)
    drafter = rollout._speculation.drafter
    assert drafter.cache.values.isnan().any()
    drafter.last.hidden.fill_(float("nan"))
    for mine, theirs in zip(draft.parameters(), taught.parameters(), strict=True):
        mine.copy_(theirs)
    rollout.sync_weights(1)
    assert_same(run(rollout, prompts, **KINDS["greedy"]), plain)
    assert figures(rollout)["tokens_per_step"] > 3


def test_in_a_model_that_reads_images(prompts):
    target = tiny_target("qwen3_5_conditional")
    plain = greedy(rollout_of(target), prompts, 8)
    rollout = mtp_rollout(target, taught_mtp(target, prompts, 8))
    assert_same(greedy(rollout, prompts, 8), plain)
    assert figures(rollout)["tokens_per_step"] > 2


# ---------------------------------------------------------------------------------------------------------------- ends


def test_a_stop_at_every_place_of_a_block(target, prompts, taught):
    """Among right drafts, as the model's own last token, and as the next anchor; a row goes on beside it."""
    (free,) = itertools.islice(answers(run(rollout_of(target), prompts, **KINDS["greedy"])), 1)
    rollout, places = mtp_rollout(target, taught), []
    for index in range(1, 6):
        stop = int(free[index])
        if stop in free[:index] or stop == PAD:
            continue
        plain = run(rollout_of(target), prompts, stop_token_ids=[stop], **KINDS["greedy"])
        assert plain.response_lengths[0] == index + 1 and plain.finish_reasons[0] == "stop"
        assert_same(run(rollout, prompts, stop_token_ids=[stop], **KINDS["greedy"]), plain)
        assert figures(rollout)["tokens_per_step"] > 2
        places.append(index)
    assert len(places) >= 4


def test_limits_at_every_place_of_a_block(target, prompts, taught):
    for limits in ([1, 2, 3, 4], [5, 6, 7, 8]):
        plain = run(rollout_of(target), prompts, max_new_tokens_per_row=limits, **KINDS["greedy"])
        assert plain.response_lengths.tolist() == limits
        rollout = mtp_rollout(target, taught)
        assert_same(run(rollout, prompts, max_new_tokens_per_row=limits, **KINDS["greedy"]), plain)


def test_the_last_positions_of_a_slot(target, taught):
    """Blocks and passes reach beyond the capacity."""
    prompts = ragged_prompts([40, 64 - NEW_TOKENS])
    plain = run(rollout_of(target), prompts, **KINDS["greedy"])
    rollout = mtp_rollout(target, taught, draft_block_size=9, continuous_cache_capacity=64)
    assert_same(run(rollout, prompts, **KINDS["greedy"]), plain)
    assert rollout._arena.cache.capacity == 64


# ---------------------------------------------------------------------------------------------------- slots and graphs


def test_slots_that_are_taken_again(target, prompts, taught, monkeypatch):
    monkeypatch.setattr(tail, "WORTHWHILE_STEPS", 1)
    monkeypatch.setattr(loop, "StopFlags", LateFlags)
    free = answers(run(rollout_of(target), prompts, **KINDS["sampled"]))
    options = dict(stop_token_ids=[int(free[row][row + 3]) for row in (0, 2, 5)], **KINDS["sampled"])
    plain = run(rollout_of(target), prompts, **options)
    rollout = mtp_rollout(target, taught, Schedule(4, 1, 3), poll_every=3)
    assert_same(run(rollout, prompts, continuous_batch_size=3, **options), plain)
    assert rollout.get_last_continuous_stats()["refills"] == 5


def test_captured_steps_follow_weights_at_addresses_that_stay(taught):
    """Prompts are captured too; both models change in place, and a sync tells the copy that serves."""
    target, prompts = tiny_target(), ragged_prompts(LENGTHS, width=20)
    source = tiny_mtp(target)
    with recording_accelerator():
        rollout = mtp_rollout(target, source, Schedule(1, 4), draft_block_size=4)
        graphs, prompt_graphs, drafter = capture_steps(rollout), capture_prompts(rollout), rollout._speculation.drafter

        def answered() -> float:
            assert_same(greedy(rollout, prompts, 8), greedy(rollout_of(target), prompts, 8))
            return figures(rollout)["tokens_per_step"]

        assert answered() < 1.2
        addresses = [buffer.data_ptr() for buffer in (*rollout._arena.cache.buffers(), *drafter.draft.parameters())]
        for mine, theirs in zip(source.parameters(), taught.parameters(), strict=True):
            mine.copy_(theirs)
        assert answered() < 1.2  # nobody has told it
        rollout.sync_weights(1)
        assert answered() > 1.7
        generator = torch.Generator().manual_seed(0)
        for parameter in target.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        rollout.sync_weights(2)
        answered()
        held = (*rollout._arena.cache.buffers(), *drafter.draft.parameters())
        assert [buffer.data_ptr() for buffer in held] == addresses
    assert graphs.captures == 2 and prompt_graphs.captures == 1


def test_what_it_holds_is_reported(target, prompts):
    rollout = mtp_rollout(target, draft_block_size=3)
    run(rollout, prompts, **KINDS["greedy"])
    report, drafter, arena = rollout.memory_report(), rollout._speculation.drafter, rollout._arena
    kept = (drafter.cache.keys, drafter.cache.values, drafter.last.hidden)
    names = ("draft_keys", "draft_values", "draft_hidden")
    assert [report[name] for name in names] == [part.nbytes for part in kept]
    assert report["draft_weights"] == sum(part.nbytes for part in drafter.draft.parameters())
    assert drafter.cache_bytes(arena.cache.slots, arena.cache.capacity) == sum(part.nbytes for part in kept)
    assert arena.slot_bytes(arena.cache.capacity) == sum(buffer[0].nbytes for buffer in arena.cache.buffers())
    rollout.release_memory()
    assert drafter.cache is None and drafter.last is None and "draft_hidden" not in rollout.memory_report()


def test_lengths_that_pay(target, prompts, taught):
    rollout = mtp_rollout(target, taught, draft_block_size="auto")
    assert_same(greedy(rollout, prompts, 24), greedy(rollout_of(target), prompts, 24))
    assert rollout._speculation.controller.lengths == (1, 2, 3, 4)
    assert len(figures(rollout)["steps"]) > 1
