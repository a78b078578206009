# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Attention of a later chunk of a long prompt: its memory goes by the chunk, not by what came before.

transformers would take a dense mask for it, and so write every key and value out once for each query head.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_hybrid.compat import own_attention
from deepspeed_hybrid.segments.apply import surely

NAME, REPLACED = "deepspeed_hybrid_continued", "sdpa"
ASK_AT_THE_END = NAME, REPLACED  # a single query without a mask sees all keys, and a mask is [B, 1, Q, K]


def continued_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options,
) -> tuple[torch.Tensor, None]:
    """The queries are the last of the keys' positions, and none is padding; a mask is not looked at.

    Args:
        query: [B, H, Q, D].
        key, value: [B, H or a divisor of it, K, D].

    Returns:
        [B, Q, H, D], as transformers' attention functions do.
    """
    return last_queries(query, key, value, scaling).transpose(1, 2).contiguous(), None


def last_queries(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Causal attention of the last Q of K positions, [B, H, Q, D]; by a dense mask where no kernel goes without."""
    queries, keys = query.shape[2], key.shape[2]
    if query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)):
        bias = causal_lower_right(queries, keys)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
    place = torch.arange(keys, device=query.device)
    mask = place[None, :] <= place[keys - queries :, None]
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


ALL_ATTENTION_FUNCTIONS[NAME] = continued_attention


@contextmanager
def continuing(configs: list) -> Iterator[None]:
    """Inside, attention that goes through sdpa goes through :func:`continued_attention`.

    Args:
        configs: in which a model's modules read their attention implementation.
    """
    replaced = [config for config in configs if config._attn_implementation == REPLACED]

    def put_back() -> None:
        for config in replaced:
            config._attn_implementation = REPLACED

    try:
        for config in replaced:
            config._attn_implementation = NAME
        yield
    finally:
        surely(put_back)


def can_continue(configs: list) -> bool:
    """Whether all of a model's attention goes through transformers' own sdpa, so that none of it misses a mask."""
    return own_attention(REPLACED) and all(config._attn_implementation == REPLACED for config in configs)
