# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Decode steps of whole layers as chains of ops: that they are what runs, what a layer prepares for the next one,
Hugging Face's numbers, and lanes that are parked."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chain_cases import CHAINED, PROMPTS, assert_like_hugging_face, layer_of, reasons, turned
from decode_cases import same_bits
from harness import (
    assert_same_answers,
    greedy,
    prompt,
    record_logits,
    rollout_of,
    stepwise_logits,
    watch_chain,
)
from models import ragged_prompts, solo, tiny_model
from tolerances import assert_close
from torch import nn

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.cache import layers
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation.arena import slot_bucket
from deepspeed_hybrid.generation.capacity import SlotBytes, cache_bytes
from deepspeed_hybrid.ops import fused_linear
from deepspeed_hybrid.ops.gdn_deferred import PLACES, gdn_deferred
from deepspeed_hybrid.segments.decoder_layer import PreparedNorm
from deepspeed_hybrid.segments.norm import Norm
from deepspeed_hybrid.tools.models import decay_slowly

pytestmark = pytest.mark.core

RELATIVE = 2e-5  # of the largest logit


# ---------------------------------------------------------------------------------------------------- which path runs


def counted_steps(model: nn.Module, rollout, patch: pytest.MonkeyPatch) -> list[Counter]:
    """For every forward from now on, the chain's ops, and the modules that it calls and that run their own forward."""
    forwards: list[Counter] = []
    kinds = {type(module) for module in text_model(model).modules()}
    call_impl = nn.Module._call_impl

    def counted(self, *args, **kwargs):
        if forwards and type(self) in kinds and "forward" not in self.__dict__:
            forwards[-1][type(self).__name__] += 1
        return call_impl(self, *args, **kwargs)

    patch.setattr(nn.Module, "_call_impl", counted)
    watch_chain(rollout, lambda name, args: forwards[-1].update([name]))
    model.register_forward_pre_hook(lambda *_: forwards.append(Counter()))
    return forwards


@pytest.mark.parametrize("family", CHAINED)
def test_a_decode_step_is_the_chains_ops(family, monkeypatch):
    model = tiny_model(family)
    rollout = rollout_of(model)
    decoder = text_model(model)
    mixers = Counter("gdn" if hasattr(layer, "linear_attn") else "attention" for layer in decoder.layers)
    layers = len(decoder.layers)
    forwards = counted_steps(model, rollout, monkeypatch)

    greedy(rollout, ragged_prompts(PROMPTS), 5)

    prefill, *steps = forwards
    before = Counter(embedded_rows=1, rotary_tables=1)
    ops = Counter(normed_linear=2 * layers + 1, residual_linear=2 * layers, **mixers)
    assert steps == [before + ops + Counter([type(decoder).__name__])] * 4
    assert type(decoder.layers[0].input_layernorm).__name__ in prefill
    assert {name: prefill[name] for name in ops} == {**dict.fromkeys(ops, 0), "normed_linear": 1}


def test_a_layer_left_alone_runs_its_own_forward(monkeypatch):
    """And the norm behind it is made anew, for want of somebody who prepared it."""
    model = tiny_model()
    layer_of(model, 1).mlp.down_proj.register_forward_hook(turned)
    rollout = rollout_of(model)
    forwards = counted_steps(model, rollout, monkeypatch)
    greedy(rollout, ragged_prompts(PROMPTS), 3)
    for step in forwards[1:]:
        assert (step["normed_rows"], step["normed_linear"], step["residual_linear"]) == (1, 7, 6)
        assert (step["gdn"], step["attention"]) == (2, 1)
        assert (step["Qwen3_5DecoderLayer"], step["Qwen3_5RMSNorm"]) == (1, 2)


@pytest.mark.parametrize("settings", [{}, {"shrink_tail": False}, {"continuous": 3}], ids=str)
@pytest.mark.parametrize("many", [3, 4, 5])
def test_recurrent_layers_of_many_rows(many, settings):
    """States are written late where a call begins with so many rows, up to its end, however rows come and go."""
    model = tiny_model()
    decay_slowly(model)  # so that a token that is lost or counted twice shows
    settings, prompts = dict(settings), ragged_prompts([3, 1, 7, 5, 14])
    limits = dict(max_new_tokens_per_row=[40, 2, 33, 18, 5])
    if "continuous" in settings:
        limits["continuous_batch_size"] = settings.pop("continuous")
    expected = greedy(rollout_of(model), prompts, 40, **limits)
    rollout = deferring(rollout_of(model, **settings), many)
    seen = Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))

    for _ in range(2):  # what an earlier call has left in the rings is nothing to the next one
        batch = greedy(rollout, prompts, 40, **limits)
        assert all(same_bits(one, other) for one, other in zip(batch.input_ids, expected.input_ids, strict=True))
        assert_close(batch.logprobs, expected.logprobs)
    lanes = limits.get("continuous_batch_size", 5)
    late = many <= slot_bucket(lanes)
    assert bool(seen["gdn_deferred"]) == late and bool(seen["gdn"]) != late
    report = rollout.memory_report()
    assert ("gdn_deltas" in report) == late
    arena = rollout._arena
    slot = SlotBytes.of(model, torch.float32)
    kinds = ("kv_keys", "kv_values", "gdn_conv", "gdn_state", "gdn_keys", "gdn_deltas", "gdn_decays")
    needed = cache_bytes(slot, arena.cache.slots, arena.cache.capacity, PLACES * late)
    assert sum(report.get(kind, 0) for kind in kinds) == needed


def test_samples_share_a_prompt_where_states_are_written_late():
    """A fork copies what is kept beside the state along with it, of which nothing counts yet."""
    model = tiny_model()
    decay_slowly(model)
    request = RolloutRequest(*ragged_prompts([3, 21]))
    sampling = SamplingConfig(max_new_tokens=37, temperature=1.0, seed=3, n_samples_per_prompt=3)
    expected = rollout_of(model).generate(request, sampling)
    rollout, seen = deferring(rollout_of(model), 2), Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))
    batch = rollout.generate(request, sampling)
    assert seen["gdn_deferred"] and not seen["gdn"]
    assert all(same_bits(one, other) for one, other in zip(batch.input_ids, expected.input_ids, strict=True))


@pytest.mark.parametrize("many", [2, 3])
def test_each_call_goes_by_its_own_rows(many):
    """A small call over a large cache writes states at once, and a captured step is of one kind."""
    model = tiny_model()
    decay_slowly(model)
    rollout, seen = deferring(rollout_of(model), many), Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))
    large, small = ragged_prompts([3, 21, 5]), ragged_prompts([18])
    wanted = [greedy(rollout_of(model), prompts, 20) for prompts in (large, small)]
    for prompts, expected, late in [(large, wanted[0], True), (small, wanted[1], False)] * 2:
        seen.clear()
        batch = greedy(rollout, prompts, 20)
        assert all(same_bits(one, other) for one, other in zip(batch.input_ids, expected.input_ids, strict=True))
        assert bool(seen["gdn_deferred"]) == late and bool(seen["gdn"]) != late


@pytest.mark.parametrize("change", ["leaves", "joins"])
def test_a_layer_whose_way_changes_while_rows_are_in_flight(change, monkeypatch):
    """What it has left beside its states is taken into them, and what it never left there is not."""
    monkeypatch.setattr(layers, "SETTLE_BYTES", 1)  # a row at a time
    model, limits = tiny_model(), [9, 40, 40, 38]
    decay_slowly(model)
    mixer = layer_of(model, 0).linear_attn
    sampling = SamplingConfig(max_new_tokens=40, max_new_tokens_per_row=limits, temperature=0.0)
    request = RolloutRequest(*ragged_prompts([3, 21, 5, 16]))
    expected = rollout_of(model).generate(request, sampling)
    hook = mixer.register_forward_hook(lambda module, args, output: output) if change == "joins" else None
    rollout, seen = deferring(rollout_of(model), 2), Counter()
    watch_chain(rollout, lambda name, args: seen.update([name]))
    for count, row in enumerate(rollout.generate_iter(request, sampling)):
        answer = expected.input_ids[row.index][expected.input_ids.shape[1] - 40 :][: len(row.tokens)]
        assert row.tokens.tolist() == answer.tolist(), row.index
        if count == 0:
            assert seen["gdn_deferred"]
            seen.clear()
            if hook is None:
                mixer.register_forward_hook(lambda module, args, output: output)
            else:
                hook.remove()
    assert not seen["gdn_deferred"] and seen["gdn"]


@pytest.mark.parametrize("late", [False, True])
def test_states_are_written_at_once_where_memory_is_short(late):
    """Room beside the states only makes steps faster: without it the call still fits."""
    model, prompts = tiny_model(), ragged_prompts([3, 21, 5])
    rollout = deferring(rollout_of(model), 2)
    arena = rollout._arena
    lean, fast = (arena.needed(3, 41, fast=fast) for fast in (False, True))
    assert lean < fast
    arena.free = lambda: 2 * fast if late else lean + 4096  # and the answers
    batch = greedy(rollout, prompts, 20)
    expected = greedy(rollout_of(model), prompts, 20)
    assert all(same_bits(one, other) for one, other in zip(batch.input_ids, expected.input_ids, strict=True))
    assert ("gdn_deltas" in rollout.memory_report()) == late


def test_only_chained_recurrent_layers_ask_for_room():
    assert deferring(rollout_of(tiny_model()), 2)._injection.many_rows(torch.float32) is not None
    assert deferring(rollout_of(tiny_model("qwen3")), 2)._injection.many_rows(torch.float32) is None
    model = tiny_model()
    for layer in text_model(model).layers:
        layer.register_forward_hook(lambda module, args, output: output)
    assert deferring(rollout_of(model), 2)._injection.many_rows(torch.float32) is None


def deferring(rollout, many: int):
    """Let states be written late from so many rows on."""
    rollout._injection.chain = replace(rollout._injection.chain, gdn_deferred=gdn_deferred)
    rollout._injection.follow()
    rollout._arena.many_rows = lambda state_dtype: many
    return rollout


# --------------------------------------------------------------------------------------------------- prepared norms


@pytest.fixture
def prepared():
    """A norm that was prepared for ``hidden``, and an op that says when it runs instead."""
    asked = []

    def normed_rows(hidden, weight, offset, eps):
        asked.append(hidden)
        return fused_linear.normed_rows_reference(hidden, weight, offset, eps)

    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    norm = Norm(8, weight, 1.0, 1e-6)
    scaled, squares = torch.full_like(hidden, 7.0), torch.ones(2, 3)  # not what the op would give
    holder = PreparedNorm()
    holder.put(hidden, norm, scaled, squares)
    return SimpleNamespace(
        holder=holder,
        hidden=hidden,
        norm=norm,
        parts=(scaled, squares),
        ops=SimpleNamespace(normed_rows=normed_rows),
        asked=asked,
    )


@pytest.mark.parametrize("view", [lambda hidden: hidden, lambda hidden: hidden[:, None][:, 0]], ids=["same", "view"])
def test_what_was_prepared_is_taken_once(prepared, view):
    taken = prepared.holder.take(view(prepared.hidden), prepared.norm, prepared.ops)
    assert taken[0] is prepared.parts[0] and taken[1] is prepared.parts[1] and prepared.asked == []
    again = prepared.holder.take(prepared.hidden, prepared.norm, prepared.ops)
    assert again[0] is not prepared.parts[0] and len(prepared.asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda hidden: hidden.clone(),
        lambda hidden: hidden + 1,
        lambda hidden: hidden[:2],
        lambda hidden: hidden[1:],
        lambda hidden: hidden.view(6, 4),
    ],
    ids=["clone", "changed", "fewer rows", "later rows", "other shape"],
)
def test_parts_of_another_hidden_state_are_never_used(prepared, other):
    hidden = other(prepared.hidden)
    norm = Norm(hidden.shape[1], prepared.norm.weight[: hidden.shape[1]], 1.0, 1e-6)
    norm = norm if hidden.shape[1] != 8 else prepared.norm
    scaled, squares = prepared.holder.take(hidden, norm, prepared.ops)
    assert prepared.asked == [hidden] and squares.shape == (0, len(hidden))
    expected = fused_linear.normed_rows_reference(hidden, norm.weight, 1.0, 1e-6)[0]
    assert torch.equal(scaled, expected)
    prepared.holder.take(prepared.hidden, prepared.norm, prepared.ops)
    assert len(prepared.asked) == 2, "what nobody took is not kept for later"


def test_parts_of_another_norm_are_never_used(prepared):
    twin = Norm(8, prepared.norm.weight.clone(), 1.0, 1e-6)
    scaled, _ = prepared.holder.take(prepared.hidden, twin, prepared.ops)
    assert scaled is not prepared.parts[0] and len(prepared.asked) == 1


def test_nothing_was_prepared(prepared):
    scaled, squares = PreparedNorm().take(prepared.hidden, prepared.norm, prepared.ops)
    assert len(prepared.asked) == 1 and squares.shape == (0, 3)


@pytest.mark.parametrize("in_place", [False, True], ids=["a new tensor", "in place"])
def test_a_hidden_state_that_changes_between_two_layers(in_place):
    """Behind a chain, before a chain, in a layer that is none: at a new address, or at that of what was prepared."""
    model = tiny_model("llama")
    theirs = type(layer_of(model, 1))

    class Doubling(theirs):
        """Nothing but twice its input."""

        def forward(self, hidden_states, *args, **kwargs):
            kwargs["past_key_values" if "past_key_values" in kwargs else "cache"].update(
                *hidden_states.new_zeros(2, hidden_states.shape[0], 2, hidden_states.shape[1], 32), 1
            )
            return hidden_states.mul_(2) if in_place else hidden_states * 2

    layer_of(model, 1).__class__ = Doubling
    layer_of(model, 1).multiplier = 2
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    assert list(reasons(rollout)) == [1]


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("family", CHAINED)
def test_logits_are_hugging_faces(family):
    """Ragged prompts, two samples of each."""
    model, lengths, steps = tiny_model(family), [1, 2, 17, 40], 32
    prompts = ragged_prompts(lengths)
    oracle = [solo(model, prompt(prompts, row), steps) for row in range(len(lengths))]
    logits = torch.stack([row.logits for row in oracle], dim=1)
    rollout = rollout_of(model)
    assert reasons(rollout) == {}
    seen = record_logits(rollout)

    batch = greedy(rollout, prompts, steps, n_samples_per_prompt=2)

    bound = RELATIVE * float(logits.abs().max())
    assert_same_answers(batch, oracle, samples=2, atol=2 * bound)
    difference = stepwise_logits(seen, len(lengths), samples=2) - logits.repeat_interleave(2, dim=1)
    assert float(difference.abs().max()) <= bound


# ------------------------------------------------------------------------------------------------------ parked lanes


@pytest.mark.parametrize("family", ["qwen3_5", "gdn_only", "qwen3"])
def test_parked_lanes_keep_their_bits(family):
    """A lane whose row has ended, and one that never had a row, through the steps of the others."""
    model = tiny_model(family)
    prompts, stops = ragged_prompts([3, 7, 5]), list(range(12, 30))
    expected = [solo(model, prompt(prompts, row), 40, set(stops)).tokens.tolist() for row in range(3)]
    rollout = rollout_of(model)
    assert reasons(rollout) == {}
    rows = rollout.generate_iter(
        RolloutRequest(*prompts), SamplingConfig(max_new_tokens=40, temperature=0.0, stop_token_ids=stops)
    )
    finished = [next(rows)]
    arena = rollout._arena
    parked = arena.state.parked[:4].clone()
    assert parked.sum() >= 2 and parked[3] and not parked.all()
    kinds = {name for layer in arena.cache.layers for name in layer.tensors()}
    attention, gdn = {"kv_keys", "kv_values"}, {"gdn_conv", "gdn_state"}
    assert kinds == {"qwen3_5": attention | gdn, "gdn_only": gdn, "qwen3": attention}[family]
    buffers = [tensor for layer in arena.cache.layers for tensor in layer.tensors().values()]
    for buffer in buffers:
        buffer[:4][parked] = float("nan")
    before = [buffer[:4].clone() for buffer in buffers]

    finished += list(rows)

    for old, now in zip(before, buffers, strict=True):
        assert same_bits(now[:4][parked], old[parked])
        assert not torch.equal(now[:4][~parked], old[~parked])
    assert sorted((row.index, row.tokens.tolist()) for row in finished) == list(enumerate(expected))
