# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Top-k, top-p and min-p: what they drop of a row of scores becomes -inf."""

import torch

from deepspeed_hybrid.ops.inference import refuse_gradients
from deepspeed_hybrid.ops.loader import load


def check_arguments(scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor) -> None:
    """
    Raises:
        ValueError: a shape or dtype is not that of :func:`truncate_scores`.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or scores.shape[1] == 0:
        raise ValueError(f"scores must be [B, V] float32 with V > 0, got {tuple(scores.shape)} {scores.dtype}")
    wanted = {"top_k": torch.int64, "top_p_tail": torch.float32, "min_p": torch.float32}
    for (name, dtype), setting in zip(wanted.items(), (top_k, top_p_tail, min_p), strict=True):
        if setting.shape != scores.shape[:1] or setting.dtype != dtype:
            raise ValueError(
                f"{name} must have one {dtype} a row of scores ({scores.shape[0]}), "
                f"got {tuple(setting.shape)} {setting.dtype}"
            )


def truncate_scores_reference(
    scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """What :func:`truncate_scores` does, in plain torch on any device: the sets that transformers' warpers keep."""
    check_arguments(scores, top_k, top_p_tail, min_p)
    vocab_size = scores.shape[1]
    lowest = float("-inf")
    ascending, order = scores.sort(dim=-1, stable=True)

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
    return torch.empty_like(scores, memory_format=torch.contiguous_format).scatter_(1, order, ascending)


@torch.library.custom_op("deepspeed_hybrid::truncate_scores", mutates_args=(), device_types="cuda")
def truncate_scores(
    scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what top-k, then top-p of what is left, then min-p drop.

    On CUDA this is one launch, with a row's bits the same in any batch; the first call builds it. It sums
    probabilities in fixed point, and the reference in fp32: entries whose cumulative probability is within some 1e-6
    of a threshold may differ. On CUDA rows with a NaN or +inf come back as they are. On a CPU it is
    :func:`truncate_scores_reference`. There is no gradient.

    Args:
        scores: [B, V] fp32, temperature applied, contiguous. Entries at -inf stay there.
        top_k: [B] int64, 0 for all. Ties with the k-th are kept.
        top_p_tail: [B] fp32, 1 - top_p rounded once, 0 for all. Of equal scores those with the lowest indices are
            dropped first; the likeliest token, the last one of equals, is always kept.
        min_p: [B] fp32, 0 for all; relative to the likeliest.

    Returns:
        [B, V] fp32.
    """
    check_arguments(scores, top_k, top_p_tail, min_p)
    return load("truncate_scores").truncate_scores(scores, top_k, top_p_tail, min_p)


@truncate_scores.register_fake
def _(scores: torch.Tensor, top_k: torch.Tensor, top_p_tail: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    check_arguments(scores, top_k, top_p_tail, min_p)
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


truncate_scores.register_kernel("cpu")(truncate_scores_reference)
refuse_gradients(truncate_scores, "truncate_scores")
