# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Reported faults of sequence state: padding that leaks in, state that is dropped, not rolled back, or overwritten."""

import copy

import pytest
import torch
from harness import (
    answers,
    assert_same_answers,
    by_hand,
    feed,
    force_tokens,
    greedy,
    new_cache,
    prompt,
    record_logits,
    rollout_of,
    stepwise_logits,
)
from models import FAMILIES, VOCAB, ragged_prompts, solo, tiny_model

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.cache.snapshot import CacheSnapshot
from deepspeed_hybrid.generation.prefill import prefill

pytestmark = pytest.mark.core

WITH_STATE = ["qwen3_5", "qwen3_next", "gdn_only"]
STOP = 255


def oracles(model, prompts, new_tokens: int) -> list:
    return [solo(model, prompt(prompts, row), new_tokens) for row in range(len(prompts[0]))]


@torch.no_grad()
def teacher_forced(model, tokens: torch.Tensor, script: torch.Tensor) -> torch.Tensor:
    """Logits [steps, V] that each token of ``script`` is chosen from, by one plain forward."""
    fed = torch.cat([tokens, script[:-1]])
    return model(input_ids=fed[None, :], use_cache=False).logits[0, len(tokens) - 1 :].float()


def slot_bits(rollout, slot: int) -> list[torch.Tensor]:
    """Everything that belongs to a slot, cloned."""
    buffers = [buffer[slot].clone() for buffer in rollout._arena.cache.buffers()]
    rows = [
        value[slot].clone()
        for name, value in rollout._arena.state._items()
        if name != "stop_ids" and value is not None
    ]
    return buffers + rows


# ----------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("family", [*WITH_STATE, "qwen3"])
@pytest.mark.parametrize("length, pads", [(3, 4), (3, 1), (3, 2), (3, 3), (1, 1), (1, 6), (2, 62), (5, 64)])
def test_pad_mask_is_not_skipped_at_batch_one(family, length, pads):
    """huggingface/transformers#46773"""
    model = tiny_model(family)
    prompts = ragged_prompts([length], width=length + pads)
    rollout = rollout_of(model)
    seen = record_logits(rollout)

    batch = greedy(rollout, prompts, 12)

    expected = oracles(model, prompts, 12)
    assert_same_answers(batch, expected)
    torch.testing.assert_close(seen[0][0], expected[0].logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [*WITH_STATE, "qwen3"])
@pytest.mark.parametrize(
    "lengths",
    [[3, 7], [6, 7], [5, 7], [4, 7], [7, 1, 4], [1, 70], [64, 66], [2, 2, 3]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_padding_is_masked_before_the_conv_too(family, lengths):
    """AI-Hypercomputer/maxtext#5295"""
    model = tiny_model(family)
    prompts = ragged_prompts(lengths)
    assert_same_answers(greedy(rollout_of(model), prompts, 12), oracles(model, prompts, 12))


@pytest.mark.parametrize("family", WITH_STATE)
def test_content_of_padding_is_never_seen(family):
    """Whatever ids and embeddings padding has."""
    model = tiny_model(family)
    ids, mask = ragged_prompts([3, 7, 5])
    script = torch.randint(1, VOCAB, (3, 12), generator=torch.Generator().manual_seed(6))

    def logits(prompts) -> torch.Tensor:
        rollout = rollout_of(model)
        seen = record_logits(rollout)
        force_tokens(rollout, script)
        greedy(rollout, prompts, 12)
        return stepwise_logits(seen, 3)

    expected = logits((ids, mask))
    with torch.no_grad():
        model.get_input_embeddings().weight[0].mul_(100)

    other = logits((ids.masked_fill(mask == 0, 77), mask))
    torch.testing.assert_close(other, expected, atol=1e-5, rtol=0)  # experts' sums are grouped with padding's


# ------------------------------------------------------------------------------------------- state carried and kept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("between", [None, [9], [70, 3, 20, 4, 5]], ids=["at once", "smaller", "larger"])
def test_static_slots_serve_a_second_call(family, between):
    """huggingface/transformers#46441, and a call of another shape in between."""
    model = tiny_model(family)
    prompts = ragged_prompts([6, 11])
    rollout = rollout_of(model)

    first = greedy(rollout, prompts, 16)
    if between:
        greedy(rollout, ragged_prompts(between, seed=5), 20)
    second = greedy(rollout, prompts, 16)

    assert_same_answers(first, oracles(model, prompts, 16))
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.logprobs, second.logprobs)


@pytest.mark.parametrize("family", WITH_STATE)
@pytest.mark.parametrize("parts", [(3, 4), (1, 6), (6, 1), (2, 2, 3), (1,) * 7], ids=str)
def test_forward_of_several_tokens_keeps_the_state_it_finds(family, parts):
    """huggingface/transformers#45513, fla-org/flash-linear-attention#285"""
    model = tiny_model(family)
    tokens = prompt(ragged_prompts([7]), 0)
    cache = new_cache(model)

    start = 0
    for part in parts:
        logits = feed(cache, tokens[start : start + part], start)
        start += part

    torch.testing.assert_close(logits, solo(model, tokens, 1).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [*WITH_STATE, "qwen3"])
@pytest.mark.parametrize("token_budget", [1, 2, 3, 6, 7, 21, 60])
@pytest.mark.parametrize("lengths", [[7], [3, 7, 5], [70, 1, 9]], ids=lambda lengths: "-".join(map(str, lengths)))
def test_prefill_in_chunks_is_one_prefill(family, token_budget, lengths):
    model = tiny_model(family)
    prompts = ragged_prompts(lengths)
    chunked, whole = new_cache(model, slots=4, capacity=128), new_cache(model, slots=4, capacity=128)
    slots = [2, 0, 3][: len(lengths)]

    def run(cache, budget):
        return by_hand(cache, lambda: prefill(cache.call, cache.slots, prompts[0], lengths, slots, budget))

    logits = run(chunked, token_budget)

    torch.testing.assert_close(logits, run(whole, 10**6), atol=1e-4, rtol=0)
    for row, length in enumerate(lengths):  # and what comes after does not notice
        follow = torch.tensor([9, 4])
        torch.testing.assert_close(
            feed(chunked, follow, length, slots[row]), feed(whole, follow, length, slots[row]), atol=1e-4, rtol=0
        )
        expected = solo(model, prompt(prompts, row), 1).logits[0]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("family", [*WITH_STATE, "qwen3"])
@pytest.mark.parametrize("wrong", [1, 2, 3, 8])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_rolled_back_tokens_were_never_fed(family, wrong, one_by_one):
    """huggingface/transformers#49036"""
    model = tiny_model(family)
    tokens = prompt(ragged_prompts([9]), 0)
    other = prompt(ragged_prompts([5], seed=8), 0)
    rolled, straight = new_cache(model), new_cache(model)
    for cache in (rolled, straight):
        feed(cache, tokens[:4], 0, slot=1)
        feed(cache, other, 0, slot=0)

    snapshot = CacheSnapshot(rolled.slots, torch.tensor([1]))
    bad = (torch.arange(wrong) * 31 + 100) % VOCAB
    for part in bad.split(1) if one_by_one else [bad]:
        feed(rolled, part, 4, slot=1)
    feed(rolled, other[:2], 5, slot=0)
    snapshot.restore()

    assert torch.equal(feed(rolled, tokens[4:], 4, slot=1), feed(straight, tokens[4:], 4, slot=1))
    feed(straight, other[:2], 5, slot=0)
    assert torch.equal(feed(rolled, other, 7, slot=0), feed(straight, other, 7, slot=0)), "another slot went back too"


@pytest.mark.parametrize("family", [*WITH_STATE, "qwen3"])
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_accepting_a_part_of_a_draft(family, accepted):
    """The same report: 3 fed, some kept."""
    model = tiny_model(family)
    tokens = prompt(ragged_prompts([12]), 0)
    rolled = new_cache(model)
    feed(rolled, tokens[:4], 0)
    snapshot = CacheSnapshot(rolled.slots, torch.tensor([0]))
    draft = tokens[4:7].clone()
    draft[accepted:] += 1

    feed(rolled, draft % VOCAB, 4)
    snapshot.restore()
    if accepted:
        feed(rolled, tokens[4 : 4 + accepted], 4)
    logits = feed(rolled, tokens[4 + accepted :], 4 + accepted)

    torch.testing.assert_close(logits, solo(model, tokens, 1).logits[0], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------ full against steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 5, 70])
def test_steps_give_the_logits_of_a_full_forward(family, length):
    """huggingface/transformers#46190"""
    model = tiny_model(family)
    prompts = ragged_prompts([length])
    script = torch.randint(1, VOCAB, (1, 64), generator=torch.Generator().manual_seed(4))
    rollout = rollout_of(model)
    seen = record_logits(rollout)
    force_tokens(rollout, script)

    batch = greedy(rollout, prompts, 64)

    full = teacher_forced(model, prompt(prompts, 0), script[0])
    assert torch.equal(batch.input_ids[:, length:], script)
    assert float((stepwise_logits(seen, 1)[:, 0] - full).abs().max()) < 1e-4
    logprobs = full.log_softmax(-1).gather(1, script.T)[:, 0]
    torch.testing.assert_close(batch.logprobs[0], logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", WITH_STATE)
def test_bf16_steps_stay_near_the_full_forward(family):
    """The same report in bf16: steps are no further from the full forward than bf16 itself is from fp32."""
    model = tiny_model(family).bfloat16()
    exact = copy.deepcopy(model).float()
    prompts = ragged_prompts([5])
    script = torch.randint(1, VOCAB, (1, 64), generator=torch.Generator().manual_seed(4))
    rollout = rollout_of(model)
    seen = record_logits(rollout)
    force_tokens(rollout, script)

    greedy(rollout, prompts, 64)

    steps = stepwise_logits(seen, 1)[:, 0]
    full = teacher_forced(model, prompt(prompts, 0), script[0])
    rounding = (full - teacher_forced(exact, prompt(prompts, 0), script[0])).abs()
    difference = (steps - full).abs()
    assert float(difference.mean()) <= 1.5 * float(rounding.mean())
    assert float(difference[-16:].mean()) <= 2 * float(rounding.mean()), "grows with the length"


# ---------------------------------------------------------------------------------------------------- slots and rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 64])
def test_continuous_batching_takes_every_layer_kind(family, slots):
    """huggingface/transformers#48305: and any number of slots, refilled as rows end."""
    model = tiny_model(family)
    prompts = ragged_prompts([2, 9, 4, 17])
    rollout = rollout_of(model)

    batch = greedy(rollout, prompts, 10, continuous_batch_size=slots)

    assert_same_answers(batch, oracles(model, prompts, 10))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 9, 11])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_fewer_rows_than_lanes(family, rows):
    """vllm-project/vllm#28202: free lanes hold old rows, then large numbers, and neither shows nor changes."""
    model = tiny_model(family)
    rollout = rollout_of(model)
    greedy(rollout, ragged_prompts([30, 3, 20, 4, 5, 6, 9, 9, 30, 2, 8, 8], seed=5), 20)
    prompts = ragged_prompts([3, 7, 5, 1, 9, 4, 2, 8, 6, 3, 3][:rows])
    expected = oracles(model, prompts, 12)

    assert_same_answers(greedy(rollout, prompts, 12), expected)
    for buffer in rollout._arena.cache.buffers():
        buffer.fill_(1e4)
    assert_same_answers(greedy(rollout, prompts, 12), expected)

    free = range(rows, rollout._arena.lanes)
    assert all(bool((buffer[slot] == 1e4).all()) for buffer in rollout._arena.cache.buffers() for slot in free)


@pytest.mark.parametrize("family", WITH_STATE)
@pytest.mark.parametrize("stop_step", [1, 2, 3])
@pytest.mark.parametrize("stopped", [0, 2, 3])
def test_stopped_row_keeps_its_state_and_disturbs_nobody(family, stopped, stop_step):
    """vllm-project/vllm#37728, vllm-project/vllm-ascend#12040"""
    model = tiny_model(family)
    prompts = ragged_prompts([3, 7, 5, 1])
    script = torch.randint(1, STOP, (4, 23), generator=torch.Generator().manual_seed(2))
    script[stopped, stop_step - 1] = STOP
    rollout = rollout_of(model)
    force_tokens(rollout, script)

    rows = rollout.generate_iter(
        RolloutRequest(*prompts), SamplingConfig(max_new_tokens=23, temperature=0.0, stop_token_ids=[STOP])
    )
    first = next(rows)
    before = slot_bits(rollout, stopped)
    others = list(rows)
    after = slot_bits(rollout, stopped)

    assert (first.index, first.finish_reason, len(first.tokens)) == (stopped, "stop", stop_step)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    # The parked state is that of the tokens fed: the prompt and all answers but the stop id.
    fed = torch.cat([prompt(prompts, stopped), script[stopped, : stop_step - 1]])
    alone = new_cache(model)
    feed(alone, fed, 0)
    for mine, its in zip(rollout._arena.cache.layers, alone.slots.layers, strict=True):
        for name in ("gdn_conv", "gdn_state"):
            if name in its.tensors():
                torch.testing.assert_close(mine.tensors()[name][stopped], its.tensors()[name][0], atol=1e-4, rtol=1e-4)
    assert sorted(row.index for row in others) == [row for row in range(4) if row != stopped]
    for row in others:
        assert row.tokens.tolist() == script[row.index].tolist()
        expected = teacher_forced(model, prompt(prompts, row.index), script[row.index]).log_softmax(-1)
        torch.testing.assert_close(
            row.logprobs, expected.gather(1, script[row.index][:, None])[:, 0], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("family", WITH_STATE)
@pytest.mark.parametrize("slots", [2, 4])
def test_refilled_slot_starts_clean(family, slots):
    """The same reports: a slot whose row stopped takes the next prompt."""
    model = tiny_model(family)
    prompts = ragged_prompts([3, 7, 5, 1, 4, 12, 2])
    script = torch.randint(1, STOP, (7, 20), generator=torch.Generator().manual_seed(2))
    ends = [20, 2, 1, 9, 20, 1, 5]
    for row, end in enumerate(ends):
        script[row, end - 1] = STOP
    rollout = rollout_of(model)
    force_tokens(rollout, script)

    batch = greedy(rollout, prompts, 20, continuous_batch_size=slots, stop_token_ids=[STOP])

    assert batch.response_lengths.tolist() == ends
    assert batch.finish_reasons == ["stop"] * 7
    for row, end in enumerate(ends):
        expected = teacher_forced(model, prompt(prompts, row), script[row, :end]).log_softmax(-1)
        assert answers(batch)[row].tolist() == script[row, :end].tolist()
        torch.testing.assert_close(
            batch.logprobs[row, :end], expected.gather(1, script[row, :end, None])[:, 0], atol=1e-4, rtol=0
        )
