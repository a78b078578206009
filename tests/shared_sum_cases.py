# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Sums over ranks as their layers' own code has them, and what ranks write into one another's inboxes."""

import torch
from fused_linear_cases import normal


def terms_of(ranks: int, rows: int, n: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """A term [rows, n] of each rank, and behind them a residual."""
    return [normal(rows, n, dtype=dtype, seed=100 * seed + one) for one in range(ranks + 1)]


def expected(terms: list[torch.Tensor], bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """The hidden state, rounded behind the sum, the bias and the residual."""
    dtype, total = residual.dtype, torch.zeros_like(residual, dtype=torch.float32)
    for term in terms:
        total = total + term.float()
    total = total.to(dtype)
    return residual + (total if bias is None else total + bias)


def packets(term: torch.Tensor, number: int) -> torch.Tensor:
    """[rows, words] int64: 4 bytes of a row in the lower half, the number of the launch in the upper."""
    words = term.contiguous().view(torch.int32).long()
    return (words & 0xFFFFFFFF) | (number << 32)
