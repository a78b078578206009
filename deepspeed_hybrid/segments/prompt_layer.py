# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A decoder layer over a prompt, in the order of its decode step: what follows each output product, the residual and
the next norm, is one launch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid.ops.few_rows import ROWS
from deepspeed_hybrid.segments.norm import Norm
from deepspeed_hybrid.segments.prompts import PromptOps
from deepspeed_hybrid.segments.shared_chain import HalfEnd
from deepspeed_hybrid.segments.weights import FusedLinear


def prompt_layer(
    ops,
    mixer: nn.Module,
    take: Callable,
    put: Callable,
    input_norm: Norm,
    output: HalfEnd,
    mlp_norm: Norm,
    gate_up: FusedLinear,
    down: HalfEnd,
    next_norm: Norm,
    hidden_states: torch.Tensor,
    last_column: bool,
    **kwargs,
) -> torch.Tensor:
    """[B, T, D] -> [B, T, D], for more rows than few_rows_linear takes; norms are made whole by their writers.

    Args:
        ops: a :class:`~deepspeed_hybrid.segments.prompts.PromptOps` with all that is used here.
        mixer: bound to our forward, which takes ``output`` in place of its output projection, and gives it tokens
            [B, T, ...]; with ``last_column`` the last one will do.
        take, put: hand prepared norms on from layer to layer.
        last_column: behind the mixer, only rows' last tokens go on: [B, 1, D] comes out.
    """
    rows, tokens, size = hidden_states.shape
    hidden = hidden_states.reshape(-1, size)
    normed, _ = take(hidden, input_norm, ops)

    def end(core: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_tokens = core, hidden.view(rows, tokens, size)
        if last_column:
            of_tokens = tuple(part[:, -1:].contiguous() for part in of_tokens)
        inputs, residual = (part.flatten(0, 1) for part in of_tokens)
        return output(ops, inputs, residual, mlp_norm)

    hidden_here, normed, squares = mixer(
        normed.view(rows, tokens, size), output=end, last_column=last_column, **kwargs
    )
    gated = ops.normed_linear(normed, squares, mlp_norm.eps, gate_up.weight, None, True)
    hidden_here, normed, squares = down(ops, gated, hidden_here, next_norm)
    put(hidden_here, next_norm, normed, squares)
    return hidden_here.view(rows, -1, size)


def runs_as_chain(mixer: nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether :func:`prompt_layer` takes this forward; eager attention runs in the model's own."""
    named = getattr(getattr(mixer, "config", None), "_attn_implementation", None)
    if hasattr(mixer, "q_proj") and named not in ALL_ATTENTION_FUNCTIONS:
        return False
    return hidden_states.shape[0] * hidden_states.shape[1] > ROWS[-1]


def prompt_chain(ops: PromptOps, *rest) -> Callable | None:
    """:func:`prompt_layer` over all but its last arguments, or None where an op is missing."""
    used = ops.residual_linear, ops.normed_linear, ops.normed_rows, ops.shared_sum
    return None if None in used else partial(prompt_layer, ops, *rest)
