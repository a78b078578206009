# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What a decode step launches besides its layers: two ops of ours and none of torch's, and what is left alone."""

from collections import Counter

import pytest
import torch
from chain_cases import CHAINED, PROMPTS, assert_like_hugging_face, turned
from decode_cases import same_bits
from harness import greedy, rollout_of
from models import COMMON, ragged_prompts, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from deepspeed_hybrid import HybridEngineRollout, RolloutRequest, SamplingConfig
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation import arena as arena_module
from deepspeed_hybrid.generation.step import decode_step
from deepspeed_hybrid.ops.decode_step import decode_step as choose
from deepspeed_hybrid.ops.embedded_rows import embedded_rows
from deepspeed_hybrid.ops.rotary_tables import rotary_tables
from deepspeed_hybrid.segments import chains
from deepspeed_hybrid.segments.decoder_layer import PreparedNorm
from deepspeed_hybrid.segments.injection import EMBEDDING, ROTARY
from deepspeed_hybrid.segments.norm import rms_norm
from deepspeed_hybrid.segments.step_inputs import embedding_binding, rotary_binding, rotary_obstacle

pytestmark = pytest.mark.core

OURS = "deepspeed_hybrid::"
# Ops of torch that launch nothing on a GPU: views, and memory for results.
NO_LAUNCH = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the ops that launch something; what ours do inside is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in NO_LAUNCH:
            self.counts[name.removeprefix(OURS)] += 1
        return func(*args, **(kwargs or {}))


def with_gpu_ops(rollout: HybridEngineRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a rollout run the ops that a GPU would, each as one op, which on a CPU is its reference inside."""
    monkeypatch.setattr(chains, "triton_obstacle", lambda: None)
    rollout._injection.chain = chains.chain_ops(torch.device("cuda"), "auto")
    rollout._injection.follow()
    rollout._arena.choose = choose


def launches_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    """Those of every decode step from now on."""
    counts = []

    def counted(*args) -> None:
        with Launches() as launches:
            decode_step(*args)
        counts.append(launches.counts)

    monkeypatch.setattr(arena_module, "decode_step", counted)
    return counts


# ------------------------------------------------------------------------------------------------------- the launches


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CHAINED)
def test_a_step_launches_nothing_of_torch(family, dtype, temperature, monkeypatch):
    model = tiny_model(family).to(dtype)
    layers = text_model(model).layers
    mixers = Counter("gdn_decode" if hasattr(layer, "linear_attn") else "attention_decode" for layer in layers)
    rollout = rollout_of(model)
    with_gpu_ops(rollout, monkeypatch)
    steps = launches_of_steps(monkeypatch)

    sampling = SamplingConfig(max_new_tokens=5, temperature=temperature, seed=1)
    rollout.generate(RolloutRequest(*ragged_prompts(PROMPTS)), sampling)

    before = dict(embedded_rows=1, rotary_tables=1)
    behind = dict(decode_step=1)
    products = dict(normed_linear=2 * len(layers) + 1, residual_linear=2 * len(layers))
    # The first may make what all of them share; on a GPU it is no replay.
    assert steps[1:] == [Counter(**before, **mixers, **products, **behind)] * 3


def test_a_layer_left_alone_does_not_take_the_rest_with_it(monkeypatch):
    """Of the first layer the norm is not prepared: the embedding is torch's then, and the rotary tables still ours."""
    model = tiny_model()
    text_model(model).layers[0].mlp.down_proj.register_forward_hook(turned)
    rollout = rollout_of(model)
    with_gpu_ops(rollout, monkeypatch)
    steps = launches_of_steps(monkeypatch)
    greedy(rollout, ragged_prompts(PROMPTS), 3)
    for step in steps:
        assert (step["embedding"], step["embedded_rows"], step["rotary_tables"], step["cos"]) == (1, 0, 1, 0)


# -------------------------------------------------------------------------------------------------- what is left alone


def hook(name: str):
    return lambda model: getattr(text_model(model), name).register_forward_hook(turned_tables)


def turned_tables(module, args, output):
    """A hook whose effect shows, for tables as for embeddings."""
    if isinstance(output, tuple):
        return output[1], output[0]
    return turned(module, args, output)


def own_forward(name: str):
    def change(model: nn.Module) -> None:
        module = getattr(text_model(model), name)
        theirs = module.forward
        module.forward = lambda *args, **kwargs: turned_tables(None, args, theirs(*args, **kwargs))

    return change


def another_class(name: str):
    def change(model: nn.Module) -> None:
        module = getattr(text_model(model), name)
        theirs = type(module)

        class Turned(theirs):
            def forward(self, *args, **kwargs):
                return turned_tables(self, args, super().forward(*args, **kwargs))

        module.__class__ = Turned

    return change


def another_helper(model: nn.Module) -> None:
    """Its forward is that of Qwen3.5, and what it calls is not."""
    module = text_model(model).rotary_emb
    theirs = type(module)

    class Doubled(theirs):
        def recomposition_frequencies(self, freq):
            return 2 * super().recomposition_frequencies(freq)

    module.__class__ = Doubled


def small_rows(model: nn.Module) -> None:
    text_model(model).embed_tokens.max_norm = 1.0


OBSTACLES = {
    "hook on the embedding": (hook("embed_tokens"), EMBEDDING, "embed_tokens has a forward or hooks"),
    "forward of the embedding": (own_forward("embed_tokens"), EMBEDDING, "embed_tokens has a forward or hooks"),
    "another embedding": (another_class("embed_tokens"), EMBEDDING, "Turned, not a plain embedding"),
    "an embedding that renormalises": (small_rows, EMBEDDING, "embed_tokens renormalises its rows"),
    "hook on the rotary embedding": (hook("rotary_emb"), ROTARY, "the rotary embedding has a forward or hooks"),
    "forward of the rotary embedding": (own_forward("rotary_emb"), ROTARY, "the rotary embedding has a forward"),
    "another rotary embedding": (another_class("rotary_emb"), ROTARY, "the forward of Turned is not that of a known"),
    "another helper": (another_helper, ROTARY, "Doubled gives more than the cos and sin"),
}


@pytest.mark.parametrize("change, key, reason", OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_odd_is_left_alone_and_counts(change, key, reason):
    model = tiny_model()
    change(model)
    rollout = rollout_of(model)
    for other, found in rollout._injection.inputs.items():
        assert (reason in found) if other == key else found is None
    line = next(line for line in rollout.describe().splitlines() if line.split()[:2] == [key, "decode_step"])
    assert "left alone" in line and reason in line
    logprobs = assert_like_hugging_face(rollout, model)
    assert not torch.allclose(logprobs, assert_like_hugging_face(rollout_of(tiny_model()), tiny_model()))


def test_what_is_odd_later_is_left_alone_too():
    model = tiny_model()
    rollout = rollout_of(model)
    assert_like_hugging_face(rollout, model)
    handle = text_model(model).embed_tokens.register_forward_hook(turned)
    assert_like_hugging_face(rollout, model)
    assert rollout._injection.inputs[EMBEDDING] is not None
    handle.remove()
    assert_like_hugging_face(rollout, model)
    assert rollout._injection.inputs == {EMBEDDING: None, ROTARY: None}


@pytest.mark.parametrize(
    "options, reason",
    [(dict(use_segki=False), "no segment is fused"), (dict(segki_kernel="fused_gdn"), "only segments of kind")],
)
def test_both_want_every_segment(options, reason):
    inputs = rollout_of(tiny_model(), **options)._injection.inputs
    assert len(inputs) == 2 and all(reason in one for one in inputs.values())


# ---------------------------------------------------------------------------------------------------------- embedding


@torch.no_grad()
def test_ids_that_lie_apart():
    """As those of prompts of one token do; longer prompts are the module's own."""
    decoder, called = tiny_model().model, []
    norm, ids = rms_norm(decoder.layers[0].input_layernorm), torch.arange(12).view(3, 4)

    def op(*args):
        called.append(args)
        return embedded_rows(*args)

    forward = embedding_binding(decoder.embed_tokens, norm, op, PreparedNorm()).forward
    for columns, ours in ((ids[:, 2:3], True), (ids[:, :1], True), (ids[:, 1:], False), (ids[:0, :1], True)):
        called.clear()
        assert same_bits(forward(columns), decoder.embed_tokens(columns)) and bool(called) == ours


# ------------------------------------------------------------------------------------------------------------- rotary


def llama_with(rope_type: str, **options) -> nn.Module:
    torch.manual_seed(0)
    rope = dict(rope_type=rope_type, rope_theta=10000.0, factor=2.0, original_max_position_embeddings=64, **options)
    config = LlamaConfig(**{**COMMON, "max_position_embeddings": 128}, num_hidden_layers=2, rope_parameters=rope)
    return LlamaForCausalLM(config).eval()


def test_static_frequencies_of_any_kind():
    """yarn scales its tables; what it does to the frequencies is done once."""
    for kind, options in (("yarn", {}), ("linear", {}), ("llama3", dict(low_freq_factor=1.0, high_freq_factor=4.0))):
        model = llama_with(kind, **options)
        assert (model.model.rotary_emb.attention_scaling == 1.0) == (kind != "yarn")
        rollout = rollout_of(model)
        assert rollout._injection.inputs[ROTARY] is None, kind
        assert_like_hugging_face(rollout, model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", ["default"], None])
def test_frequencies_that_may_change(kind):
    module = llama_with("dynamic").model.rotary_emb
    module.rope_type = kind
    assert "may change its frequencies" in rotary_obstacle(module)


def test_axes_that_differ_are_left_to_the_module():
    """Those of an image; a text's are one tensor, expanded."""
    module = tiny_model().model.rotary_emb
    called = []

    def op(*args):
        called.append(args)
        return rotary_tables(*args)

    forward = rotary_binding(module, op, None).forward
    x, positions = torch.empty(2, 1, 8, dtype=torch.bfloat16), torch.tensor([[3], [40]])
    for axes, ours in (
        (positions[None].expand(3, -1, -1), True),
        (torch.stack([positions, positions + 1, positions + 2]), False),
        (positions[None].repeat(3, 1, 1), False),
    ):
        called.clear()
        tables = forward(x, position_ids=axes)
        assert bool(called) == ours
        for one, other in zip(tables, module(x, axes), strict=True):
            assert same_bits(one, other)


def test_prompts_have_an_op_of_their_own():
    module, called = tiny_model("llama").model.rotary_emb, []

    def named(name: str):
        return lambda *args: called.append(name) or rotary_tables(*args)

    x, prompt, token = torch.empty(2, 5, 8), torch.arange(10).view(2, 5), torch.tensor([[3], [40]])
    for prompt_op, expected in ((None, ["step"]), (named("prompt"), ["prompt", "step"])):
        called.clear()
        forward = rotary_binding(module, named("step"), prompt_op).forward
        for positions in (prompt, token):
            for one, other in zip(forward(x, positions), module(x, positions), strict=True):
                assert same_bits(one, other)
        assert called == expected
