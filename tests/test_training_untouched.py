# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Generation leaves no trace in training: losses, gradients, modes, hooks and keys are those of a model that never
generated, also after a call that failed or was given up."""

import copy

import pytest
import torch
from harness import assert_same_answers, greedy, prompt, rollout_of
from models import FAMILIES, Tokenizer, ragged_prompts, solo, tiny_model

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model

pytestmark = pytest.mark.core

PROMPTS = [3, 7, 5]
STEPS = 3


def training_batch(step: int) -> dict[str, torch.Tensor]:
    ids, mask = ragged_prompts([20, 13], seed=40 + step)
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)


def sampling(**options) -> SamplingConfig:
    return SamplingConfig(**{"max_new_tokens": 12, "temperature": 0.0, **options})


def traces(model: torch.nn.Module) -> dict:
    """What generation could leave behind."""
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "forwards": {name: module.__dict__.get("forward") for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for name, module in model.named_modules()
        },
        "keys": list(model.state_dict()),
        "gradients": {
            name: (parameter.requires_grad, parameter.grad is None) for name, parameter in model.named_parameters()
        },
        "addresses": {name: value.data_ptr() for name, value in model.state_dict().items()},
        "attention": text_model(model).config._attn_implementation,
    }


def mixed_modes(model: torch.nn.Module) -> torch.nn.Module:
    """Training mode with frozen parts in evaluation mode, as users of dropout have it."""
    model.train()
    for index, module in enumerate(model.modules()):
        if index % 3 == 1:
            module.training = False
    return model


# ------------------------------------------------------------------------------------------------------ bit-equality


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3"])
@pytest.mark.parametrize("stage", [1, 2])
def test_training_with_generation_in_between_is_training_without(make_engine, family, stage):
    """A real engine: losses and weights after every step, and the gradients, to the bit."""
    plain_model = tiny_model(family).train()
    model = copy.deepcopy(plain_model)
    plain, engine = make_engine(plain_model, stage=stage), make_engine(model, stage=stage)
    rollout = HybridEngineRollout(engine, Tokenizer())
    prompts = ragged_prompts(PROMPTS)

    answers = []
    for step in range(STEPS):
        answers.append(rollout.generate(RolloutRequest(*prompts), sampling(n_samples_per_prompt=2)).input_ids)
        rollout.generate(RolloutRequest(*prompts), sampling(temperature=1.0, seed=step, continuous_batch_size=2))
        losses = []
        for one in (plain, engine):
            losses.append(one(**training_batch(step)).loss)
            if one is engine:  # between forward and backward, too
                rollout.generate(RolloutRequest(*prompts), sampling())
            one.backward(losses[-1])
            one.step()
        assert torch.equal(*losses)
        for (name, expected), value in zip(plain_model.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(value, expected), f"{name} after step {step}"
        rollout.sync_segki_weights()
    assert all(not torch.equal(before, after) for before, after in zip(answers, answers[1:], strict=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bit_equal(family):
    """Without an engine, where every gradient can be looked at; one forward is pending while generating."""
    plain = tiny_model(family).train()
    model = copy.deepcopy(plain)
    rollout = rollout_of(model)
    prompts = ragged_prompts(PROMPTS)
    greedy(rollout, prompts, 12)
    pending = [one(**training_batch(0)).loss for one in (plain, model)]
    greedy(rollout, prompts, 12)
    for loss in pending:
        loss.backward()
    greedy(rollout, prompts, 12)
    rollout.shutdown()

    for one in (plain, model):
        one(**training_batch(1)).loss.backward()

    assert torch.equal(*pending)
    assert any(parameter.grad is not None for parameter in plain.parameters())
    for (name, expected), value in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert value.grad is None, name
        else:
            assert torch.equal(value.grad, expected.grad), name


def test_answers_can_go_into_a_loss():
    """Outputs are ordinary tensors: saved for a backward, written in place, and without a graph of their own."""
    model = tiny_model().train()
    batch = greedy(rollout_of(model), ragged_prompts(PROMPTS), 12)
    for value in (batch.input_ids, batch.attention_mask, batch.logprobs, batch.response_lengths):
        assert not value.is_inference() and not value.requires_grad
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logprobs = logits[:, 6:-1].log_softmax(-1).gather(2, batch.input_ids[:, 7:, None])[..., 0]
    ((logprobs - batch.logprobs).exp() * batch.logprobs).mean().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model.model.layers[0].linear_attn.A_log.grad.abs().sum() > 0
    batch.logprobs.mul_(0)


def test_rollout_logprobs_are_the_training_forwards():
    model = tiny_model()
    prompts = ragged_prompts(PROMPTS)
    batch = greedy(rollout_of(model), prompts, 24)
    for row, length in enumerate(PROMPTS):
        tokens = batch.input_ids[row, 7 - length :]
        logits = model.train()(input_ids=tokens[None], use_cache=False).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[length:, None])[:, 0]
        torch.testing.assert_close(batch.logprobs[row], expected.detach(), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------------------ traces


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "prepare", [lambda model: model.train(), lambda model: model.eval(), mixed_modes], ids=["train", "eval", "mixed"]
)
def test_nothing_is_left_on_the_model(family, prepare):
    model = prepare(tiny_model(family))
    before, values = traces(model), copy.deepcopy(model.state_dict())
    rollout = rollout_of(model)
    made = traces(model)
    assert {**made, "addresses": before["addresses"]} == before, "constructing may move weights and do nothing else"
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    before = made
    greedy(rollout, ragged_prompts(PROMPTS), 6)
    assert traces(model) == before, "generating"
    rollout.shutdown()
    assert traces(model) == before, "shutting down"


def test_forward_of_the_users_own_comes_back():
    """An instance whose forward someone else has replaced."""
    model = tiny_model()
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = own
    rollout = rollout_of(model)
    before = traces(model)
    greedy(rollout, ragged_prompts(PROMPTS), 4)
    assert mlp.__dict__["forward"] is own
    assert traces(model) == before


def test_dropout_is_off_while_generating_only():
    model = tiny_model("qwen3").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    prompts = ragged_prompts(PROMPTS)
    batch = greedy(rollout_of(model), prompts, 12)
    first, second = (model(**training_batch(0)).loss for _ in range(2))
    assert not torch.equal(first, second), "dropout must be on again"
    model.eval()
    assert_same_answers(batch, [solo(model, prompt(prompts, row), 12) for row in range(3)])


# -------------------------------------------------------------------------------------------------- failed, given up


class Interrupted(Exception):
    pass


def fail_in_layer(layer: torch.nn.Module, fail, patch: pytest.MonkeyPatch) -> None:
    """Call ``fail`` when the layer has done its work, by its own forward or as a chain."""
    call_impl = torch.nn.Module._call_impl

    def call(self, *args, **kwargs):
        output = call_impl(self, *args, **kwargs)
        if self is layer:
            fail()
        return output

    patch.setattr(torch.nn.Module, "_call_impl", call)


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt, torch.OutOfMemoryError], ids=lambda e: e.__name__)
@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize("where", ["before", "in a layer", "after"])
def test_failure_while_generating_leaves_the_model_and_the_next_call_right(error, call, where, monkeypatch):
    """The prefill is call 0. A failure in a layer leaves some layers with a newer state than others."""
    model = mixed_modes(tiny_model())
    prompts = ragged_prompts(PROMPTS)
    expected = greedy(rollout_of(model), prompts, 12)
    rollout = rollout_of(model)
    before = traces(model)
    greedy(rollout, prompts, 12)
    calls = [0]

    def fail(*args) -> None:
        calls[0] += 1
        if calls[0] == call + 1:
            raise error("stop")

    if where == "in a layer":
        fail_in_layer(model.model.layers[2], fail, monkeypatch)
    else:
        module = model.model.embed_tokens if where == "before" else model
        handle = module.register_forward_hook(fail)
    with pytest.raises(error, match="stop"):
        greedy(rollout, prompts, 12)
    if where != "in a layer":
        handle.remove()
    assert calls[0] == call + 1

    assert traces(model) == before
    batch = greedy(rollout, prompts, 12)
    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.logprobs, expected.logprobs)
    assert traces(model) == before


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_failure_in_the_step_itself(error, monkeypatch):
    model = tiny_model().train()
    prompts = ragged_prompts(PROMPTS)
    rollout = rollout_of(model)
    before = traces(model)
    expected = greedy(rollout, prompts, 12)
    with monkeypatch.context() as patch:
        count = iter(range(10))

        def failing(*args, **kwargs) -> None:
            if next(count) == 3:
                raise error("stop")

        patch.setattr("deepspeed_hybrid.generation.arena.decode_step", failing)
        with pytest.raises(error, match="stop"):
            greedy(rollout, prompts, 12)
    assert traces(model) == before
    assert torch.equal(greedy(rollout, prompts, 12).input_ids, expected.input_ids)


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("slots", [None, 2])
def test_iterator_given_up_early(taken, slots):
    """Between two rows, and after closing, the model is as it was; the next call knows nothing of the old one."""
    model = mixed_modes(tiny_model())
    prompts = ragged_prompts([3, 7, 5, 9])
    stops = list(range(12, 30))
    rollout = rollout_of(model)
    before = traces(model)
    rows = rollout.generate_iter(
        RolloutRequest(*prompts), sampling(max_new_tokens=40, stop_token_ids=stops, continuous_batch_size=slots)
    )
    for _ in range(taken):
        next(rows)
        assert traces(model) == before, "between two rows"
    rows.close()

    assert traces(model) == before
    other = ragged_prompts([6, 2], seed=9)
    batch = greedy(rollout, other, 12)
    model.eval()
    assert_same_answers(batch, [solo(model, prompt(other, row), 12) for row in range(2)])


def test_training_between_two_rows_of_an_iterator():
    """A backward in the middle: its gradients are a plain model's, and the other rows still come."""
    model = tiny_model().train()
    plain = copy.deepcopy(model)
    rows = rollout_of(model).generate_iter(
        RolloutRequest(*ragged_prompts([3, 7, 5, 9])), sampling(max_new_tokens=40, stop_token_ids=list(range(12, 30)))
    )
    next(rows)
    for one in (plain, model):
        one(**training_batch(0)).loss.backward()
    assert len(list(rows)) == 3
    for (name, expected), value in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value.grad, expected.grad), name


def test_diverged_weights_do_not_poison_the_next_call():
    """Not-a-number keys and values of one call must not reach the next, which masks but may still read them."""
    model = tiny_model()
    prompts = ragged_prompts(PROMPTS)
    rollout = rollout_of(model)
    expected = greedy(rollout, prompts, 12)
    weight = model.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    greedy(rollout, ragged_prompts([20, 20, 20]), 30)
    with torch.no_grad():
        weight.copy_(kept)

    batch = greedy(rollout, prompts, 12)

    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.logprobs, expected.logprobs)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "gdn_only"])
@pytest.mark.parametrize("slots", [None, 1, 2])
def test_diverged_row_poisons_neither_neighbours_nor_successors(family, slots):
    """One prompt holds a token whose embedding is not a number; others share the batch or get its slot later."""
    model = tiny_model(family)
    prompts = ragged_prompts([20, 3, 7, 5])
    prompts[0][1:][prompts[0][1:] == 200] = 201
    expected = [solo(model, prompt(prompts, row), 12) for row in range(4)]
    assert not any(200 in row.tokens for row in expected[1:])
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = float("nan")
    prompts[0][0, -20:] = 200

    batch = greedy(rollout_of(model), prompts, 12, continuous_batch_size=slots)

    for row in range(1, 4):
        assert batch.input_ids[row, 20:].tolist() == expected[row].tokens.tolist()
        torch.testing.assert_close(batch.logprobs[row], expected[row].logprobs, atol=5e-5, rtol=0)
