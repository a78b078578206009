# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The product of 1 to 16 rows with a large weight, by the CUDA op few_rows_linear: which it takes, and the call.

It streams the weight through shared memory, ahead of the kernel before it, and multiplies on the tensor cores. So
the kernel right before it in the stream must not be one that both writes to the weight and lets its successor start.
"""

import functools

import torch

from deepspeed_hybrid.ops.loader import load, op_obstacle

# Measured on an H200: from 17 rows on the library is faster, for x is read again with every tile of the weight.
ROWS = range(1, 17)
INNER_STEP = 64
FEWEST_COLUMNS = 48
SHARED_BYTES = 160 * 1024  # of a block


def takes(x: torch.Tensor, weight: torch.Tensor, glu: bool) -> bool:
    """Whether the op computes x [M, K] times weight [N, K]^T, with or without ``glu``, on this card."""
    return x.shape[0] in ROWS and suits(x, weight, glu)


def suits(x: torch.Tensor, weight: torch.Tensor, glu: bool) -> bool:
    """Whether it would if the rows were few."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % INNER_STEP == 0
        and weight.shape[0] >= FEWEST_COLUMNS * (2 if glu else 1)
        and not x.data_ptr() % 16
        and not weight.data_ptr() % 16
        and _capable(x.device.index)
    )


@functools.cache
def _capable(index: int) -> bool:
    return obstacle(index) is None


def obstacle(index: int) -> str | None:
    """Why the op is not for this machine and card, or None. It wants clusters, dependent launches and a large shared
    memory: Hopper, and Blackwell for servers."""
    card = torch.cuda.get_device_properties(index)
    if card.major < 9 or card.shared_memory_per_block_optin < SHARED_BYTES:
        return f"{card.name} has no clusters, or too little shared memory"
    return op_obstacle("few_rows_linear")


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
        The product [M, N], with ``glu`` [M, N / 2], and where ``residual`` and ``next_norm`` are given the sum's
        product with the norm's weight [M, N] and partial sums of its squares [tiles, M] fp32; both empty otherwise.
    """
    op = load("few_rows_linear").few_rows_linear
    return op(x, weight, squares, eps, bias, residual, next_norm, next_offset, glu)
