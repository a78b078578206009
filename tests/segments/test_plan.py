# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What the plan finds in every family, that it changes nothing, and what it leaves alone with which reason."""

from collections import Counter

import pytest
import torch
from harness import rollout_of
from models import FAMILIES, LoraLinear, tiny_model
from torch import nn
from transformers import Qwen3_5ForCausalLM

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.segments.plan import ATTENTION, GDN, GLU, Segment, plan_segments
from deepspeed_hybrid.tools.models import load_config

KINDS = (GLU, GDN, ATTENTION)
SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
JOINED = ("in_proj_qkvz", "in_proj_ba")
NAMES = {GLU: ("gate_proj", "up_proj"), GDN: SEPARATE, ATTENTION: ("q_proj", "k_proj", "v_proj")}
PROJECTIONS = [(kind, name) for kind, names in NAMES.items() for name in names]
HYBRID = {GLU: 4, GDN: 3, ATTENTION: 1}
EXPECTED = {
    "qwen3_5": HYBRID,
    "qwen3_5_conditional": HYBRID,
    "qwen3_next": HYBRID,
    "qwen2_5": {GLU: 3, ATTENTION: 3},
    "qwen3": {GLU: 3, ATTENTION: 3},
    "llama": {GLU: 3, ATTENTION: 3},
    "gdn_only": {GLU: 2, GDN: 2},
}


def first(segments: list[Segment], kind: str) -> Segment:
    return next(segment for segment in segments if segment.kind == kind)


# ------------------------------------------------------------------------------------------------------ what is found


@pytest.fixture(scope="module")
def large():
    """Qwen3.5-4B without its weights."""
    with torch.device("meta"):
        return Qwen3_5ForCausalLM(load_config("qwen3.5-4b"))


def test_plan_of_qwen3_5_4b(large):
    segments = plan_segments(large)

    assert Counter(segment.kind for segment in segments) == {GLU: 32, GDN: 24, ATTENTION: 8}
    assert [segment.reason for segment in segments] == [None] * 64
    assert all(parameter.is_meta for parameter in large.parameters())
    assert [segment.layer for segment in segments] == [layer for layer in range(32) for _ in range(2)]
    assert [segment.layer for segment in segments if segment.kind == ATTENTION] == list(range(3, 32, 4))
    rows = {
        kind: [projection.out_features for projection in first(segments, kind).projections]
        for kind in (GLU, GDN, ATTENTION)
    }
    assert rows == {GLU: [9216, 9216], GDN: [8192, 4096, 32, 32], ATTENTION: [8192, 1024, 1024]}


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_of_every_family(family):
    model = tiny_model(family)

    segments = plan_segments(model)

    assert Counter(segment.kind for segment in segments) == EXPECTED[family]
    assert all(segment.reason is None for segment in segments)
    names = {**NAMES, GDN: JOINED if family == "qwen3_next" else SEPARATE}
    for segment in segments:
        assert segment.names == names[segment.kind]
        assert text_model(model).get_submodule(segment.path) is segment.module
        assert segment.path.startswith(f"layers.{segment.layer}.")
        assert segment.projections == [getattr(segment.module, name) for name in segment.names]
    assert len({segment.path for segment in segments}) == len(segments)


def test_shared_expert_is_found_and_routed_experts_are_not():
    paths = [segment.path for segment in plan_segments(tiny_model("qwen3_next")) if segment.kind == GLU]
    assert paths == [f"layers.{layer}.mlp.shared_expert" for layer in range(4)]


def test_vision_tower_is_left_out():
    model = tiny_model("qwen3_5_conditional")
    assert any("visual" in name for name, _ in model.named_modules())
    decoder = set(text_model(model).modules())
    assert all(segment.module in decoder for segment in plan_segments(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["all", *KINDS])
def test_plan_changes_nothing(family, kinds):
    model = tiny_model(family)

    def state() -> dict:
        attributes = {
            name: {key: id(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()
        }
        tensors = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()}
        hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
        return dict(attributes=attributes, tensors=tensors, hooks=hooks, keys=list(model.state_dict()))

    before, values = state(), {name: value.clone() for name, value in model.state_dict().items()}

    plan_segments(model, kinds)

    assert state() == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


# -------------------------------------------------------------------------------------------------- what is left alone


def add_bias(module: nn.Module, name: str) -> None:
    layer = getattr(module, name)
    layer.bias = nn.Parameter(torch.zeros(layer.out_features))


def wrap(module: nn.Module, name: str) -> None:
    setattr(module, name, LoraLinear(getattr(module, name)))


def quantise(module: nn.Module, name: str) -> None:
    layer = getattr(module, name)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)


def add_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_hook(lambda layer, args, output: output)


def add_pre_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_pre_hook(lambda layer, args: None)


def bind_forward(module: nn.Module, name: str) -> None:
    layer = getattr(module, name)
    layer.forward = layer.forward


def parametrize(module: nn.Module, name: str) -> None:
    nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", nn.Identity())


def subclass(module: nn.Module, name: str) -> None:
    class ShardedLinear(nn.Linear):
        pass

    getattr(module, name).__class__ = ShardedLinear


def halve(module: nn.Module, name: str) -> None:
    getattr(module, name).bfloat16()


OBSTACLES = {
    "bias": (add_bias, ("bias",)),
    "adapter": (wrap, ("{name}", "LoraLinear")),
    "int8": (quantise, ("{name}", "quantised", "int8")),
    "hook": (add_hook, ("{name}", "hook")),
    "pre hook": (add_pre_hook, ("{name}", "hook")),
    "bound forward": (bind_forward, ("{name}", "forward of its own")),
    "parametrized": (parametrize, ("{name}", "ParametrizedLinear")),
    "subclass": (subclass, ("{name}", "ShardedLinear")),
    "other dtype": (halve, ("dtype",)),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("kind, name", PROJECTIONS, ids=[name for _, name in PROJECTIONS])
def test_projection_that_is_not_plain(kind, name, obstacle):
    """Any one projection is enough; only its own segment is left alone, and the reason names the cause."""
    model = tiny_model()
    change, fragments = OBSTACLES[obstacle]
    odd = first(plan_segments(model), kind)
    change(odd.module, name)

    segments = plan_segments(model)

    assert {segment.path for segment in segments if segment.reason} == {odd.path}
    reason = first(segments, kind).reason
    assert [part for part in fragments if part.format(name=name) not in reason] == [], reason


@pytest.mark.parametrize(
    "activation", [nn.GELU(), nn.ReLU(), nn.Identity(), torch.nn.functional.gelu], ids=["gelu", "relu", "none", "f"]
)
def test_another_activation(activation):
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = activation

    reasons = {segment.path: segment.reason for segment in plan_segments(model) if segment.reason}

    assert list(reasons) == ["layers.1.mlp"]
    assert type(activation).__name__ in reasons["layers.1.mlp"] and "SiLU" in reasons["layers.1.mlp"]


def test_biases_on_both_halves_of_an_mlp():
    model = tiny_model("llama")
    for name in NAMES[GLU]:
        add_bias(model.model.layers[2].mlp, name)
    reasons = {segment.path: segment.reason for segment in plan_segments(model) if segment.reason}
    assert list(reasons) == ["layers.2.mlp"] and "bias" in reasons["layers.2.mlp"]


def test_mlp_with_a_forward_of_its_own():
    """Our forward would run in place of the user's."""
    model = tiny_model("llama")
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda hidden_states: hidden_states
    reasons = {segment.path: segment.reason for segment in plan_segments(model) if segment.reason}
    assert list(reasons) == ["layers.2.mlp"] and "forward of its own" in reasons["layers.2.mlp"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone(kind):
    model = tiny_model()
    add_bias(first(plan_segments(model), GLU).module, "up_proj")

    segments = plan_segments(model, kind)

    assert len(segments) == 8
    for segment in segments:
        if segment.kind == kind:
            assert segment.reason is None or "bias" in segment.reason
        elif segment.path == "layers.0.mlp":
            assert "bias" in segment.reason, "a reason of its own comes first"
        else:
            assert "segki_kernel" in segment.reason and kind in segment.reason
    assert sum(segment.reason is None for segment in segments) == {GLU: 3, GDN: 3, ATTENTION: 1}[kind]


# ---------------------------------------------------------------------------------------------------------- in words


def described(rollout) -> dict[tuple[str, str], str]:
    """(layer, segment) -> the rest of its line."""
    lines = rollout.describe().splitlines()
    start = next(index for index, line in enumerate(lines) if line.split()[:2] == ["layer", "segment"])
    rows = [line.split(maxsplit=2) for line in lines[start + 1 : lines.index("", start)]]
    return {(layer, kind): rest for layer, kind, rest in rows}


def test_describe_shows_every_segment():
    model = tiny_model()
    wrap(model.model.layers[3].self_attn, "k_proj")
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]  # a view: it cannot move

    rows = described(rollout_of(model, segki_kernel="all"))

    chains = {(where, "decode_step") for where in ("0", "1", "2", "3", "head")}
    inputs = {("embedding", "decode_step"), ("rotary", "decode_step")}
    assert set(rows) == {(str(segment.layer), segment.kind) for segment in plan_segments(model)} | chains | inputs
    assert all(rows[one].startswith("one launch ") for one in inputs)
    assert rows["0", GDN].startswith("one product of in_proj_qkv in_proj_z in_proj_b in_proj_a ")
    assert rows["0", GDN].split()[-1] == "aliased"
    assert rows["0", GLU].startswith("one product of gate_proj up_proj ") and rows["0", GLU].split()[-1] == "aliased"
    assert rows["2", GLU].startswith("one product of gate_proj up_proj ") and rows["2", GLU].split()[-1] == "packed"
    assert rows["3", ATTENTION].split()[:3] == ["left", "alone", "-"]
    assert "k_proj is a models.LoraLinear" in rows["3", ATTENTION]
    for where, kind in chains - {("3", "decode_step")}:
        assert rows[where, kind].split() == ["one", "chain", "of", "ops", "-"]
    assert rows["3", "decode_step"].split()[:3] == ["left", "alone", "-"]
    assert "fused_attention: k_proj is a models.LoraLinear" in rows["3", "decode_step"]


def test_describe_shows_what_was_not_chosen():
    rows = described(rollout_of(tiny_model(), segki_kernel=GDN))
    assert rows["3", ATTENTION].startswith("left alone") and "segki_kernel is 'fused_gdn'" in rows["3", ATTENTION]
    assert rows["0", GDN].startswith("one product of ")
    assert "fused_glu: segki_kernel is 'fused_gdn'" in rows["0", "decode_step"]
    assert rows["head", "decode_step"].startswith("one chain of ops")


def test_describe_without_segments_says_why():
    text = rollout_of(tiny_model(), use_segki=False).describe()
    assert "one product" not in text and "use_segki is off: it was set to False" in text
