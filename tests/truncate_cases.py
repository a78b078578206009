# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rows and settings for truncate_scores, and what must be kept of them, in float64."""

import torch

LOWEST = float("-inf")
MARGIN = 1e-5  # how near a threshold two correct implementations may differ

VOCABULARIES = [1, 2, 31, 1000, 4097, 151936, 248320]
KINDS = ["random", "peaked", "flat", "rounded", "all equal", "mostly masked", "one finite", "zeros", "huge", "far"]


def score_rows(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """[rows, vocab] fp32."""
    generator = torch.Generator().manual_seed(seed + vocab)
    scores = torch.randn(rows, vocab, generator=generator)
    if kind == "rounded":  # many ties
        return (2 * scores).bfloat16().float()
    if kind == "all equal":
        return torch.full_like(scores, 1.5)
    if kind == "mostly masked":
        masked = torch.rand(rows, vocab, generator=generator) < 0.99
        masked[:, -1] = False
        return scores.masked_fill(masked, LOWEST)
    if kind == "one finite":
        return torch.full_like(scores, LOWEST).index_fill_(1, torch.tensor([vocab // 2]), -3.0)
    if kind == "zeros":  # of both signs, which are equal
        return torch.where(scores > 0, 0.0, -0.0) - (scores.abs() > 1.5).float()
    return {
        "random": 3 * scores,
        "peaked": 30 * scores,
        "flat": 1e-3 * scores,
        "huge": 1e30 * scores,
        "far": 3 * scores - 500,
    }[kind]


def settings_of(choices: list[tuple[int, float, float]], rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """top_k, top_p_tail and min_p of as many rows, which take the choices in turn."""
    top_k, tail, min_p = zip(*(choices[row % len(choices)] for row in range(rows)), strict=True)
    return torch.tensor(top_k), torch.tensor(tail), torch.tensor(min_p)


def every_choice(vocab: int) -> list[tuple[int, float, float]]:
    """top_k, top_p_tail and min_p, each alone and together."""
    return [
        (0, 0.0, 0.0),
        *((top_k, 0.0, 0.0) for top_k in (1, 2, 20, 256, 257, 1000, vocab, 10**9)),
        *((0, tail, 0.0) for tail in (1e-6, 0.05, 0.5, 0.95, 1.0)),
        *((0, 0.0, min_p) for min_p in (1e-6, 0.05, 1.0)),
        *((top_k, 0.05, 0.0) for top_k in (1, 20, 1000, vocab)),
        (0, 0.1, 0.02),
        (20, 0.05, 0.1),
        (1000, 0.3, 0.0005),
        (300, 0.0, 0.01),
    ]


def exactly_kept(scores: torch.Tensor, top_k: int, tail: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row [V] with a finite entry: which entries are kept, and which are too near a threshold to tell."""
    exact = scores.double()
    ascending, order = exact.sort(stable=True)
    if 0 < top_k < len(exact):
        ascending = ascending.masked_fill(ascending < ascending[-top_k], LOWEST)
    relative = (ascending - ascending[-1]).exp()
    kept = ascending > LOWEST
    doubtful = torch.zeros_like(kept)
    if tail > 0:
        mass = relative.cumsum(0) / relative.sum()
        kept &= mass > tail
        kept[-1] = True
        doubtful |= (mass - tail).abs() < MARGIN
        doubtful[-1] = False
    if min_p > 0:
        kept &= relative >= min_p
        doubtful |= (relative / min_p - 1).abs() < MARGIN
    at = torch.empty_like(order)
    at[order] = torch.arange(len(order), device=order.device)
    return kept[at], doubtful[at]


def check_row(actual: torch.Tensor, scores: torch.Tensor, top_k: int, tail: float, min_p: float) -> None:
    """``actual`` must be the row with -inf wherever something is surely dropped, and nowhere that is surely kept."""
    kept, doubtful = exactly_kept(scores, top_k, tail, min_p)
    wrong = (actual > LOWEST) != kept
    assert not bool((wrong & ~doubtful).any()), f"{int(wrong.sum())} entries wrong, of {int(kept.sum())} to keep"
    assert bool((actual[actual > LOWEST] == scores[actual > LOWEST]).all())
    assert not bool(actual.isnan().any())


def check_rows(actual: torch.Tensor, scores: torch.Tensor, *settings: torch.Tensor) -> None:
    """On the device of ``actual``."""
    assert actual.shape == scores.shape and actual.dtype == torch.float32 and actual.is_contiguous()
    chosen = zip(*(setting.tolist() for setting in settings), strict=True)
    for one, row, (top_k, tail, min_p) in zip(actual, scores.to(actual.device), chosen, strict=True):
        check_row(one, row, top_k, tail, min_p)
