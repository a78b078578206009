# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What happens to logits before a token is chosen, with every number per row and on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed_hybrid.ops.truncate_scores import truncate_scores


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


def truncate_alone(truncate: Callable, scores: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
    """``truncate``, but every row gets the bits that it has alone.

    The op's rows always do. Cumulative sums of the reference go by the number of rows, and are no function of their
    input for one: so every row is truncated by itself, in two copies.

    Args:
        truncate: the ``truncate_scores`` op, or its torch reference.
        scores, settings: as of ``truncate_scores``.
    """
    if truncate is truncate_scores:
        return truncate(scores, *settings)
    rows = zip(scores.split(1), *(setting.split(1) for setting in settings), strict=True)
    return torch.cat([truncate(*(part.expand(2, *part.shape[1:]) for part in row))[:1] for row in rows])
