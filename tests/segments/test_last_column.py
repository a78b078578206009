# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A prompt's last layer: of its tokens the head reads a row's last one alone."""

from dataclasses import replace

import pytest
from harness import assert_same_answers, greedy, prompt, rollout_of
from models import ragged_prompts, solo, tiny_model
from prompt_ops import with_ops

from deepspeed_hybrid.compat import text_model

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
