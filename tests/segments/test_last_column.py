# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A prompt's last layer: of its tokens the head reads a row's last one alone."""

from dataclasses import replace

import pytest
from harness import assert_same_answers, greedy, prompt, rollout_of
from models import ragged_prompts, solo, tiny_model
from prompt_ops import with_ops

from deepspeed_hybrid.compat import text_model
from deepspeed_hybrid.generation.prefill import prefill

pytestmark = pytest.mark.core


@pytest.mark.parametrize("watched", [None, -1, 0])
def test_behind_the_last_mixer_rows_go_on_with_their_last_tokens_alone(watched):
    """But where somebody, as a draft does, looks at what comes out of the last layer while a prompt runs."""
    model = tiny_model()
    prompts, steps = ragged_prompts([5, 19, 12]), 4
    oracle = [solo(model, prompt(prompts, row), steps) for row in range(3)]
    rollout, rows, seen = rollout_of(model), [], []
    with_ops(rollout)
    injection, call = rollout._injection, rollout._paths.call
    original, forward = injection.prompt.residual_linear, call.logits

    def residual_linear(inputs, *args):
        rows.append(len(inputs))
        return original(inputs, *args)

    def logits(ids, *args):
        if watched is None or ids.shape[1] == 1:
            return forward(ids, *args)
        layer = text_model(model).layers[watched]
        hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
        try:
            return forward(ids, *args)
        finally:
            hook.remove()

    injection.prompt = replace(injection.prompt, residual_linear=residual_linear)
    injection.follow()
    call.logits = logits
    assert_same_answers(greedy(rollout, prompts, steps), oracle)
    layers = len(text_model(model).layers)
    assert rows == [3 * 19] * (2 * layers) if watched == -1 else rows == [3 * 19] * (2 * layers - 2) + [3, 3]
    assert seen == ([] if watched is None else [(3, 19)])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5"])
@pytest.mark.parametrize(
    "lengths, budget, widths",
    [([5, 19, 12], 8192, [19]), ([18, 18], 8192, [18]), ([1, 40], 8192, [40]), ([45], 20, [20, 20])],
    ids=["padded", "not padded", "far apart", "in chunks"],
)
def test_in_the_last_layer_only_the_last_tokens_ask(family, lengths, budget, widths, monkeypatch):
    """Keys and values there are of all of them; the last 5 tokens of 45 are too few for a chain."""
    monkeypatch.setattr(prefill, "__defaults__", (budget, None, False))
    model, prompts, steps = tiny_model(family), ragged_prompts(lengths), 4
    oracle = [solo(model, prompt(prompts, row), steps) for row in range(len(lengths))]
    rollout, seen = rollout_of(model), []
    with_ops(rollout)
    injection = rollout._injection
    original = injection.prompt.prompt_heads

    def prompt_heads(projected, cos, sin, *args):
        heads, kv_heads = args[4:6]
        seen.append((projected.shape[1], heads > 0, kv_heads > 0))
        return original(projected, cos, sin, *args)

    injection.prompt = replace(injection.prompt, prompt_heads=prompt_heads)
    injection.follow()
    assert_same_answers(greedy(rollout, prompts, steps), oracle)
    attentions = sum(hasattr(layer, "self_attn") for layer in text_model(model).layers)
    expected = []
    for width in widths:
        expected += [(width, True, True)] * (attentions - 1) + [(1, True, False), (width, False, True)]
    assert seen[: len(expected)] == expected
    assert all(call[1:] == (True, True) for call in seen[len(expected) :])
