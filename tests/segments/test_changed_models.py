# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A model that was changed before or between calls, in ways that no structure shows, answers as Hugging Face does."""

import functools

import pytest
import torch
from chain_cases import NEW_TOKENS, PROMPTS, assert_like_hugging_face, reasons
from harness import answers, greedy, rollout_of
from models import ragged_prompts, solo, tiny_model
from recorded_graph import capture_steps, recording_accelerator
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.segments.injection import HEAD


def louder(original):
    return lambda self, *args, **kwargs: 1.5 * original(self, *args, **kwargs)


class SigmoidGated(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states, gate):
        return self.weight * hidden_states * gate.sigmoid()


def larger_eps(model, patch):
    model.model.layers[1].input_layernorm.variance_epsilon = 3.0


def larger_head_eps(model, patch):
    model.model.layers[1].self_attn.q_norm.variance_epsilon = 3.0


def scaled_decoder(model, patch):
    def scaled(module, args, output):
        output.last_hidden_state = 3 * output.last_hidden_state.flip(-1)
        return output

    model.model.register_forward_hook(scaled)


def patched_mlp_class(model, patch):
    patch.setattr(modeling_qwen3.Qwen3MLP, "forward", louder(modeling_qwen3.Qwen3MLP.forward))


def patched_layer_class(model, patch):
    patch.setattr(modeling_qwen3.Qwen3DecoderLayer, "forward", louder(modeling_qwen3.Qwen3DecoderLayer.forward))


def wrapped_mlp_class(model, patch):
    """A wrapper that passes for what it wraps."""
    patch.setattr(
        modeling_qwen3.Qwen3MLP,
        "forward",
        functools.wraps(modeling_qwen3.Qwen3MLP.forward)(louder(modeling_qwen3.Qwen3MLP.forward)),
    )


def patched_rotary(model, patch):
    patch.setattr(modeling_qwen3, "rotate_half", lambda x: x.flip(-1))


class Called:
    """Stands where a function stood, and has nothing of one."""

    def __init__(self, forward):
        self.forward = forward

    def __get__(self, owner, kind=None):
        return self if owner is None else functools.partial(louder_attention(self.forward), owner)


def louder_attention(original):
    def forward(self, *args, **kwargs):
        output, weights = original(self, *args, **kwargs)
        return 1.5 * output, weights

    return forward


def attention_that_is_no_function(model, patch):
    patch.setattr(modeling_qwen3.Qwen3Attention, "forward", Called(modeling_qwen3.Qwen3Attention.forward))


def swapped_class(model, patch):
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("LouderMLP", (type(mlp),), {"forward": louder(type(mlp).forward)})


def children_by_other_names(model, patch):
    mlp = model.model.layers[0].mlp
    gate, up, *rest = mlp._modules.items()
    mlp._modules.clear()
    mlp._modules.update([(up[0], gate[1]), (gate[0], up[1]), *rest])


def transposed_layouts(model, patch):
    """The same values in another order of memory, which no op takes."""
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    for projection in (attention.o_proj, mlp.up_proj, mlp.down_proj, model.lm_head):
        projection.weight = nn.Parameter(1.5 * projection.weight.detach().t().contiguous().t())


def fewer_layers(model, patch):
    model.config.num_hidden_layers = 2


def scaled_scores(model, patch):
    model.model.layers[0].self_attn.scaling *= 0.1


def global_hook(model, patch):
    def flipped(module, args, output):
        return output.flip(-1) if isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation" else None

    patch.callback(nn.modules.module.register_module_forward_hook(flipped).remove)


def registered_attention(model, patch):
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flipped(*args, **kwargs):
        output, weights = own(*args, **kwargs)
        return output.flip(-1), weights

    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", flipped)


CHANGES = [
    larger_eps,
    larger_head_eps,
    scaled_decoder,
    patched_mlp_class,
    wrapped_mlp_class,
    patched_layer_class,
    patched_rotary,
    attention_that_is_no_function,
    swapped_class,
    children_by_other_names,
    fewer_layers,
    transposed_layouts,
    scaled_scores,
    global_hook,
    registered_attention,
]


class Patch:
    """pytest's, and callbacks at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.setattr, self.setitem = monkeypatch.setattr, monkeypatch.setitem
        self.callbacks: list = []
        self.callback = self.callbacks.append


@pytest.fixture
def patch(monkeypatch):
    made = Patch(monkeypatch)
    yield made
    for callback in made.callbacks:
        callback()


@pytest.fixture
def accelerator():
    with recording_accelerator() as recorder:
        yield recorder


@pytest.mark.parametrize("when", ["before", "between calls"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_answers_as_it_should(change, when, patch):
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    unchanged = assert_like_hugging_face(rollout, model)
    change(model, patch)
    if when == "before":
        rollout = rollout_of(model)
    assert not torch.equal(assert_like_hugging_face(rollout, model), unchanged)


@pytest.mark.parametrize(
    "change", [larger_eps, scaled_decoder, scaled_scores, fewer_layers, patched_layer_class], ids=lambda c: c.__name__
)
def test_a_captured_step_does_not_outlive_a_change(change, patch, accelerator):
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    capture_steps(rollout)
    assert_like_hugging_face(rollout, model)
    change(model, patch)
    assert_like_hugging_face(rollout, model)


def test_a_training_step_is_no_change():
    """Else every step would cost a capture."""
    model = tiny_model("qwen3_5")
    rollout = rollout_of(model)
    greedy(rollout, ragged_prompts(PROMPTS), 3)
    changes = rollout._changes
    ids = ragged_prompts([9], seed=3)[0]
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.eval()
    greedy(rollout, ragged_prompts(PROMPTS), 3)
    assert rollout._changes == changes


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_hidden_states_asked_for_once_cost_no_chain(family):
    """transformers leaves the hooks that capture them on every layer."""
    model = tiny_model(family)
    rollout = rollout_of(model)
    with torch.no_grad():
        model(ragged_prompts([5])[0], output_hidden_states=True)
    assert_like_hugging_face(rollout, model)
    assert reasons(rollout) == {}


def test_rows_in_flight_when_a_chain_is_lost():
    model = tiny_model("qwen3")
    rollout, prompts = rollout_of(model), ragged_prompts(PROMPTS)
    stop = int(solo(model, prompts[0][0, -int(prompts[1][0].sum()) :], NEW_TOKENS).tokens[4])
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=[stop])
    expected = answers(rollout_of(model).generate(RolloutRequest(*prompts), sampling))
    for count, row in enumerate(rollout.generate_iter(RolloutRequest(*prompts), sampling)):
        assert row.tokens.tolist() == expected[row.index].tolist()
        if count == 0:
            model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: output)
    assert "hooks" in reasons(rollout)[0]


def test_a_sync_does_not_hide_a_change_from_rows_in_flight(accelerator):
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    capture_steps(rollout)
    rows = rollout.generate_iter(
        RolloutRequest(*ragged_prompts(PROMPTS)),
        SamplingConfig(max_new_tokens=9, temperature=0.0, continuous_batch_size=1),
    )
    next(rows)
    for parameter in model.parameters():
        parameter.data = 1.2 * parameter.data
    rollout.sync_weights(1)
    with pytest.raises(RuntimeError, match="the model was changed while rows were running"):
        next(rows)
    assert_like_hugging_face(rollout, model)


def test_another_gated_norm_is_no_chain():
    model = tiny_model("qwen3_5")
    mixer = model.model.layers[0].linear_attn
    mixer.norm = SigmoidGated(mixer.norm)
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    assert list(reasons(rollout)) == [0] and "SigmoidGated" in reasons(rollout)[0]


@pytest.mark.parametrize("when", ["before", "between calls"])
def test_a_scan_with_a_forward_of_its_own_is_refused(when):
    model = tiny_model("qwen3_5")
    rollout = rollout_of(model)
    mixer = model.model.layers[1].linear_attn
    mixer.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="layer 1.*Qwen3_5GatedDeltaNet"):
        rollout_of(model) if when == "before" else greedy(rollout, ragged_prompts(PROMPTS), 2)
    del mixer.forward
    assert_like_hugging_face(rollout, model)


def test_a_head_in_fp32_over_bf16_layers():
    model = tiny_model("qwen3").bfloat16()
    model.model.norm.float(), model.lm_head.float()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    rollout = rollout_of(model)
    assert len(answers(greedy(rollout, ragged_prompts(PROMPTS), 4))) == len(PROMPTS)
    assert "differ in dtype" in reasons(rollout)[HEAD]


def test_a_state_in_fp16():
    model = tiny_model("qwen3_5")
    exact = greedy(rollout_of(model), ragged_prompts(PROMPTS), 6).logprobs
    coarse = greedy(rollout_of(model, state_dtype=torch.float16), ragged_prompts(PROMPTS), 6).logprobs
    assert not torch.equal(coarse, exact)
    torch.testing.assert_close(coarse[:, :2], exact[:, :2], atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: model.double(), "torch.float64.*accepted are fp32, bf16, fp16"),
        (lambda model: setattr(model.config, "is_causal", False), "not causal"),
        (lambda model: setattr(model.config, "n_recurrent_loops", 2), "layers several times"),
    ],
    ids=["fp64", "not causal", "loops"],
)
def test_what_cannot_be_honoured_is_refused(change, message):
    model = tiny_model("qwen3")
    assert isinstance(model, Qwen3ForCausalLM)
    change(model)
    with pytest.raises(ValueError, match=message):
        rollout_of(model)


def test_attention_that_somebody_registered_is_not_exchanged(monkeypatch):
    model = tiny_model("qwen3")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "mine", lambda *args, **kwargs: None)
    model.config._attn_implementation = "mine"
    with pytest.raises(ValueError, match="'mine' was registered by somebody else"):
        rollout_of(model)


def test_a_change_whose_plan_failed_and_that_was_taken_back(monkeypatch):
    """What was planned for the changed model must not serve the one before."""
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    before = assert_like_hugging_face(rollout, model)
    layer = model.model.layers[1]
    kept, layer.mlp = layer.mlp, type(layer.mlp)(model.config)

    def fail() -> None:
        raise RuntimeError("no room for what is fused")

    with monkeypatch.context() as patch:
        patch.setattr(rollout._injection, "follow", fail)
        with pytest.raises(RuntimeError, match="no room"):
            greedy(rollout, ragged_prompts(PROMPTS), 2)
    layer.mlp = kept
    assert torch.equal(assert_like_hugging_face(rollout, model), before)
    assert rollout._changes == 2
