# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Products whose rows have the same bits in any batch, at the price of reading the weight once for every few rows.

A library picks its kernel, and with it the order of its sums, by the number of rows; few_rows_linear sums a row in one
order whatever is beside it, and a single row has nothing beside it.
"""

from collections.abc import Callable

import torch

from deepspeed_hybrid.ops import few_rows

SPLITS = 16  # of a row's positions in attention_decode, whatever the batch


def attention_of_one_row(
    op: Callable,
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    *rest,
) -> torch.Tensor:
    """``op`` (attention_decode's reference on a CPU) over what a row has written, not over all that it may yet write:
    there the capacity, which goes by other rows, decides in which order is summed."""
    length = int(position.max()) + 1 if len(position) else 0
    return op(projected, cos, sin, keys[:, :, :length], values[:, :, :length], position, *rest)


def rows_at_once(x: torch.Tensor, weight: torch.Tensor, glu: bool) -> int:
    return few_rows.ROWS[-1] if x.is_cuda and few_rows.suits(x, weight, glu) else 1


def normed_linear_in_groups(
    op: Callable,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    glu: bool,
) -> torch.Tensor:
    """``op`` (normed_linear or its reference), a few rows at a time."""
    step = rows_at_once(scaled, weight, glu)
    if scaled.shape[0] <= step:
        return op(scaled, squares, eps, weight, bias, glu)
    groups = zip(scaled.split(step), squares.split(step, dim=1), strict=True)
    return torch.cat([op(rows, parts.contiguous(), eps, weight, bias, glu) for rows, parts in groups])


def residual_linear_in_groups(
    op: Callable,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *norm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``op`` (residual_linear or its reference), a few rows at a time."""
    step = 1 if x.dtype == torch.float16 else rows_at_once(x, weight, False)  # which the op gives to the library
    if x.shape[0] <= step:
        return op(x, weight, bias, residual, *norm)
    groups = zip(x.split(step), residual.split(step), strict=True)
    hidden, scaled, squares = zip(*(op(rows, weight, bias, before, *norm) for rows, before in groups), strict=True)
    return torch.cat(hidden), torch.cat(scaled), torch.cat(squares, dim=1)


def embedded_rows_one_by_one(
    op: Callable, ids: torch.Tensor, *rest
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``op`` (the reference of embedded_rows), whose sums and roots on a CPU go by a number's place in a vector."""
    hidden, scaled, squares = zip(*(op(one, *rest) for one in ids.split(1)), strict=True)
    return torch.cat(hidden), torch.cat(scaled), torch.cat(squares, dim=1)


def rotary_tables_one_by_one(op: Callable, positions: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    """``op`` (the reference of rotary_tables), likewise."""
    cos, sin = zip(*(op(one, *rest) for one in positions.split(1)), strict=True)
    return torch.cat(cos), torch.cat(sin)
