# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a block leaves in the slots: exactly what as many decode steps leave, and nothing where a row had ended."""

import pytest
import torch
from harness import answers, rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import ScriptedDrafter, script_of, speculative_rollout

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.cache.layers import SlotGdnLayer
from deepspeed_hybrid.speculative import speculation
from deepspeed_hybrid.speculative.verify import verify

pytestmark = pytest.mark.core

NEW_TOKENS = 20


def slots_of(rollout: HybridEngineRollout, slot: int, tokens: int) -> list[torch.Tensor]:
    """Windows, states, and keys and values of the first ``tokens`` positions of a slot."""
    held = []
    for layer in rollout._arena.cache.layers:
        if isinstance(layer, SlotGdnLayer):
            held += [layer.window[slot], layer.state[slot]]
        else:
            held += [layer.keys[slot, :, :tokens], layer.values[slot, :, :tokens]]
    return [buffer.clone() for buffer in held]


def generate(rollout, prompts, **options):
    return rollout.generate(RolloutRequest(*prompts), SamplingConfig(max_new_tokens=NEW_TOKENS, **options))


@pytest.mark.parametrize("family", ["qwen3_5", "gdn_only", "llama"])
def test_committed_slots_have_the_bits_of_plain_decode(family):
    """Rows alone, and every product one row at a time, so that the inputs of a layer are the same bits too."""
    target, prompts = tiny_model(family), ragged_prompts([3])
    options = dict(temperature=1.2, seed=4)
    plain = rollout_of(target, batch_invariant=True)
    batch = generate(plain, prompts, **options)
    expected = slots_of(plain, 0, 3 + NEW_TOKENS - 1)
    for right in (0, 2, 5):
        # The number of right drafts changes from step to step, so that commits end at every place.
        script = ScriptedDrafter(script_of(batch), lambda _, __, length, right=right: (right * length) % 8)
        rollout = speculative_rollout(target, script, batch_invariant=True)
        again = generate(rollout, prompts, **options)
        assert torch.equal(again.input_ids, batch.input_ids)
        for mine, theirs in zip(slots_of(rollout, 0, 3 + NEW_TOKENS - 1), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_verifying_writes_no_state_and_no_key_that_is_read(monkeypatch):
    target, prompts = tiny_model(), ragged_prompts([7, 2])
    seen = []

    def watched(model, cache, state, drafts, kv_length):
        places = [
            (buffer, slot, length)
            for slot, length in enumerate(state.position.tolist())
            for buffer in committed(cache, slot, length)
        ]
        before = [buffer.clone() for buffer, *_ in places]
        outcome = verify(model, cache, state, drafts, kv_length)
        seen.append(all(torch.equal(old, now) for old, (now, *_) in zip(before, places, strict=True)))
        return outcome

    def committed(cache, slot, length):
        for layer in cache.layers:
            if isinstance(layer, SlotGdnLayer):
                yield from (layer.window[slot], layer.state[slot])
            else:
                yield from (layer.keys[slot, :, :length], layer.values[slot, :, :length])

    monkeypatch.setattr(speculation, "verify", watched)
    generate(speculative_rollout(target), prompts, temperature=0.0)
    assert len(seen) == NEW_TOKENS - 1 and all(seen)


def test_rejected_drafts_do_not_reach_the_slots():
    """Two runs whose drafts are wrong from the same places on, but wrong otherwise, leave the same bits."""
    target, prompts = tiny_model(), ragged_prompts([5, 3])
    plain = generate(rollout_of(target), prompts, temperature=0.0)
    left = []
    for shift in (1, 100):
        script = ScriptedDrafter(script_of(plain), lambda request, _, length: (length + request) % 4)
        script.wrong = shift
        rollout = speculative_rollout(target, script)
        assert torch.equal(generate(rollout, prompts, temperature=0.0).input_ids, plain.input_ids)
        left.append([slots_of(rollout, slot, length + NEW_TOKENS - 1) for slot, length in enumerate((5, 3))])
    for one, other in zip(*left, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_rows_that_have_ended_keep_their_bits_while_others_run():
    """Slots, answers and all: from the step after a row's end to the end of the call."""
    target, prompts = tiny_model(), ragged_prompts([6, 4, 9])
    free = generate(rollout_of(target), prompts, temperature=0.0)
    limits = [3, NEW_TOKENS, 11]
    script = ScriptedDrafter(script_of(free), lambda request, _, length: (length + request) % 6)
    rollout = speculative_rollout(target, script, shrink_tail=False)
    state_of = {}
    original = rollout._speculation.step

    def watched(model, cache, state, *rest):
        ended = [slot for slot in range(3) if state.parked[slot]]
        before = {slot: frozen(rollout, slot, state) for slot in ended}
        original(model, cache, state, *rest)
        for slot in ended:
            now = frozen(rollout, slot, state)
            assert all(torch.equal(old, new) for old, new in zip(before[slot], now, strict=True))
            state_of[slot] = state_of.get(slot, 0) + 1

    def frozen(rollout, slot, state):
        rows = [state.token, state.position, state.length, state.finish, state.tokens, state.logprobs]
        everything = slots_of(rollout, slot, rollout._arena.cache.capacity)
        return everything + [row[slot].clone() for row in rows]

    rollout._speculation.step = watched
    batch = generate(rollout, prompts, temperature=0.0, max_new_tokens_per_row=limits)
    assert state_of[0] > 2 and state_of[2] > 0
    for row, tokens in enumerate(answers(batch)):
        assert tokens.tolist() == answers(free)[row].tolist()[: limits[row]]


def test_logits_of_a_block_are_those_of_one_forward():
    """Each token's logits are what Hugging Face says after all tokens up to it."""
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    plain = generate(rollout_of(target), prompts, temperature=0.0)
    script = ScriptedDrafter(script_of(plain), lambda *_: 3)
    rollout, seen = speculative_rollout(target, script), []

    def watched(model, cache, state, drafts, kv_length):
        said = [row[:length].tolist() for row, length in zip(state.tokens, state.length.tolist(), strict=True)]
        logits, block = verify(model, cache, state, drafts, kv_length)
        seen.append((said, drafts.clone(), logits.clone()))
        return logits, block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "verify", watched)
        generate(rollout, prompts, temperature=0.0)
    said, drafts, logits = seen[1]
    for row in range(2):
        ids, mask = prompts
        tokens = torch.cat([ids[row][mask[row].bool()], torch.tensor(said[row]), drafts[row]])
        with torch.no_grad():
            expected = target(input_ids=tokens[None], use_cache=False).logits[0, -8:]
        torch.testing.assert_close(logits[:, row], expected, atol=2e-4, rtol=1e-4)
