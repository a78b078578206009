# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Models that somebody has changed around the embedding, the rotary embedding and the gated norm: no wrong token."""

import inspect

import pytest
import torch
from chain_cases import assert_like_hugging_face, layer_of, turned
from harness import rollout_of
from models import COMMON, tiny_model
from recorded_graph import capture_prompts, capture_steps, recording_accelerator
from test_prompts import with_ops
from torch import nn
from torch.utils._contextlib import _DecoratorContextManager
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepspeed_hybrid.compat import ModelCall, text_model
from deepspeed_hybrid.segments.injection import EMBEDDING, ROTARY
from deepspeed_hybrid.segments.known_forwards import sets_gradient_mode

pytestmark = pytest.mark.core

# ----------------------------------------------------------------------------- who writes into the embeddings in place


def written(embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings.mul_(torch.linspace(0.1, 3.0, embeddings.shape[-1]))


class Scaled(Qwen3ForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(inputs_embeds=written(self.model.embed_tokens(input_ids)), **kwargs)

    forward.__signature__ = inspect.signature(Qwen3ForCausalLM.forward)


def model_class() -> nn.Module:
    torch.manual_seed(0)
    return Scaled(Qwen3Config(**COMMON, num_hidden_layers=2)).eval()


class Unseen(Qwen3ForCausalLM):
    """Writes past torch's count of writes."""

    def forward(self, input_ids=None, **kwargs):
        embeddings = self.model.embed_tokens(input_ids)
        written(embeddings.data)
        return super().forward(inputs_embeds=embeddings, **kwargs)

    forward.__signature__ = inspect.signature(Qwen3ForCausalLM.forward)


def uncounted() -> nn.Module:
    torch.manual_seed(0)
    return Unseen(Qwen3Config(**COMMON, num_hidden_layers=2)).eval()


def model_forward() -> nn.Module:
    model = tiny_model("qwen3")
    theirs = model.forward

    def forward(input_ids=None, **kwargs):
        return theirs(inputs_embeds=written(model.get_input_embeddings()(input_ids)), **kwargs)

    model.forward = forward
    return model


def hook_of_the_model() -> nn.Module:
    def before(module, args, kwargs):
        kwargs["inputs_embeds"] = written(module.get_input_embeddings()(kwargs.pop("input_ids")))
        return args, kwargs

    model = tiny_model("qwen3")
    model.register_forward_pre_hook(before, with_kwargs=True)
    return model


@pytest.mark.parametrize("make", [model_class, uncounted, model_forward, hook_of_the_model])
def test_embeddings_that_were_written_to_have_no_prepared_norm(make):
    model = make()
    assert_like_hugging_face(rollout_of(model), model)


def test_in_inference_mode_nothing_tells_of_writes():
    model = model_class()
    rollout = rollout_of(model)
    with torch.inference_mode():
        assert_like_hugging_face(rollout, model)


# ------------------------------------------------------------------------------------------------ what ops do not take


@pytest.mark.parametrize("how", ["transposed", "float64 frequencies", "strided frequencies"])
def test_layouts_that_the_ops_refuse_are_left_to_the_modules(how):
    model = tiny_model("qwen3")
    decoder = text_model(model)
    if how == "transposed":
        decoder.embed_tokens.weight.data = decoder.embed_tokens.weight.data.t().contiguous().t()
    elif how == "float64 frequencies":
        decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq.double()
    else:
        decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq.repeat_interleave(2)[::2]
    rollout = rollout_of(model)
    key = EMBEDDING if how == "transposed" else ROTARY
    assert "contiguous" in rollout._injection.inputs[key]
    assert_like_hugging_face(rollout, model)


def test_an_exchanged_forward_of_all_embeddings(monkeypatch):
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    theirs = nn.Embedding.forward
    monkeypatch.setattr(nn.Embedding, "forward", lambda self, ids: turned(None, None, theirs(self, ids)))
    for one in (rollout, rollout_of(model)):
        assert_like_hugging_face(one, model)
        assert "a forward or hooks of its own" in one._injection.inputs[EMBEDDING]


# ----------------------------------------------------------------------------------------------------- the gated norm


def hooked(norm: nn.Module) -> None:
    norm.register_forward_hook(turned)


def with_forward(norm: nn.Module) -> None:
    theirs = norm.forward
    norm.forward = lambda *args: turned(None, args, theirs(*args))


def with_another_gate(norm: nn.Module) -> None:
    norm.activation = "gelu"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("change", [hooked, with_forward, with_another_gate])
@pytest.mark.parametrize("ops_of_prompts", [True, False])
def test_a_changed_gated_norm_runs_as_it_is(family, change, ops_of_prompts):
    model = tiny_model(family)
    norm = layer_of(model, 0).linear_attn.norm
    if change is with_another_gate and not hasattr(norm, "activation"):
        pytest.skip("this transformers has no gates but SiLU")
    change(norm)
    rollout = rollout_of(model)
    if ops_of_prompts:
        with_ops(rollout)
    assert_like_hugging_face(rollout, model)


# ------------------------------------------------------------------------------------------------- padding and biases


def with_conv_bias(mixer: nn.Module) -> None:
    mixer.conv1d.bias = nn.Parameter(torch.linspace(-2, 2, mixer.conv1d.weight.shape[0]))


def with_input_bias(mixer: nn.Module) -> None:
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
        projection = getattr(mixer, name)
        projection.bias = nn.Parameter(torch.linspace(-2, 2, projection.out_features))


def with_added_inputs(mixer: nn.Module) -> None:
    mixer.in_proj_qkv.register_forward_hook(lambda module, args, output: output + 1)


@pytest.mark.parametrize(
    "change, ops_of_prompts",
    [(with_conv_bias, True), (with_conv_bias, False), (with_input_bias, True), (with_added_inputs, False)],
)
def test_what_is_added_to_padding_goes_into_no_state(change, ops_of_prompts):
    model = tiny_model()
    change(layer_of(model, 0).linear_attn)
    rollout = rollout_of(model)
    if ops_of_prompts:
        with_ops(rollout)
    assert_like_hugging_face(rollout, model)


# ------------------------------------------------------------------------------------------------------- what is known


def test_gradient_checkpointing_leaves_chains_alone():
    model = tiny_model()
    # Its names of transformers' later versions, which warn of the earlier ones.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    disable = getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)
    enable()
    rollout = rollout_of(model)
    assert set(rollout._injection.unchained.values()) == set(rollout._injection.inputs.values()) == {None}
    assert model.model.embed_tokens._forward_hooks and rollout._injection.prompt_obstacle is None
    assert_like_hugging_face(rollout, model)
    for change in (disable, enable):  # as trainers do around every generation
        change()
        assert_like_hugging_face(rollout, model)
    assert rollout._changes == 0
    with recording_accelerator():
        capture_steps(rollout)
        capture_prompts(rollout)
        assert_like_hugging_face(rollout, model)


class Exchanging(_DecoratorContextManager):
    """Wraps a function as torch.no_grad does, and does something else."""

    def __enter__(self):
        pass

    def __exit__(self, *args):
        pass

    def clone(self):
        return type(self)()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_only_gradient_modes_wrap_without_effect(mode):
    def plain():
        pass

    assert sets_gradient_mode(mode()(plain))
    assert not sets_gradient_mode(Exchanging()(plain)) and not sets_gradient_mode(plain)


def test_the_embedding_of_now():
    model = tiny_model("qwen3")
    call = ModelCall(model)
    before = call.known_ids
    model.resize_token_embeddings(before + 64)
    assert call.known_ids == before + 64
    assert call.embedding is text_model(model).embed_tokens
