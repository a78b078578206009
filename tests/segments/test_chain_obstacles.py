# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which layers a decode step runs as chains of ops: whatever is odd about a layer is named, and counts as before."""

import pytest
import torch
from chain_cases import NEW_TOKENS, PROMPTS, assert_like_hugging_face, layer_of, reasons, turned
from harness import greedy, rollout_of
from models import COMMON, FAMILIES, LoraLinear, ragged_prompts, tiny_model
from torch import nn
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM, HeliumConfig, HeliumForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.segments.injection import HEAD

pytestmark = pytest.mark.core

ATTENTION_LAYER = 3  # of tiny_model()


# ------------------------------------------------------------------------------------------------- which are chained


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family(family):
    model = tiny_model(family)
    rollout = rollout_of(model)
    layers = list(range(len(text_model(model).layers)))
    assert set(rollout._injection.unchained) == {HEAD, *layers}
    if family != "qwen3_next":
        assert reasons(rollout) == {} and not rollout._injection.masked
        return
    assert list(reasons(rollout)) == layers  # their MLPs are mixtures of experts; the head is a chain
    assert all(reason.startswith("its modules are ") and " mlp," in reason for reason in reasons(rollout).values())
    assert rollout._injection.masked
    for index in layers:
        line = next(
            line for line in rollout.describe().splitlines() if line.split()[:2] == [str(index), "decode_step"]
        )
        assert reasons(rollout)[index] in line


@pytest.mark.parametrize(
    "options, reason",
    [(dict(use_segki=False), "no segment is fused"), (dict(segki_kernel="fused_gdn"), "segki_kernel")],
)
def test_chains_want_every_segment(options, reason):
    unchained = rollout_of(tiny_model(), **options)._injection.unchained
    assert all(reason in unchained[layer] for layer in range(4))


# ------------------------------------------------------------------------------------------------------ the obstacles


def hook(path: str):
    return lambda model: text_model(model).get_submodule(path).register_forward_hook(turned)


def pre_hook(path: str):
    def change(model: nn.Module) -> None:
        module = text_model(model).get_submodule(path)
        module.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -1), *args[1:]))

    return change


def own_forward(path: str):
    def change(model: nn.Module) -> None:
        module = text_model(model).get_submodule(path)
        theirs = module.forward
        module.forward = lambda *args, **kwargs: turned(None, args, theirs(*args, **kwargs))

    return change


def adapter(path: str):
    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        module = text_model(model).get_submodule(parent)
        torch.manual_seed(3)
        setattr(module, name, LoraLinear(getattr(module, name)))

    return change


def multiplied(path: str, give):
    """A module of another class, which multiplies by something that it holds."""

    def change(model: nn.Module) -> None:
        module = text_model(model).get_submodule(path)
        theirs = type(module)

        class Multiplied(theirs):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                if isinstance(output, tuple):
                    return output[0] * self.multiplier, *output[1:]
                return output * self.multiplier

        module.__class__ = Multiplied
        give(module)

    return change


def attribute(module: nn.Module) -> None:
    module.multiplier = 1.5


def parameter(module: nn.Module) -> None:
    module.multiplier = nn.Parameter(torch.tensor(1.5))


def buffer(module: nn.Module) -> None:
    module.register_buffer("multiplier", torch.tensor(1.5))


def put(path: str, make):
    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        torch.manual_seed(3)
        setattr(text_model(model).get_submodule(parent), name, make())

    return change


def lively_layer_norm(size: int = COMMON["hidden_size"]) -> nn.LayerNorm:
    norm = nn.LayerNorm(size, eps=1e-6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def other_dtype(path: str):
    """Qwen3.5's norms compute in fp32 whatever their weight is."""

    def change(model: nn.Module) -> None:
        norm = text_model(model).get_submodule(path)
        nn.init.normal_(norm.weight)
        norm.bfloat16()

    return change


def other_epsilon(model: nn.Module) -> None:
    layer_of(model, ATTENTION_LAYER).self_attn.q_norm.eps = 0.5


def headless_hook(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(turned)


def head_adapter(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.lm_head = LoraLinear(model.lm_head)


OBSTACLES = {
    "hook on a layer": (hook("layers.1"), 1, "it has a forward or hooks of its own"),
    "hook on the first layer": (hook("layers.0"), 0, "it has a forward or hooks of its own"),
    "hook on the last layer": (hook("layers.3"), 3, "it has a forward or hooks of its own"),
    "pre hook on a layer": (pre_hook("layers.2"), 2, "it has a forward or hooks of its own"),
    "forward of a layer": (own_forward("layers.1"), 1, "it has forward"),
    "hook on an MLP": (hook("layers.1.mlp"), 1, "mlp has a forward or hooks"),
    "pre hook on an MLP": (pre_hook("layers.1.mlp"), 1, "mlp has a forward or hooks"),
    "hook on GatedDeltaNet": (hook("layers.1.linear_attn"), 1, "linear_attn has a forward or hooks"),
    "hook on its norm": (hook("layers.1.linear_attn.norm"), 1, "linear_attn.norm has a forward or hooks"),
    "hook on attention": (hook("layers.3.self_attn"), 3, "self_attn has a forward or hooks"),
    "hook on a norm": (hook("layers.1.input_layernorm"), 1, "input_layernorm has a forward or hooks"),
    "hook on down_proj": (hook("layers.1.mlp.down_proj"), 1, "down_proj has a forward or hooks"),
    "hook on out_proj": (hook("layers.1.linear_attn.out_proj"), 1, "out_proj has a forward or hooks"),
    "hook on o_proj": (hook("layers.3.self_attn.o_proj"), 3, "o_proj has a forward or hooks"),
    "hook on up_proj": (hook("layers.1.mlp.up_proj"), 1, "fused_glu: up_proj has forward hooks"),
    "adapter on down_proj": (adapter("layers.1.mlp.down_proj"), 1, "down_proj is a models.LoraLinear"),
    "adapter on out_proj": (adapter("layers.1.linear_attn.out_proj"), 1, "out_proj is a models.LoraLinear"),
    "adapter on o_proj": (adapter("layers.3.self_attn.o_proj"), 3, "o_proj is a models.LoraLinear"),
    "multiplier of a layer": (multiplied("layers.1", attribute), 1, "it has multiplier"),
    "parameter of a layer": (multiplied("layers.1", parameter), 1, "it has multiplier"),
    "buffer of a layer": (multiplied("layers.1", buffer), 1, "it has multiplier"),
    "multiplier of attention": (multiplied("layers.3.self_attn", attribute), 3, "attention has multiplier"),
    "parameter of attention": (multiplied("layers.3.self_attn", parameter), 3, "attention has multiplier"),
    "another activation": (put("layers.1.mlp.act_fn", nn.GELU), 1, "fused_glu: activation GELU is not SiLU"),
    "LayerNorm first": (put("layers.1.input_layernorm", lively_layer_norm), 1, "input_layernorm is not an RMSNorm"),
    "LayerNorm in the middle": (
        put("layers.1.post_attention_layernorm", lively_layer_norm), 1, "post_attention_layernorm is not an RMSNorm"
    ),
    "LayerNorm of queries": (
        put("layers.3.self_attn.q_norm", lambda: lively_layer_norm(32)), 3, "q_norm and k_norm are not RMSNorms"
    ),
    "queries and keys": (other_epsilon, 3, "q_norm and k_norm differ"),
    "a module more": (put("layers.1.dropout", nn.Identity), 1, "its modules are linear_attn, mlp, input_layernorm"),
    "first norm in bf16": (other_dtype("layers.1.input_layernorm"), 1, "its parameters differ in dtype"),
    "norm between in bf16": (other_dtype("layers.1.post_attention_layernorm"), 1, "its parameters differ in dtype"),
    "hook on the last norm": (hook("norm"), HEAD, "the last norm is not an RMSNorm"),
    "last LayerNorm": (put("norm", lively_layer_norm), HEAD, "the last norm is not an RMSNorm"),
    "last norm in bf16": (other_dtype("norm"), HEAD, "embedding, last norm and head differ in dtype"),
    "hook on the head": (headless_hook, HEAD, "the head has forward hooks"),
    "adapter on the head": (head_adapter, HEAD, "the head is a models.LoraLinear"),
}  # fmt: skip
UNSEEN = {"a module more"}  # that it is there changes no number


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", OBSTACLES)
def test_an_odd_layer_is_left_alone(name, when):
    """Whether it was odd when the rollout was made or became so between two calls; the others stay chained."""
    change, where, reason = OBSTACLES[name]
    model = tiny_model()
    rollout = rollout_of(model)
    without = greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS).logprobs
    assert reasons(rollout) == {}
    change(model)
    if when == "before":
        rollout = rollout_of(model)

    logprobs = assert_like_hugging_face(rollout, model)

    assert list(reasons(rollout)) == [where] and reason in reasons(rollout)[where]
    assert (float((logprobs - without).abs().max()) > 1e-3) == (name not in UNSEEN)
    assert rollout._injection.masked == (where == ATTENTION_LAYER)


def test_a_layer_comes_back_when_its_hook_has_gone():
    model = tiny_model()
    rollout = rollout_of(model)
    expected = greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS)
    handle = layer_of(model, 1).register_forward_hook(turned)
    greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS)
    assert list(reasons(rollout)) == [1]
    handle.remove()
    batch = greedy(rollout, ragged_prompts(PROMPTS), NEW_TOKENS)
    assert reasons(rollout) == {} and torch.equal(batch.logprobs, expected.logprobs)


def test_a_sliding_window_is_left_alone():
    model = tiny_model("qwen2_5")
    layer_of(model, 1).self_attn.sliding_window = 4096  # wider than any prompt here
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    assert reasons(rollout) == {1: "attention has a sliding window"}


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen2_5"])
@pytest.mark.parametrize("odd", [{0}, {1}, {0, 2}, {1, HEAD}, {0, 1}, {0, 1, 2}], ids=str)
def test_chained_and_unchained_layers_alternate(family, odd):
    model = tiny_model(family)
    for index in odd:
        module = text_model(model).norm if index == HEAD else layer_of(model, index)
        module.register_forward_hook(turned)
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    assert set(reasons(rollout)) == odd


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_biases_of_the_products_that_add_the_residual(family):
    """No obstacle, and they count."""
    model = tiny_model(family)
    without = greedy(rollout_of(model), ragged_prompts(PROMPTS), NEW_TOKENS).logprobs
    torch.manual_seed(3)
    for layer in text_model(model).layers:
        mixer = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
        for linear in (mixer, layer.mlp.down_proj):
            linear.bias = nn.Parameter(torch.randn(linear.out_features))
    model.lm_head.bias = nn.Parameter(torch.randn(model.lm_head.out_features))
    rollout = rollout_of(model)
    assert not torch.equal(assert_like_hugging_face(rollout, model), without)
    assert reasons(rollout) == {}


@pytest.mark.parametrize(
    "config, kind", [(HeliumConfig, HeliumForCausalLM), (Ernie4_5Config, Ernie4_5ForCausalLM)], ids=["helium", "ernie"]
)
def test_pairs_that_are_rotated_lie_side_by_side(config, kind):
    """Attention that looks like Llama's and rotates element 2 i with 2 i + 1, not with the other half."""
    torch.manual_seed(0)
    model = kind(config(**COMMON, num_hidden_layers=2)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    assert all("Attention is not one of those" in reasons(rollout)[layer] for layer in range(2))


class LouderLayer(LlamaDecoderLayer):
    """Nothing that it holds tells what it does."""

    def forward(self, *args, **kwargs):
        return 1.7 * super().forward(*args, **kwargs)


class QuieterMLP(LlamaMLP):
    def forward(self, x):
        return 0.3 * super().forward(x)


def test_subclasses_with_forwards_of_their_own_are_left_alone():
    model = tiny_model("llama")
    before = greedy(rollout_of(model), ragged_prompts(PROMPTS), NEW_TOKENS).logprobs
    layers = text_model(model).layers
    layers[0].__class__, layers[1].mlp.__class__ = LouderLayer, QuieterMLP
    rollout = rollout_of(model)
    assert not torch.equal(assert_like_hugging_face(rollout, model), before)
    assert "LouderLayer" in reasons(rollout)[0] and "forward of its own" in reasons(rollout)[1]
    assert 2 not in reasons(rollout)


def test_another_scan_is_refused():
    """A GatedDeltaNet layer is never left to its own forward, since its state is in slots."""
    model = tiny_model("qwen3_5")
    mixer = text_model(model).layers[0].linear_attn
    mixer.__class__ = type("OtherScan", (type(mixer),), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match="layer 0.*OtherScan"):
        rollout_of(model)
