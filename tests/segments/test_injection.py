# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts with fused segments against rollouts without, on models of every family: the same numbers, whatever
happens to the weights, and nothing left behind."""

import pytest
import torch
from harness import assert_same_answers, greedy, prompt, record_logits, rollout_of
from models import FAMILIES, VOCAB, LoraLinear, ragged_prompts, solo, tiny_model
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.ops.gdn_gates import gdn_gates_reference
from deepspeed_hybrid.segments.attention import SharedProduct
from deepspeed_hybrid.segments.plan import plan_segments
from deepspeed_hybrid.segments.weights import FusedLinear

pytestmark = pytest.mark.core

LENGTHS = [1, 2, 17, 40]
RELATIVE = 2e-5  # of the largest logit
PROJECTIONS = {
    "gate_proj": "model.layers.1.mlp",
    "up_proj": "model.layers.1.mlp",
    "in_proj_qkv": "model.layers.1.linear_attn",
    "in_proj_z": "model.layers.1.linear_attn",
    "in_proj_b": "model.layers.1.linear_attn",
    "in_proj_a": "model.layers.1.linear_attn",
    "q_proj": "model.layers.3.self_attn",
    "k_proj": "model.layers.3.self_attn",
    "v_proj": "model.layers.3.self_attn",
}


def bound_modules(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def scatter(model: nn.Module) -> None:
    """Make every parameter a view of a larger storage, so that it can neither move nor be a neighbour."""
    for parameter in model.parameters():
        parameter.data = torch.cat([parameter.data.flatten(), torch.zeros(3)])[:-3].view_as(parameter)


def assert_like_plain(rollout, model: nn.Module, prompts, new_tokens: int = 16):
    """Outputs equal to those of a rollout that fuses nothing, made just now over the same weights."""
    batch = greedy(rollout, prompts, new_tokens)
    plain = greedy(rollout_of(model, use_segki=False), prompts, new_tokens)
    assert torch.equal(batch.input_ids, plain.input_ids)
    torch.testing.assert_close(batch.logprobs, plain.logprobs, atol=5e-4, rtol=0)
    return batch


def modes(rollout) -> set[str]:
    return set(rollout.sync_segki_weights().modes.values())


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("packed", [False, True], ids=["aliased", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_unfused(family, packed):
    model = tiny_model(family)
    if packed:
        scatter(model)
    prompts = ragged_prompts(LENGTHS)
    fused, plain = rollout_of(model, use_segki=True), rollout_of(model, use_segki=False)
    records = [record_logits(rollout) for rollout in (fused, plain)]

    batch, expected = (greedy(rollout, prompts, 128, n_samples_per_prompt=2) for rollout in (fused, plain))

    assert torch.equal(batch.input_ids, expected.input_ids)
    assert batch.finish_reasons == ["length"] * 8
    assert len(records[0]) == len(records[1]) == 128
    bound = RELATIVE * max(float(logits.abs().max()) for logits in records[1])
    assert max(float((one - other).abs().max()) for one, other in zip(*records, strict=True)) <= bound
    report = fused.sync_segki_weights()
    assert list(report.modes) == [segment.path for segment in plan_segments(model)]
    assert set(report.modes.values()) == ({"packed"} if packed else {"aliased"})
    assert fused.memory_report()["packed_weights"] == report.bytes_copied
    assert (report.bytes_copied > 0) == packed
    assert plain.sync_segki_weights().modes == {}


@pytest.mark.parametrize("kind", ["fused_glu", "fused_gdn", "fused_attention"])
def test_one_kind_alone(kind):
    model = tiny_model()
    rollout = rollout_of(model, use_segki=True, segki_kernel=kind)
    assert set(rollout.sync_segki_weights().modes) == {
        segment.path for segment in plan_segments(model) if segment.kind == kind
    }
    assert_like_plain(rollout, model, ragged_prompts(LENGTHS))


def test_fused_products_are_used():
    """Else every comparison here would be of a path with itself."""
    model = tiny_model()
    expected = greedy(rollout_of(model, use_segki=False), ragged_prompts(LENGTHS), 8)
    for kind in ("fused_glu", "fused_gdn", "fused_attention"):
        rollout = rollout_of(model, use_segki=True, segki_kernel=kind)
        for linear in rollout._injection.fused.values():
            weight = linear.tensors[0]
            weight.data = weight.data.roll(1, dims=0)  # no view of the parameters any more
        batch = greedy(rollout, ragged_prompts(LENGTHS), 8)
        assert not torch.equal(batch.logprobs, expected.logprobs), kind


def test_shared_product_belongs_to_its_input():
    """Also where the parts of one were not all taken, as after a failure; a product that is used up is let go."""
    layers = [nn.Linear(6, outputs) for outputs in (5, 3, 8)]
    shared = SharedProduct(FusedLinear(layers))
    inputs = torch.randn(4, 2, 6).unbind()
    for layer, row in ((0, 0), (1, 1), (2, 0), (0, 1), (0, 1), (0, 2), (2, 2), (1, 2), (1, 3), (2, 3), (0, 3)):
        torch.testing.assert_close(shared.part(layer, inputs[row]), layers[layer](inputs[row]))
    assert shared._inputs is None and shared._parts == {}


# ----------------------------------------------------------------------------------------------- weights that change


def replace(model: nn.Module, path: str, name: str) -> None:
    layer = model.get_submodule(f"{path}.{name}")
    layer.weight = nn.Parameter(torch.randn_like(layer.weight) * 0.1)


def write(model: nn.Module, path: str, name: str) -> None:
    model.get_submodule(f"{path}.{name}").weight.data.normal_(std=0.1)


def point_elsewhere(model: nn.Module, path: str, name: str) -> None:
    weight = model.get_submodule(f"{path}.{name}").weight
    weight.data = torch.randn_like(weight) * 0.1


def replace_layer(model: nn.Module, path: str, name: str) -> None:
    old = model.get_submodule(f"{path}.{name}")
    setattr(model.get_submodule(path), name, nn.Linear(old.in_features, old.out_features, bias=False))


@pytest.mark.parametrize("packed", [False, True], ids=["aliased", "packed"])
@pytest.mark.parametrize("change", [replace, write, point_elsewhere, replace_layer])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_next_call_uses_the_weights_of_now(name, change, packed):
    """One projection of a segment, without a word to the rollout; then back in training."""
    model = tiny_model()
    if packed:
        scatter(model)
    prompts = ragged_prompts([3, 9])
    rollout = rollout_of(model, use_segki=True)
    before = greedy(rollout, prompts, 16)

    change(model, PROJECTIONS[name], name)

    after = assert_like_plain(rollout, model, prompts)
    assert not torch.equal(before.logprobs, after.logprobs)
    model.get_submodule(PROJECTIONS[name])._modules[name].weight.data.neg_()
    assert_like_plain(rollout, model, prompts)


@pytest.mark.parametrize("change", [replace, write, point_elsewhere])
@pytest.mark.parametrize("packed", [False, True], ids=["aliased", "packed"])
def test_weights_that_change_between_two_rows(change, packed):
    """The next row's tokens come from the weights that are there when its steps run."""
    prompts, stops = ragged_prompts([3, 7, 5, 9]), list(range(12, 60))
    sampling = SamplingConfig(max_new_tokens=40, temperature=0.0, stop_token_ids=stops)
    rows = {}
    for fused in (True, False):
        model = tiny_model()
        if packed:
            scatter(model)
        iterator = rollout_of(model, use_segki=fused).generate_iter(RolloutRequest(*prompts), sampling)
        taken = [next(iterator)]
        torch.manual_seed(5)
        change(model, PROJECTIONS["up_proj"], "up_proj")
        rows[fused] = taken + list(iterator)
    assert len(rows[True]) == 4
    for one, other in zip(rows[True], rows[False], strict=True):
        assert one.index == other.index and one.tokens.tolist() == other.tokens.tolist()


# ---------------------------------------------------------------------------------------------- modules that are odd


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["q_proj", "up_proj", "in_proj_qkv"])
def test_adapter_takes_part(name, when):
    """Put in place of a projection before the rollout is made, or between two calls."""
    model = tiny_model()
    prompts = ragged_prompts([3, 9])
    rollout = rollout_of(model) if when == "after" else None
    without = greedy(rollout or rollout_of(model), prompts, 16)
    module = model.get_submodule(PROJECTIONS[name])
    torch.manual_seed(3)
    setattr(module, name, LoraLinear(getattr(module, name)))
    rollout = rollout or rollout_of(model, use_segki=True)

    batch = greedy(rollout, prompts, 16)

    assert_same_answers(batch, [solo(model, prompt(prompts, row), 16) for row in range(2)])
    assert not torch.equal(batch.logprobs, without.logprobs)
    assert PROJECTIONS[name].removeprefix("model.") not in rollout.sync_segki_weights().modes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["q_proj", "up_proj", "in_proj_qkv"])
def test_hook_on_a_projection_takes_part(name, when):
    model = tiny_model()
    prompts = ragged_prompts([3, 9])
    rollout = rollout_of(model) if when == "after" else None
    without = greedy(rollout or rollout_of(model), prompts, 16)
    projection = model.get_submodule(f"{PROJECTIONS[name]}.{name}")
    projection.register_forward_hook(lambda layer, args, output: output.roll(1, dims=-1))

    batch = greedy(rollout or rollout_of(model), prompts, 16)

    assert_same_answers(batch, [solo(model, prompt(prompts, row), 16) for row in range(2)])
    assert not torch.equal(batch.logprobs, without.logprobs)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", ["model.layers.1.mlp", "model.layers.3.self_attn", "model.layers.1.mlp.up_proj"])
def test_forward_of_the_users_own_takes_part(path, when):
    model = tiny_model()
    prompts = ragged_prompts([3, 9])
    rollout = rollout_of(model) if when == "after" else None
    without = greedy(rollout or rollout_of(model), prompts, 16)
    module = model.get_submodule(path)
    own = module.forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

    module.forward = forward

    batch = greedy(rollout or rollout_of(model), prompts, 16)

    assert module.__dict__["forward"] is forward and bound_modules(model) == [path]
    assert_same_answers(batch, [solo(model, prompt(prompts, row), 16) for row in range(2)])
    assert not torch.equal(batch.logprobs, without.logprobs)


def test_asked_for_where_nothing_can_be_fused():
    model = tiny_model()
    for segment in plan_segments(model):
        setattr(segment.module, segment.names[-1], LoraLinear(segment.projections[-1]))

    with pytest.raises(RuntimeError) as caught:
        rollout_of(model, use_segki=True)

    message = str(caught.value)
    assert message.startswith("use_segki=True cannot be honoured: no segment can be injected")
    assert all(f"{name} is a models.LoraLinear" in message for name in ("up_proj", "v_proj", "in_proj_a"))
    assert bound_modules(model) == []

    rollout = rollout_of(model)
    assert "use_segki is off: no segment can be injected" in rollout.describe()
    prompts = ragged_prompts([3, 9])
    assert_same_answers(greedy(rollout, prompts, 8), [solo(model, prompt(prompts, row), 8) for row in range(2)])


# ------------------------------------------------------------------------------------------------- nothing left behind


def watched(model: nn.Module, seen: list) -> None:
    """Note what is bound at every forward; fail at the third, if ``seen`` starts with an error."""

    def look(*args) -> None:
        seen.append(bound_modules(model))
        if isinstance(seen[0], BaseException) and len(seen) == 4:
            raise seen[0]

    model.model.embed_tokens.register_forward_hook(look)


def expected_bindings(model: nn.Module) -> set[str]:
    paths = {f"model.{segment.path}" for segment in plan_segments(model) if segment.kind != "fused_attention"}
    # The embedding is watched, and so left alone.
    chains = {"model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{layer}" for layer in range(4))}
    return paths | chains | {f"model.layers.3.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}


@pytest.mark.parametrize("error", [None, RuntimeError("cut"), KeyboardInterrupt("cut")], ids=repr)
def test_bound_while_generating_only(error):
    model, seen = tiny_model(), [] if error is None else [error]
    watched(model, seen)
    rollout = rollout_of(model)
    assert bound_modules(model) == []
    if error is None:
        greedy(rollout, ragged_prompts(LENGTHS), 4)
    else:
        with pytest.raises(type(error), match="cut"):
            greedy(rollout, ragged_prompts(LENGTHS), 8)
    assert bound_modules(model) == []
    assert len(seen) == 4 and set(seen[-1]) == expected_bindings(model)


def test_unbound_between_rows():
    model, seen = tiny_model(), []
    watched(model, seen)
    rows = rollout_of(model).generate_iter(
        RolloutRequest(*ragged_prompts([3, 7, 5, 9])),
        SamplingConfig(max_new_tokens=40, temperature=0.0, stop_token_ids=list(range(12, 30))),
    )
    taken = []
    for row in rows:
        taken.append(row.index)
        assert bound_modules(model) == [] and set(seen[-1]) == expected_bindings(model)
    assert sorted(taken) == [0, 1, 2, 3] and bound_modules(model) == []


@pytest.mark.parametrize("packed", [False, True], ids=["aliased", "packed"])
def test_made_in_inference_mode(packed):
    """Parameters that move must still be able to train, and copies to be refreshed."""
    model = tiny_model().train()
    if packed:
        scatter(model)
    with torch.inference_mode():
        rollout = rollout_of(model, use_segki=True)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    prompts = ragged_prompts([3, 9])
    greedy(rollout, prompts, 4)
    model(input_ids=prompts[0], labels=prompts[0], use_cache=False).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_like_plain(rollout, model.eval(), prompts)


# ---------------------------------------------------------------------------------------------------------- the gates


def test_gates_stay_finite_after_an_initialisation_in_bf16():
    """A decay drawn as 0 in bf16 has a logarithm of minus infinity: such a head forgets nothing."""
    torch.manual_seed(0)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=64,
        linear_num_value_heads=64,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention"] * 47 + ["full_attention"],
        pad_token_id=0,
        eos_token_id=None,
        rope_parameters={**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )
    model = Qwen3_5ForCausalLM(config).eval().bfloat16()
    decays = [layer.linear_attn.A_log for layer in model.model.layers[:-1]]
    with torch.no_grad():
        decays[0][:2] = float("-inf")
    raw = torch.tensor([-1e4, -3.0, 0.0, 3.0, 1e4]).bfloat16()[None, :, None].expand(1, -1, 64)
    for layer in model.model.layers[:-1]:
        mixer = layer.linear_attn
        beta, g = gdn_gates_reference(raw, raw, mixer.A_log, mixer.dt_bias, None)
        assert bool(beta.isfinite().all()) and bool(g.isfinite().all()) and bool((g <= 0).all())
    assert bool((gdn_gates_reference(raw, raw, decays[0], mixer.dt_bias, None)[1][..., :2] == 0).all())

    prompts = ragged_prompts([3, 9])
    rollout = rollout_of(model, use_segki=True)
    seen = record_logits(rollout)
    batch = greedy(rollout, prompts, 6)
    assert len(seen) == 6 and all(bool(logits.isfinite().all()) for logits in seen)
    assert bool(batch.logprobs.isfinite().all())
    exact = model.float()
    assert_same_answers(
        greedy(rollout_of(exact), prompts, 6), [solo(exact, prompt(prompts, row), 6) for row in range(2)]
    )
