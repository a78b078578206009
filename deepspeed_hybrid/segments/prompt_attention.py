# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A prompt's attention: between the fused projection and the attention function two launches, and one behind it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid.segments.apply import Binding
from deepspeed_hybrid.segments.continued_attention import ASK_AT_THE_END
from deepspeed_hybrid.segments.norm import Norm, rms_norm
from deepspeed_hybrid.segments.shared_chain import attention_sizes
from deepspeed_hybrid.segments.weights import FusedLinear


def prompt_attention_binding(
    module: nn.Module, fused: FusedLinear, prompt_heads: Callable, gated_heads: Callable, keep: Callable | None
) -> Binding:
    """Our forward for an attention module of a layer whose decode step is a chain, and which is so far known."""
    norms = (rms_norm(module.q_norm), rms_norm(module.k_norm)) if hasattr(module, "q_norm") else None
    return Binding(module, partial(prompt_attention, module, fused, prompt_heads, gated_heads, keep, norms))


def prompt_attention(
    module: nn.Module,
    fused: FusedLinear,
    prompt_heads: Callable,
    gated_heads: Callable,
    keep: Callable | None,
    norms: tuple[Norm, Norm] | None,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    output: Callable | None = None,
    last_column: bool = False,
    **kwargs,
) -> tuple:
    """[B, T, D] -> [B, T, D], and the weights of an attention function that returns them; or what ``output`` returns
    in place of the output projection.

    With ``last_column``, where the attention function is known to let queries be the last of the keys' positions, only
    the last tokens ask: of the others there are keys and values alone, and [B, 1, ...] goes to the output.

    The attention function is the model's own, on what it would have been given; eager attention, which is not in
    transformers' table of them, runs in the model's own forward.
    """
    attend = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
    if attend is None:
        return type(module).forward(module, hidden_states, position_embeddings, attention_mask, **kwargs)
    cache = kwargs.pop("cache" if "cache" in kwargs else "past_key_values")
    queries, keys, outputs = attention_sizes(module)
    head_dim, gated = module.head_dim, queries != outputs
    heads, kv_heads = outputs // head_dim, keys // head_dim
    normed = None, None, 0.0, 0.0
    if norms is not None:
        normed = norms[0].weight, norms[1].weight, norms[0].offset, norms[0].eps
    if last_column and module.config._attn_implementation in ASK_AT_THE_END:
        asking, tables = hidden_states[:, -1:], tuple(table[:, -1:] for table in position_embeddings)
        projected, told = fused.columns(asking, 0, queries), fused.columns(hidden_states, queries)
        query, _ = prompt_heads(projected, *tables, *normed, heads, 0, head_dim, gated)
        _, key = prompt_heads(told, *position_embeddings, *normed, 0, kv_heads, head_dim, gated)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, -1:]
    else:
        projected = told = fused(hidden_states)
        query, key = prompt_heads(projected, *position_embeddings, *normed, heads, kv_heads, head_dim, gated)
    value = told[..., -kv_heads * head_dim :].unflatten(-1, (kv_heads, head_dim))
    slots = cache.layers[module.layer_idx]
    key, value = slots.update(key.transpose(1, 2), value.transpose(1, 2), keep=keep)
    mixed, weights = attend(
        module, query.transpose(1, 2), key, value, attention_mask, dropout=0.0, scaling=module.scaling, **kwargs
    )
    if gated:
        gates = projected[..., : 2 * heads * head_dim].unflatten(-1, (heads, 2 * head_dim))[..., head_dim:]
        mixed = gated_heads(mixed, gates)
    mixed = mixed if gated else mixed.flatten(2)
    return (module.o_proj(mixed), weights) if output is None else output(mixed)
