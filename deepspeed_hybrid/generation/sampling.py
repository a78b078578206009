# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What happens to logits before a token is chosen, with every number per row and on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingKind:
    """What a captured step has to compute; the numbers themselves are buffers and may change between replays."""

    sampled: bool = False  # False: argmax
    truncated: bool = False  # top-k, top-p or min-p
    penalised: bool = False  # repetition penalty
    raw_logprobs: bool = False  # logprobs of the model's own distribution
    invariant: bool = False  # every row gets the bits that it has alone


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of seen tokens (Keskar et al. 2019).

    Args:
        logits: [B, V].
        seen: [B, V] bool, tokens of the prompt and of the answer so far; padding is none of them.
        penalty: [B] fp32.

    Returns:
        [B, V] fp32.
    """
    scores = logits.float()
    factor = penalty[:, None]
    return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)


def truncate_each(scores: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
    """Like :func:`truncate`, every row by itself. Cumulative sums go by the number of rows, and are no function of
    their input for one: so every row comes in two copies."""
    rows = zip(scores.split(1), *(setting.split(1) for setting in settings), strict=True)
    return torch.cat([truncate(*(part.expand(2, *part.shape[1:]) for part in row))[:1] for row in rows])


def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, then min-p drop: the sets that transformers' warpers keep.

    Args:
        scores: [B, V] fp32, temperature applied.
        top_k: [B] int64, 0 for all. Ties with the k-th are kept.
        top_p_tail: [B] fp32, 1 - top_p rounded once, 0 for all. The likeliest token is always kept.
        min_p: [B] fp32, 0 for all.

    Returns:
        [B, V] fp32.
    """
    vocab_size = scores.shape[1]
    lowest = float("-inf")
    ascending, order = scores.sort(dim=-1)

    keep = top_k.masked_fill(top_k <= 0, vocab_size).clamp(max=vocab_size)
    threshold = ascending.gather(1, (vocab_size - keep)[:, None])
    ascending = ascending.masked_fill(ascending < threshold, lowest)

    below = ascending.softmax(dim=-1).cumsum(dim=-1) <= top_p_tail[:, None]
    below[:, -1] = False
    below &= (top_p_tail > 0)[:, None]
    ascending = ascending.masked_fill(below, lowest)

    probabilities = ascending.softmax(dim=-1)
    rare = probabilities < min_p[:, None] * probabilities[:, -1:]
    ascending = ascending.masked_fill(rare, lowest)
    return torch.empty_like(scores).scatter_(1, order, ascending)
