# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Speculative rollouts whose recurrent states are written late: their tokens, and what they leave in the slots."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from decode_cases import same_bits
from harness import answers, greedy, rollout_of, watch_chain
from models import ragged_prompts, tiny_model
from speculative_cases import Schedule, ScriptedDrafter, script_of, speculative_rollout
from tolerances import assert_close

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.cache.layers import SlotGdnLayer
from deepspeed_hybrid.generation.capacity import SlotBytes, cache_bytes
from deepspeed_hybrid.ops.gdn_deferred import gdn_deferred
from deepspeed_hybrid.ops.gdn_kept_block import PLACES, gdn_kept_block
from deepspeed_hybrid.ops.gdn_windows import gdn_windows
from deepspeed_hybrid.tools.models import decay_slowly

NEW_TOKENS = 40
LATE = {"gdn_deferred": gdn_deferred, "gdn_kept_block": gdn_kept_block, "gdn_windows": gdn_windows}


def late(rollout: HybridEngineRollout, many: int = 1) -> HybridEngineRollout:
    """Let states be written late from so many rows on."""
    rollout._injection.chain = replace(rollout._injection.chain, **LATE)
    rollout._injection.follow()
    rollout._arena.many_rows = lambda state_dtype: many
    return rollout


def slow_model(family: str = "qwen3_5") -> torch.nn.Module:
    """In which a token that is lost or counted twice shows."""
    model = tiny_model(family)
    decay_slowly(model)
    return model


def script(batch, samples: int = 1) -> ScriptedDrafter:
    """Right as often as a step's place says, from never to always."""
    return ScriptedDrafter(script_of(batch, samples), lambda request, sample, length: (3 * length + request) % 17)


def left(rollout: HybridEngineRollout, rows: int) -> list[torch.Tensor]:
    """Windows and states of the first slots, with what is kept beside these."""
    lanes, parts = rollout._arena.state.lanes(rows), []
    for layer in rollout._arena.cache.layers:
        if isinstance(layer, SlotGdnLayer):
            state, rings = layer.state[:rows], (part[:rows] for part in layer.deferred)
            places = lanes.position, lanes.length, lanes.stepped, torch.ones_like(lanes.parked)
            parts += [layer.window[:rows], layer.deferral.settled(state, *rings, *places)]
    return parts


@pytest.mark.parametrize("family", ["qwen3_5", "gdn_only"])
@pytest.mark.parametrize("settings", [{}, {"shrink_tail": False}, {"continuous": 2}], ids=str)
@pytest.mark.parametrize("schedule", [(8,), (16,), (1,), (4, 1, 16, 8, 3)], ids=str)
def test_tokens_are_those_of_plain_decoding(schedule, settings, family):
    """However rows come and go; and once more over the same slots."""
    settings, model, prompts = dict(settings), slow_model(family), ragged_prompts([3, 1, 17, 5, 14])
    limits = dict(max_new_tokens_per_row=[40, 2, 33, 18, 5])
    if "continuous" in settings:
        limits["continuous_batch_size"] = settings.pop("continuous")
    free = greedy(rollout_of(model), prompts, NEW_TOKENS)
    expected = greedy(rollout_of(model), prompts, NEW_TOKENS, **limits)
    rollout = late(speculative_rollout(model, script(free), Schedule(*schedule), **settings))
    seen = Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))
    for _ in range(2):
        batch = greedy(rollout, prompts, NEW_TOKENS, **limits)
        assert torch.equal(batch.input_ids, expected.input_ids)
        assert_close(batch.logprobs, expected.logprobs)
    assert seen["gdn_kept_block"]
    assert not any(seen[name] for name in ("gdn", "gdn_deferred", "gdn_heads", "gdn_block", "gdn_commit"))


@pytest.mark.parametrize("sampling", [dict(seed=3), dict(seed=3, repetition_penalty=1.2)], ids=str)
def test_sampled_tokens_of_shared_prompts(sampling):
    model, request = slow_model(), RolloutRequest(*ragged_prompts([3, 21]))
    options = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=1.0, n_samples_per_prompt=3, **sampling)
    expected = rollout_of(model).generate(request, options)
    rollout = late(speculative_rollout(model, script(expected, 3), Schedule(8, 16, 1)))
    assert torch.equal(rollout.generate(request, options).input_ids, expected.input_ids)


def test_slots_have_the_bits_of_single_tokens():
    """Rows alone, and every product one row at a time, so that the inputs of a layer are the same bits too."""
    model, prompts = slow_model(), ragged_prompts([3])
    expected = greedy(rollout_of(model, batch_invariant=True), prompts, NEW_TOKENS)
    outcomes = []
    for schedule in ((1,), (8,), (16,), (4, 1, 16, 8)):
        rollout = late(speculative_rollout(model, script(expected), Schedule(*schedule), batch_invariant=True))
        assert torch.equal(greedy(rollout, prompts, NEW_TOKENS).input_ids, expected.input_ids)
        outcomes.append(left(rollout, 1))
    for outcome in outcomes[1:]:
        assert all(map(same_bits, outcome, outcomes[0]))


def test_rejected_drafts_do_not_reach_the_slots():
    """Two runs whose drafts are wrong from the same places on, but wrong otherwise, leave the same bits."""
    model, prompts = slow_model(), ragged_prompts([5, 3])
    plain, outcomes = greedy(rollout_of(model), prompts, NEW_TOKENS), []
    for shift in (1, 100):
        drafter = script(plain)
        drafter.wrong = shift
        rollout = late(speculative_rollout(model, drafter))
        assert torch.equal(greedy(rollout, prompts, NEW_TOKENS).input_ids, plain.input_ids)
        outcomes.append(left(rollout, 2))
    assert all(map(same_bits, *outcomes))


def test_states_are_settled_while_rows_are_in_flight():
    """What is beside them is taken into them, and the call goes on without."""
    model, limits = slow_model(), [9, 40, 40, 38]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, max_new_tokens_per_row=limits, temperature=0.0)
    request = RolloutRequest(*ragged_prompts([3, 21, 5, 16]))
    expected = rollout_of(model).generate(request, sampling)
    script_of_all = script(rollout_of(model).generate(request, SamplingConfig(max_new_tokens=40, temperature=0.0)))
    rollout, seen = late(speculative_rollout(model, script_of_all, Schedule(4, 1))), Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))
    for count, row in enumerate(rollout.generate_iter(request, sampling)):
        assert row.tokens.tolist() == answers(expected)[row.index][: len(row.tokens)].tolist()
        if count == 0:
            assert seen["gdn_kept_block"]
            seen.clear()
            rollout._arena.settle()
    assert not seen["gdn_kept_block"] and seen["gdn_block"] and seen["gdn"]


def test_as_much_memory_as_is_counted():
    model, prompts = slow_model(), ragged_prompts([3, 1, 7])
    for many in (3, 5):
        rollout = late(speculative_rollout(model), many)
        greedy(rollout, prompts, NEW_TOKENS)
        report, arena = rollout.memory_report(), rollout._arena
        kinds = ("kv_keys", "kv_values", "gdn_conv", "gdn_state", "gdn_keys", "gdn_deltas", "gdn_decays")
        needed = cache_bytes(
            SlotBytes.of(model, torch.float32), arena.cache.slots, arena.cache.capacity, PLACES * (many == 3)
        )
        assert sum(report.get(kind, 0) for kind in kinds) == needed


def test_only_layers_that_the_op_takes_ask_for_room():
    """On a CPU it takes none by itself; and of no layer are blocks of more than 16 tokens."""
    rollout = late(speculative_rollout(slow_model()))
    assert rollout._injection.many_rows(torch.float32, blocks=True) is None
    assert rollout._injection.many_rows(torch.float32) is not None
    assert rollout._arena._deferral(1) is not None
    rollout._speculation.controller.most_tokens = 17
    assert rollout._arena._deferral(1) is None
