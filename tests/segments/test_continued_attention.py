# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Later chunks of a long prompt: right, and in memory that does not go by the prompt's length."""

from functools import partial

import pytest
import torch
from harness import assert_same_answers, greedy, prompt, rollout_of
from models import ragged_prompts, solo, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid.generation import loop
from deepspeed_hybrid.generation.prefill import prefill
from deepspeed_hybrid.segments import continued_attention
from deepspeed_hybrid.segments.continued_attention import NAME, last_queries

pytestmark = pytest.mark.core

BUDGET = 32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loop, "prefill", partial(prefill, token_budget=BUDGET))


@pytest.fixture
def counted(monkeypatch):
    """(queries, keys) of every attention that goes on from a chunk."""
    seen, own = [], continued_attention.last_queries

    def noted(query, key, value, scaling=None):
        seen.append((query.shape[2], key.shape[2]))
        return own(query, key, value, scaling)

    monkeypatch.setattr(continued_attention, "last_queries", noted)
    return seen


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 7), (5, 5), (4, 7), (33, 100)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_last_queries_against_float64(queries, keys, heads, kv_heads):
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, 16)
    key, value = (torch.randn(2, kv_heads, keys, 16) for _ in range(2))
    got = last_queries(query, key, value, 0.3)
    wide = [states.double().repeat_interleave(heads // kv_heads, dim=1) for states in (key, value)]
    scores = 0.3 * query.double() @ wide[0].transpose(2, 3)
    late = torch.arange(keys)[None, :] > torch.arange(keys - queries, keys)[:, None]
    wanted = scores.masked_fill(late, float("-inf")).softmax(-1) @ wide[1]
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama", "qwen3_next"])
def test_long_prompts_are_hugging_faces(family, counted):
    model, prompts = tiny_model(family), ragged_prompts([100, 3, 33, 32, 65])
    batch = greedy(rollout_of(model), prompts, 8, continuous_batch_size=2)
    assert_same_answers(batch, [solo(model, prompt(prompts, row), 8) for row in range(5)])
    # Only of prompts that are longer than the budget, and not of their first chunk.
    layers = 1 if family in ("qwen3_5", "qwen3_next") else 3
    chunks = [(32, 64), (32, 96), (4, 100), (1, 33), (32, 64), (1, 65)]
    assert counted == [chunk for chunk in chunks for _ in range(layers)]


class LargestBytes(TorchDispatchMode):
    """The most bytes of any tensor that an operator makes; views make none."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if all(returned.alias_info is None for returned in function._schema.returns):
            sizes = [leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            self.largest = max([self.largest, *sizes])
        return outputs


def test_nothing_but_the_kernel_sees_the_whole_prompt(monkeypatch):
    """Where a kernel needs no mask; the dense one that stands in for it here is left out."""

    def kernel(query, key, value, scaling=None):
        with torch.utils._python_dispatch._disable_current_modes():
            return last_queries(query, key, value, scaling)

    model, largest = tiny_model(), []
    monkeypatch.setattr(continued_attention, "last_queries", kernel)
    for length in (64, 960):
        rollout, prompts = rollout_of(model), ragged_prompts([length])
        greedy(rollout, prompts, 1)  # the cache is there
        with LargestBytes() as watch:
            greedy(rollout, prompts, 1)
        largest.append(watch.largest)
    assert largest[0] == largest[1] > 0


@pytest.mark.parametrize("how", ["eager", "registered"])
def test_other_attention_keeps_its_masks(how, counted, monkeypatch):
    model, prompts = tiny_model("qwen3"), ragged_prompts([70, 5])
    expected = [solo(model, prompt(prompts, row), 6) for row in range(2)]
    calls = []
    if how == "eager":
        model.set_attn_implementation("eager")
    else:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def own(module, query, key, value, attention_mask, **options):
            calls.append(attention_mask is None)
            return sdpa(module, query, key, value, attention_mask, **options)

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    assert_same_answers(greedy(rollout_of(model), prompts, 6), expected)
    assert counted == [] and bool(calls) == (how == "registered")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_the_attention_is_put_back(error, monkeypatch):
    model, prompts = tiny_model("qwen3"), ragged_prompts([70])
    rollout = rollout_of(model)

    def fail(*args):
        raise error("cut")

    with monkeypatch.context() as patch:
        patch.setattr(continued_attention, "last_queries", fail)
        with pytest.raises(error, match="cut"):
            greedy(rollout, prompts, 4)
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {"sdpa"}
    assert NAME not in {model.config._attn_implementation}
    assert_same_answers(greedy(rollout, prompts, 4), [solo(model, prompt(prompts, 0), 4)])
