# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""In half precision ops round where transformers' code does: their references next to its modules bit by bit, kernels
next to the references, and rollouts next to the training forward."""

from collections.abc import Callable

import gated_norm_cases
import gdn_conv_cases
import gdn_decode_cases
import prompt_heads_cases
import pytest
import torch
import torch.nn.functional as F
from attention_cases import attention_arguments
from fused_linear_cases import normal, residual_arguments
from gdn_decode_cases import interpreted
from models import tiny_model
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from deepspeed_hybrid import HybridEngineRolloutConfig
from deepspeed_hybrid.ops import fused_linear
from deepspeed_hybrid.ops.attention_decode import attention_decode_reference
from deepspeed_hybrid.ops.fused_linear import (
    normed_linear_by_library,
    normed_linear_reference,
    normed_rows_reference,
    residual_linear_by_library,
    residual_linear_reference,
)
from deepspeed_hybrid.ops.gated_heads import gated_heads_reference
from deepspeed_hybrid.ops.gated_norm import gated_norm_reference
from deepspeed_hybrid.ops.gdn_conv import gdn_conv_reference
from deepspeed_hybrid.ops.gdn_decode import gdn_decode_reference
from deepspeed_hybrid.ops.prompt_heads import prompt_heads_reference
from deepspeed_hybrid.segments import chains
from deepspeed_hybrid.tools.fidelity import rolled_out
from deepspeed_hybrid.tools.scoring import decode_logprobs, forward_logprobs

BF16 = torch.bfloat16
ROWS, TOKENS = 3, 20


def share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of elements that are the same to the last bit."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    return float((actual == expected).double().mean())


# ------------------------------------------------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model().to(BF16)


def first(model: torch.nn.Module, kind: type) -> torch.nn.Module:
    return next(module for module in model.modules() if isinstance(module, kind))


def core_of(mixer: torch.nn.Module, output: torch.nn.Linear, *inputs) -> torch.Tensor:
    """What a mixer's forward puts into its output projection."""
    seen: list[torch.Tensor] = []
    hook = output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    mixer(*inputs)
    hook.remove()
    return seen[0]


@torch.no_grad()
def test_gdn_decode_rounds_like_its_layer(model):
    layer = first(model, qwen.Qwen3_5GatedDeltaNet)
    x = normal(ROWS, TOKENS, model.config.hidden_size, dtype=BF16, seed=1)
    inputs = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    projected = torch.cat([projection(x) for projection in inputs], dim=-1)
    window = torch.zeros(ROWS, 2 * layer.key_dim + layer.value_dim, layer.conv_kernel_size, dtype=BF16)
    state = torch.zeros(ROWS, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    weights = layer.conv1d.weight[:, 0], layer.conv1d.bias, layer.A_log, layer.dt_bias
    behind = state, layer.norm.weight, layer.norm.variance_epsilon
    here = torch.zeros(ROWS, dtype=torch.bool)
    out = [
        gdn_decode_reference(
            projected[:, at], window, *weights, *behind, torch.full((ROWS,), at), here, layer.num_k_heads
        )
        for at in range(TOKENS)
    ]
    assert share(torch.stack(out, dim=1), core_of(layer, layer.out_proj, x)) > 0.99


def test_heads_are_rounded_behind_their_norm_where_asked_to():
    """A value of 1 and a beta of 1 write the key itself into an empty state."""
    shape = gdn_decode_cases.Shape(1, 1, 32, 2, kernel=1)
    keys = {}
    for rounded_heads in (True, False):
        arguments = gdn_decode_cases.arguments_of(shape, 1, dtype=BF16, weights=BF16, bias=False)
        arguments["state"].zero_()
        arguments["conv_weight"].fill_(1.0)
        arguments["projected"][:, 64:66], arguments["projected"][:, -2] = 100.0, 100.0
        gdn_decode_reference(**arguments, rounded_heads=rounded_heads)
        keys[rounded_heads] = arguments["state"][0, 0, :, 0] / 100
    assert torch.equal(keys[True], keys[False].to(BF16).float()) and not torch.equal(keys[True], keys[False])


def test_values_are_rounded_behind_their_gate_where_heads_are():
    """An empty state holds a key times what is written, for a key of one dimension is 1 or 0."""
    shape = gdn_decode_cases.Shape(1, 1, 1, 64, kernel=1)
    written = {}
    for rounded_heads in (True, False):
        arguments = gdn_decode_cases.arguments_of(shape, 1, dtype=BF16, weights=BF16, bias=False)
        arguments["state"].zero_()
        arguments["conv_weight"].fill_(1.0)
        arguments["projected"][:, 1] = 100.0
        gdn_decode_reference(**arguments, rounded_heads=rounded_heads)
        written[rounded_heads] = arguments["state"][0, 0, 0]
    assert torch.equal(written[True], written[False].to(BF16).float()) and not torch.equal(*written.values())


@torch.no_grad()
def test_attention_decode_rounds_like_its_layer(model):
    layer, config = first(model, qwen.Qwen3_5Attention), model.config
    x = normal(ROWS, TOKENS, config.hidden_size, dtype=BF16, seed=1)
    cos, sin = first(model, qwen.Qwen3_5TextRotaryEmbedding)(x, torch.arange(TOKENS).expand(ROWS, -1))
    projected = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    keys, values = torch.zeros(2, ROWS, config.num_key_value_heads, TOKENS, layer.head_dim, dtype=BF16)
    norms = layer.q_norm.weight, layer.k_norm.weight, 1.0, layer.q_norm.eps
    here = torch.zeros(ROWS, dtype=torch.bool)
    out = [
        attention_decode_reference(
            projected[:, at], cos[:, at], sin[:, at], keys, values, torch.full((ROWS,), at), here, *norms,
            config.num_attention_heads, True, layer.scaling,
        )
        for at in range(TOKENS)
    ]  # fmt: skip
    assert share(torch.stack(out, dim=1), core_of(layer, layer.o_proj, x, (cos, sin), None)) > 0.99


@torch.no_grad()
@pytest.mark.parametrize("kind", [LlamaRMSNorm, qwen.Qwen3_5RMSNorm])
def test_normed_rows_round_like_either_form_of_norm(kind):
    norm, hidden = kind(96).to(BF16), normal(64, 96, dtype=BF16, seed=1, scale=4)
    norm.weight.copy_(normal(96, dtype=BF16, seed=2))
    offset = 0.0 if kind is LlamaRMSNorm else 1.0
    assert torch.equal(normed_rows_reference(hidden, norm.weight, offset, 1e-6)[0], norm(hidden))


@torch.no_grad()
def test_a_layers_half_rounds_like_its_modules(model):
    layer = first(model, qwen.Qwen3_5DecoderLayer)
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    hidden = normal(ROWS, model.config.hidden_size, dtype=BF16, seed=1)
    scaled, squares = normed_rows_reference(hidden, norm.weight, 1.0, norm.eps)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    gated = normed_linear_reference(scaled, squares, norm.eps, gate_up, None, True)
    out, _, _ = residual_linear_reference(gated, mlp.down_proj.weight, None, hidden, norm.weight, 1.0, norm.eps)
    assert share(out, hidden + mlp(norm(hidden))) > 0.99


# ------------------------------------------------------------------------------------------------------------- kernels

# The interpreter cuts bf16 off where a GPU rounds to nearest, but it rounds to fp16.
HALF = torch.float16


def launch_of(name: str) -> Callable:
    from importlib import import_module  # under the interpreter only

    return import_module(f"deepspeed_hybrid.ops.triton.{name}").launch


def mixer() -> dict:
    return gdn_decode_cases.arguments_of(gdn_decode_cases.Shape(1, 2, 32, 32), 4, dtype=HALF, weights=HALF)


def added() -> dict:
    """Of residual_norm: residual_linear's with a weight of one, so that x is the product."""
    one = residual_arguments(3, 96, 96, dtype=HALF, bias=True, offset=0.0)
    return one | {"weight": torch.eye(96, dtype=HALF)}


def conv_arguments(head_dim: int | None) -> dict:
    """With ``head_dim`` queries and keys are normalised behind the activation, which is rounded first."""
    given = gdn_conv_cases.arguments_of(gdn_conv_cases.Widths(32, 64), 2, 9, dtype=HALF, weights=HALF)
    return given | gdn_conv_cases.slots_of(**given) | {"head_dim": head_dim}


KERNELS: dict[str, tuple[Callable, Callable, Callable[[], dict]]] = {
    "gdn_decode": (gdn_decode_reference, lambda **given: launch_of("gdn_decode")(**given), mixer),
    "gdn_decode of rounded heads": (
        gdn_decode_reference,
        lambda **given: launch_of("gdn_decode")(**given),
        lambda: mixer() | {"rounded_heads": True},
    ),
    "gdn_conv": (
        gdn_conv_reference,
        lambda **given: launch_of("gdn_conv")(**given),
        lambda: conv_arguments(head_dim=None),
    ),
    "gdn_conv of heads": (
        gdn_conv_reference,
        lambda **given: launch_of("gdn_conv")(**given),
        lambda: conv_arguments(head_dim=16),
    ),
    "gated_norm": (
        gated_norm_reference,
        lambda **given: launch_of("gated_norm")(**given),
        lambda: gated_norm_cases.arguments_of(2, 5, 3, 32, dtype=HALF, weights=HALF),
    ),
    "gated_heads": (
        gated_heads_reference,
        lambda **given: launch_of("gated_heads")(**given),
        lambda: prompt_heads_cases.gate_arguments(2, 5, 3, 32, dtype=HALF),
    ),
    "prompt_heads": (
        prompt_heads_reference,
        lambda **given: launch_of("prompt_heads")(**given),
        lambda: prompt_heads_cases.heads_arguments(2, 5, 4, 2, 32, 8, True, HALF, HALF, tables=HALF),
    ),
    "attention_decode": (
        attention_decode_reference,
        lambda **given: launch_of("attention_decode")(**given),
        lambda: attention_arguments([1, 7, 40], dtype=HALF, cos_dtype=HALF),
    ),
    "rms_norm": (
        lambda **given: normed_rows_reference(**given)[0],
        lambda hidden, norm, norm_offset, eps: launch_of("rms_norm")(hidden, norm, norm_offset, eps),
        lambda: {
            "hidden": normal(9, 96, dtype=HALF, seed=1, scale=4),
            "norm": normal(96, dtype=HALF, seed=2),
            "norm_offset": 0.0,
            "eps": 1e-6,
        },
    ),
    "residual_norm": (
        lambda **given: residual_linear_reference(**given)[:2],
        lambda x, weight, bias, **rest: launch_of("residual_norm")(F.linear(x, weight, bias), *rest.values()),
        added,
    ),
    "row_linear": (
        lambda x, weight: normed_linear_reference(x, x.new_empty(0, 1, dtype=torch.float32), 0.0, weight, None, True),
        lambda x, weight: launch_of("row_linear")(x, weight, None, 0.0, None, None, None, 0.0, True)[0],
        lambda: {
            "x": normal(1, 32, dtype=HALF, seed=1),
            "weight": normal(2 * 200, 32, dtype=HALF, seed=2, scale=0.5),
        },
    ),
}


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_rounds_like_its_reference(name):
    reference, kernel, arguments = KERNELS[name]
    results = reference(**arguments()), kernel(**arguments())
    for expected, actual in zip(*(one if isinstance(one, tuple) else (one,) for one in results), strict=True):
        # Attention's weights are relative to the peak of a block in the kernel, and of all of them in the reference.
        assert share(actual, expected) > (0.8 if name == "attention_decode" else 0.98)


# --------------------------------------------------------------------------------------------------- train_consistent


@pytest.mark.interpreter
@interpreted
def test_a_product_behind_a_whole_norm_is_the_training_forwards():
    """By one launch a norm is split around its product, and rounds elsewhere."""
    one = residual_arguments(1, 96, 64, dtype=HALF)
    weight, norm = normal(200, 96, dtype=HALF, seed=7, scale=0.1), (one["next_norm"], one["next_offset"], 1e-6)
    hidden, scaled, squares = residual_linear_by_library(**one)
    hidden_too, scaled_too, squares_too = launch_of("row_linear")(
        one["x"], one["weight"], None, 0.0, None, one["residual"], *norm[:2], False
    )
    assert share(hidden, residual_linear_reference(**one)[0]) > 0.98
    trained = torch.nn.functional.linear(normed_rows_reference(hidden, *norm)[0], weight)
    assert share(normed_linear_by_library(scaled, squares, 1e-6, weight, None, False), trained) > 0.98
    assert torch.equal(hidden, hidden_too)
    split, _, _ = launch_of("row_linear")(scaled_too, weight, squares_too, 1e-6, None, None, None, 0.0, False)
    assert share(split, trained) < 0.9


def test_train_consistent_takes_whole_norms_and_the_librarys_products(monkeypatch):
    monkeypatch.setattr(chains, "triton_obstacle", lambda: None)
    usual, trained = (chains.chain_ops(torch.device("cuda"), "auto", train_consistent=one) for one in (False, True))
    assert (usual.normed_linear, usual.residual_linear) == (fused_linear.normed_linear, fused_linear.residual_linear)
    assert (trained.normed_linear, trained.residual_linear) == (normed_linear_by_library, residual_linear_by_library)
    assert all(ops.gdn.keywords == {"rounded_heads": True} for ops in (usual, trained))


@pytest.mark.parametrize("other", [{"batch_invariant": True}, {"state_dtype": "bfloat16"}], ids=str)
def test_train_consistent_refuses_what_training_has_not(other):
    with pytest.raises(ValueError, match="where (batch_invariant|train_consistent) is True"):
        HybridEngineRolloutConfig(train_consistent=True, **other)


# ------------------------------------------------------------------------------------------------------------ rollouts


@pytest.mark.parametrize("segki", ["on", "off", "consistent"])
def test_rollouts_in_bf16_are_as_near_to_training_as_transformers_decode(segki):
    model = tiny_model().to(BF16)
    prompts = torch.randint(3, 200, (16, 12), generator=torch.Generator().manual_seed(1))
    said = rolled_out(model, prompts, 24, 1.0, 1, segki)
    training = forward_logprobs(model, said, 1.0)
    ours, theirs = (float((one - training).abs().mean()) for one in (said.logprobs, decode_logprobs(model, said, 1.0)))
    assert 0 < ours < 1.5 * theirs
