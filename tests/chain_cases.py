# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What tests of decode chains share: what is left alone, a hook whose effect shows, and Hugging Face's answers."""

import torch
from harness import assert_same_answers, greedy, prompt
from models import FAMILIES, ragged_prompts, solo
from torch import nn

from deepspeed_hybrid.compat import text_model

PROMPTS, NEW_TOKENS = [3, 9, 1], 16
CHAINED = [family for family in FAMILIES if family != "qwen3_next"]


def reasons(rollout) -> dict[int, str]:
    """Of what is not a chain."""
    return {index: reason for index, reason in rollout._injection.unchained.items() if reason}


def assert_like_hugging_face(rollout, model: nn.Module) -> torch.Tensor:
    """Greedy answers; their logprobs."""
    prompts = ragged_prompts(PROMPTS)
    batch = greedy(rollout, prompts, NEW_TOKENS)
    assert_same_answers(batch, [solo(model, prompt(prompts, row), NEW_TOKENS) for row in range(len(PROMPTS))])
    return batch.logprobs


def layer_of(model: nn.Module, index: int) -> nn.Module:
    return text_model(model).layers[index]


def turned(_, args, output):
    """A hook whose effect shows; a factor would not before a norm."""
    return (output[0].roll(1, -1), *output[1:]) if isinstance(output, tuple) else output.roll(1, -1)
