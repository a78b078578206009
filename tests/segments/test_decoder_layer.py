# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Decode steps of whole layers as chains of ops: which layers they take, that they are what runs, and Hugging Face's
numbers with any layer in or out."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
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
from models import COMMON, FAMILIES, LoraLinear, ragged_prompts, solo, tiny_model
from torch import nn
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM, HeliumConfig, HeliumForCausalLM

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.ops import fused_linear
from deepspeed_hybrid.segments.decoder_layer import PreparedNorm
from deepspeed_hybrid.segments.injection import HEAD
from deepspeed_hybrid.segments.norm import Norm

pytestmark = pytest.mark.core

RELATIVE = 2e-5  # of the largest logit
PROMPTS, NEW_TOKENS = [3, 9, 1], 16
CHAINED = [family for family in FAMILIES if family != "qwen3_next"]
GDN_LAYER, ATTENTION_LAYER = 1, 3  # of tiny_model()


def reasons(rollout) -> dict[int, str]:
    """Of what is not a chain."""
    return {index: reason for index, reason in rollout._injection.unchained.items() if reason}


def assert_like_hugging_face(rollout, model: nn.Module) -> torch.Tensor:
    """Greedy answers; their logprobs."""
    prompts = ragged_prompts(PROMPTS)
    batch = greedy(rollout, prompts, NEW_TOKENS)
    assert_same_answers(batch, [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(PROMPTS))])
    return batch.logprobs


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


def layer_of(model: nn.Module, index: int) -> nn.Module:
    return text_model(model).layers[index]


def turned(_, args, output):
    """A hook whose effect shows; a factor would not before a norm."""
    return (output[0].roll(1, -1), *output[1:]) if isinstance(output, tuple) else output.roll(1, -1)


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
    "last norm in bf16": (other_dtype("norm"), HEAD, "the last norm and the head differ in dtype"),
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


@pytest.mark.xfail(strict=True, reason="what rotates queries and keys is not looked at")
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
    assert_like_hugging_face(rollout_of(model), model)


# ---------------------------------------------------------------------------------------------------- which path runs


def counted_steps(model: nn.Module, rollout, patch: pytest.MonkeyPatch) -> list[Counter]:
    """For every forward from now on, the chain's ops and the forwards of classes that it calls."""
    forwards: list[Counter] = []

    def counted(kind: type[nn.Module]):
        theirs = kind.forward

        def forward(self, *args, **kwargs):
            if forwards:  # not while norms are asked for their form
                forwards[-1][kind.__name__] += 1
            return theirs(self, *args, **kwargs)

        return forward

    for kind in {type(module) for module in text_model(model).modules()}:
        patch.setattr(kind, "forward", counted(kind))
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
    ops = Counter(normed_rows=1, normed_linear=2 * layers + 1, residual_linear=2 * layers, **mixers)
    around = Counter(type(module).__name__ for module in (decoder, decoder.embed_tokens, decoder.rotary_emb))
    assert steps == [ops + around] * 4
    assert type(decoder.layers[0]).__name__ in prefill
    assert {name: prefill[name] for name in ops} == {**dict.fromkeys(ops, 0), "normed_rows": 1, "normed_linear": 1}


def test_a_layer_left_alone_runs_its_own_forward(monkeypatch):
    """And the norm behind it is made anew, for want of somebody who prepared it."""
    model = tiny_model()
    layer_of(model, 1).mlp.down_proj.register_forward_hook(turned)
    rollout = rollout_of(model)
    forwards = counted_steps(model, rollout, monkeypatch)
    greedy(rollout, ragged_prompts(PROMPTS), 3)
    for step in forwards[1:]:
        assert (step["normed_rows"], step["normed_linear"], step["residual_linear"]) == (2, 7, 6)
        assert (step["gdn"], step["attention"]) == (2, 1)
        assert (step["Qwen3_5DecoderLayer"], step["Qwen3_5RMSNorm"]) == (1, 2)


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
    parked = ~arena.state.active[:4]
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
