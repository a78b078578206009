# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The product of 17 to 64 rows with a large weight, by the CUDA op warpgroup_linear: which it takes, and the call.

Like few_rows_linear it asks for the weight, and the bias, before the kernel ahead of it has ended, which must not
write there and let its successor start.
"""

import functools

import torch

from deepspeed_hybrid.ops.loader import load, op_obstacle

ROWS = range(17, 65)
INNER_STEP, SMALLEST_INNER = 64, 256
COLUMN_STEP, FEWEST_COLUMNS = 8, 64


def takes(x: torch.Tensor, weight: torch.Tensor, glu: bool) -> bool:
    """Whether the op computes x [M, K] times weight [N, K]^T, with or without ``glu``, on this card."""
    columns = weight.shape[0] // (2 if glu else 1)
    return (
        x.shape[0] in ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % INNER_STEP == 0
        and x.shape[1] >= SMALLEST_INNER
        and columns % COLUMN_STEP == 0
        and columns >= FEWEST_COLUMNS
        and not x.data_ptr() % 16
        and not weight.data_ptr() % 16
        and _capable(x.device.index)
    )


@functools.cache
def _capable(index: int) -> bool:
    return obstacle(index) is None


def obstacle(index: int) -> str | None:
    """Why the op is not for this machine and card, or None: it is Hopper's products of warpgroups."""
    card = torch.cuda.get_device_properties(index)
    if card.major != 9:
        return f"{card.name} is not of Hopper's generation"
    return op_obstacle("warpgroup_linear")


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    next_norm: torch.Tensor | None,
    next_offset: float,
    glu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run it on arguments that ``takes`` and the op above it have checked.

    Returns:
        As :func:`deepspeed_hybrid.ops.few_rows.launch`.
    """
    op = load("warpgroup_linear").warpgroup_linear
    return op(x, weight, squares, eps, bias, residual, next_norm, next_offset, glu)
