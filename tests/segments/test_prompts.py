# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ops of a prompt's forward, as their references here: that they run and where, Hugging Face's numbers, and
nothing left behind. On a CPU a rollout runs the model's own code instead."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import harness
import pytest
import torch
from chain_cases import assert_like_hugging_face, layer_of, turned
from decode_cases import same_bits
from fused_linear_cases import normal, rms_norm_oracle
from harness import (
    assert_same_answers,
    feed,
    greedy,
    new_cache,
    prompt,
    record_logits,
    rollout_of,
    stepwise_logits,
)
from models import FAMILIES, Tokenizer, ragged_prompts, solo, tiny_model
from prompt_ops import with_ops
from tolerances import assert_close
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from deepspeed_hybrid import HybridEngineRollout
from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.ops.fused_linear import (
    normed_linear_by_library,
    normed_rows,
    normed_rows_reference,
    residual_linear_by_library,
)
from deepspeed_hybrid.ops.gated_heads import gated_heads, gated_heads_reference
from deepspeed_hybrid.ops.gated_norm import gated_norm
from deepspeed_hybrid.ops.gdn_chunks import gdn_chunks, gdn_chunks_reference
from deepspeed_hybrid.ops.gdn_conv import gdn_conv, gdn_conv_reference
from deepspeed_hybrid.ops.keep_tokens import keep_tokens
from deepspeed_hybrid.ops.prompt_heads import prompt_heads, prompt_heads_reference
from deepspeed_hybrid.ops.rotary_tables import rotary_tables
from deepspeed_hybrid.segments import chains
from deepspeed_hybrid.segments.apply import bound
from deepspeed_hybrid.segments.injection import Injection
from deepspeed_hybrid.segments.prompts import PromptOps, norm_binding

pytestmark = pytest.mark.core

RELATIVE = 2e-5  # of the largest logit


def counts_of(model: nn.Module) -> Counter:
    """Of a forward through every layer; the last norm is in the head's product. Where layers are chains, each hands
    the next its norm."""
    decoder, counts = text_model(model), Counter(rotary_tables=1)
    for layer in decoder.layers:
        attention, chained = getattr(layer, "self_attn", None), not hasattr(layer.mlp, "experts")
        if attention is not None and chained:
            gated = attention.q_proj.out_features != attention.o_proj.in_features
            heads = 2 if layer is decoder.layers[-1] else 1  # keys of all tokens, queries of the last ones
            counts.update(prompt_heads=heads, gated_heads=int(gated), keep_tokens=1)
        if chained:
            counts.update(normed_linear=1, residual_linear=2, normed_rows=int(layer is decoder.layers[0]))
        else:
            counts.update(normed_rows=4 if hasattr(attention, "q_norm") else 2)
        if hasattr(layer, "linear_attn"):
            counts.update(gdn_conv=1, gdn_chunks=1, gated_norm=1)
    return counts


def bound_norms(rollout: HybridEngineRollout) -> set[str]:
    """Paths of the norms that have our forward while generating."""
    injection = rollout._injection
    with injection.bound():
        return {
            name
            for name, module in injection.model.named_modules()
            if "forward" in module.__dict__ and "norm" in name.rsplit(".", 1)[-1]
        }


# ---------------------------------------------------------------------------------------------------- which path runs


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_hugging_faces(family):
    """Ragged prompts, two samples of each."""
    model, lengths, steps = tiny_model(family), [1, 2, 17, 40], 12
    prompts = ragged_prompts(lengths)
    oracle = [solo(model, prompt(prompts, row), steps) for row in range(len(lengths))]
    logits = torch.stack([row.logits for row in oracle], dim=1)
    rollout = rollout_of(model)
    forwards = with_ops(rollout)
    seen = record_logits(rollout)

    batch = greedy(rollout, prompts, steps, n_samples_per_prompt=2)

    limit = RELATIVE * float(logits.abs().max())
    assert_same_answers(batch, oracle, samples=2, atol=2 * limit)
    difference = stepwise_logits(seen, len(lengths), samples=2) - logits.repeat_interleave(2, dim=1)
    assert float(difference.abs().max()) <= limit
    prefill, *steps_taken = forwards
    expected = counts_of(model)
    assert prefill == expected
    # No layer of a mixture of experts is a chain.
    step = Counter(normed_rows=expected["normed_rows"]) if family == "qwen3_next" else Counter()
    assert steps_taken == [step] * (steps - 1)


def test_a_few_rows_go_through_the_layers_own_forward():
    """Their product would leave half of a norm to its reader."""
    model = tiny_model()
    prompts = ragged_prompts([4, 8])
    oracle = [solo(model, prompt(prompts, row), 3) for row in range(2)]
    rollout = rollout_of(model)
    forwards = with_ops(rollout)
    assert_same_answers(greedy(rollout, prompts, 3), oracle)
    assert forwards[0]["residual_linear"] == 0 and forwards[0]["normed_rows"] == 8


def test_a_cpu_runs_the_models_own():
    rollout = rollout_of(tiny_model())
    assert rollout._injection.prompt == PromptOps() and rollout._injection.norms == []
    assert "prompt ops" not in rollout.describe() and "launch for each" not in rollout.describe()


@pytest.mark.parametrize("backend", ["auto", "triton", "cuda", "torch"])
def test_a_gpu_runs_tritons_or_says_why(backend, monkeypatch):
    monkeypatch.setattr(chains, "triton_obstacle", lambda: None)
    off: dict[str, str] = {}
    ops = chains.prompt_ops(torch.device("cuda"), backend, off)
    if backend in ("auto", "triton"):
        attention = rotary_tables, prompt_heads, gated_heads, keep_tokens
        products = normed_linear_by_library, residual_linear_by_library
        expected = PromptOps(gdn_conv, gdn_chunks, normed_rows, gated_norm, *attention, *products)
        assert replace(ops, shared_sum=None) == expected and off == {}
        assert (ops.shared_sum.product, ops.shared_sum.norm) == (normed_linear_by_library, normed_rows)
    else:
        assert ops == PromptOps() and off == {"prompt ops": f"segki_backend is {backend!r}"}
    off.clear()
    assert chains.prompt_ops(torch.device("cuda"), backend, off, train_consistent=True) == PromptOps() and not off
    monkeypatch.setattr(chains, "triton_obstacle", lambda: "Triton is not installed")
    assert chains.prompt_ops(torch.device("cuda"), "auto", off) == PromptOps()
    assert off == {"prompt ops": "Triton is not installed"}


@pytest.mark.parametrize("kind", ["fused_glu", "fused_gdn", "fused_attention", None])
def test_norms_are_for_all_segments_and_the_conv_for_every_choice(kind):
    model = tiny_model()
    rollout = rollout_of(model, **({"use_segki": False} if kind is None else {"segki_kernel": kind}))
    forwards = with_ops(rollout)
    assert rollout._injection.norms == []
    assert_like_hugging_face(rollout, model)
    assert forwards[0] == Counter(gdn_conv=3, gdn_chunks=3, gated_norm=3)


def test_describe_has_one_row_for_all_norms():
    rollout = rollout_of(tiny_model())
    with_ops(rollout)
    assert rollout._injection.rows()[-1] == ("all", "norm", "one launch for each of 10", "-", "")
    assert "one launch for each of 10" in rollout.describe()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama", "qwen2_5"])
def test_prompts_are_still_captured(family):
    rollout = rollout_of(tiny_model(family))
    with_ops(rollout)
    assert rollout._injection.prompt_obstacle is None


# ----------------------------------------------------------------------------------------------------------- the conv


@pytest.mark.parametrize("chunks", [None, gdn_chunks_reference], ids=["the model's scan", "ours"])
def test_chunks_of_a_prompt(monkeypatch, chunks):
    """Shorter and longer than the conv's window, to which each adds."""
    ops = PromptOps(
        gdn_conv_reference,
        chunks,
        normed_rows_reference,
        prompt_heads=prompt_heads_reference,
        gated_heads=gated_heads_reference,
    )
    monkeypatch.setattr(harness, "Injection", partial(Injection, prompt=ops))
    model = tiny_model()
    tokens = ragged_prompts([23])[0][0]
    cache, seen = new_cache(model), []
    for start, end in ((0, 2), (2, 3), (3, 11), (11, 13), (13, 23)):
        seen.append(feed(cache, tokens[start:end], start))
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0, [1, 2, 10, 12, 22]]
    assert float((torch.stack(seen) - expected).abs().max()) <= RELATIVE * float(expected.abs().max())


def test_a_conv_with_another_activation_is_torchs():
    model = tiny_model()
    layer_of(model, 1).linear_attn.activation = "gelu"
    rollout = rollout_of(model)
    forwards = with_ops(rollout)
    greedy(rollout, ragged_prompts([3, 9]), 2)
    assert forwards[0]["gdn_conv"] == forwards[0]["gdn_chunks"] == 2
    assert "the activation of its conv is gelu" in rollout.describe()


# ------------------------------------------------------------------------------------------------------- the attention


def test_eager_attention_is_the_models_own():
    model = tiny_model()
    model.config._attn_implementation = "eager"
    rollout = rollout_of(model)
    forwards = with_ops(rollout)
    assert_like_hugging_face(rollout, model)
    assert forwards[0]["prompt_heads"] == forwards[0]["gated_heads"] == 0 and forwards[0]["gdn_conv"] == 3


@pytest.mark.parametrize("name", ["q_norm", "k_proj", "o_proj"])
def test_a_hook_in_attention_takes_part(name):
    model = tiny_model()
    rollout = rollout_of(model)
    forwards = with_ops(rollout)
    without = assert_like_hugging_face(rollout, model)
    getattr(layer_of(model, 3).self_attn, name).register_forward_hook(turned)
    assert not torch.equal(assert_like_hugging_face(rollout, model), without)
    assert forwards[0]["prompt_heads"] == 2 and forwards[-1]["prompt_heads"] == 0


def test_what_was_in_a_slot_does_not_matter():
    """The first tokens see keys and values as they are given; those of an earlier row are still in the cache."""
    model = tiny_model("qwen3")
    rollout = rollout_of(model)
    with_ops(rollout)
    first = assert_like_hugging_face(rollout, model)
    for layer in rollout._arena.cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert torch.equal(assert_like_hugging_face(rollout, model), first)


# ---------------------------------------------------------------------------------------------------------- the norms


def test_a_hook_on_a_norm_takes_part():
    model = tiny_model()
    rollout = rollout_of(model)
    with_ops(rollout)
    without = assert_like_hugging_face(rollout, model)
    assert {"model.layers.1.input_layernorm", "model.layers.3.self_attn.q_norm"} <= bound_norms(rollout)
    layer_of(model, 1).input_layernorm.register_forward_hook(turned)
    layer_of(model, 3).self_attn.q_norm.register_forward_hook(turned)
    assert not torch.equal(assert_like_hugging_face(rollout, model), without)
    assert not {"model.layers.1.input_layernorm", "model.layers.3.self_attn.q_norm"} & bound_norms(rollout)
    assert len(rollout._injection.norms) == 8


def test_a_forward_of_the_users_own_takes_part():
    model = tiny_model()
    rollout = rollout_of(model)
    with_ops(rollout)
    without = assert_like_hugging_face(rollout, model)
    norm = layer_of(model, 2).post_attention_layernorm
    norm.forward = own = lambda hidden: type(norm).forward(norm, hidden).roll(1, -1)
    assert not torch.equal(assert_like_hugging_face(rollout, model), without)
    assert norm.__dict__["forward"] is own


@pytest.mark.parametrize("error", [None, RuntimeError("cut"), KeyboardInterrupt("cut")], ids=repr)
def test_bound_while_generating_only(error):
    model = tiny_model()
    rollout = rollout_of(model)
    with_ops(rollout)
    seen = []

    def look(*_) -> None:
        seen.append([name for name, module in model.named_modules() if "forward" in module.__dict__])
        if error is not None:
            raise error

    model.model.embed_tokens.register_forward_hook(look)
    if error is None:
        greedy(rollout, ragged_prompts([3]), 2)
    else:
        with pytest.raises(type(error), match="cut"):
            greedy(rollout, ragged_prompts([3]), 2)
    expected = {f"model.layers.{index}.{name}_layernorm" for index in range(4) for name in ("input", "post_attention")}
    assert expected <= set(seen[0])
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("how", ["write", "data", "parameter"])
def test_weights_of_now(how):
    model = tiny_model()
    rollout = rollout_of(model)
    with_ops(rollout)
    before = assert_like_hugging_face(rollout, model)
    for norm in (layer_of(model, 1).post_attention_layernorm, layer_of(model, 3).self_attn.k_norm):
        values = 2 * torch.rand(norm.weight.shape)
        if how == "write":
            norm.weight.data.copy_(values)
        elif how == "data":
            norm.weight.data = values
        else:
            norm.weight = nn.Parameter(values)
    assert not torch.equal(assert_like_hugging_face(rollout, model), before)


def test_gathered_weights(make_engine, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 replaces it for good
    plain = tiny_model()
    prompts = ragged_prompts([3, 20])
    expected = [solo(plain, prompt(prompts, row), 6) for row in range(2)]
    rollout = HybridEngineRollout(make_engine(tiny_model(), stage=3), Tokenizer())
    forwards = with_ops(rollout)
    assert len(rollout._injection.norms) == 10 and rollout._injection.prompt_obstacle is None
    assert_same_answers(greedy(rollout, prompts, 6), expected)
    assert forwards[0] == counts_of(plain)


# ------------------------------------------------------------------------------------------------------ one norm alone


def made(kind: type[nn.Module], size: int = 24, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = kind(size, eps=1e-6).to(dtype)
    module.weight.data.copy_(normal(size, dtype=dtype, seed=3))
    return module


@contextmanager
def ours(module: nn.Module) -> Iterator[None]:
    """The module with our forward, and without it on exit."""
    with bound([norm_binding(module, normed_rows_reference)]):
        yield
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    "kind, offset",
    [(LlamaRMSNorm, 0.0), (Qwen3_5RMSNorm, 1.0), (nn.RMSNorm, 0.0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_inputs_of_any_layout(kind, offset, dtype):
    """Hidden states, and heads as they lie in a product of queries and gates."""
    module = made(kind, dtype=dtype)
    wide = normal(2, 5, 3 * 48, dtype=dtype, seed=4)
    queries = wide.view(2, 5, 3, 48).chunk(2, dim=-1)[0]
    across = normal(24, 7, dtype=dtype, seed=5).t()
    for hidden in (wide[..., :24], queries, queries.transpose(1, 2), across, queries[0, 0, 0], queries[:0]):
        with ours(module):
            normed = module(hidden)
        assert normed.shape == hidden.shape and normed.dtype == dtype
        assert_close(normed, rms_norm_oracle(hidden, module.weight, offset, 1e-6))


@pytest.mark.parametrize(
    "kind, dtype", [(LlamaRMSNorm, torch.float32), (Qwen3_5RMSNorm, torch.bfloat16)], ids=["llama", "qwen3_5"]
)
@torch.no_grad()
def test_another_dtype_than_the_weights_is_the_modules_own(kind, dtype):
    """Of an input in bf16 under weights in fp32, one family makes fp32 and another bf16."""
    module, hidden = made(kind), normal(3, 24, dtype=torch.bfloat16, seed=4)
    expected = module(hidden)
    with ours(module):
        result = module(hidden)
    assert result.dtype == dtype and same_bits(result, expected)
