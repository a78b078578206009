# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_decode by the CUDA op attention_streamed: which layers it takes, how a row is shared, and the call.

The copy engine brings tiles of keys and values to each warp, and the tensor cores multiply them. It asks for the first
tiles before the kernel ahead of it has ended. Kernels that let their successors start may stand in a row, so that since
the last plain launch none of them may have written anything but a row's latest 64 positions: a step, which has each
layer once, begins with one, and writes one.
"""

import functools

import torch

from deepspeed_hybrid.ops.loader import load, op_obstacle

DIMS, DTYPES = (128, 256), (torch.bfloat16, torch.float16)
MOST_GROUP, MOST_SPLITS = 8, 64
TILE = 16  # tokens that a warp takes at once
WARPS = 4  # of a block
SHARED_BYTES = 113 * 1024  # of a block


def takes(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    parked: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_offset: float,
    eps: float,
    query_heads: int,
    *rest,
) -> bool:
    """Whether the op computes such a layer on this card; arguments as of attention_decode, which has checked them."""
    dtype = projected.dtype
    tables = [table for table in (cos, sin, q_norm, k_norm) if table is not None]
    return (
        projected.is_cuda
        and dtype in DTYPES
        and keys.shape[3] in DIMS
        and query_heads // keys.shape[1] <= MOST_GROUP
        and all(table.dtype in (dtype, torch.float32) for table in tables)
        and not any(cache.data_ptr() % 16 for cache in (keys, values))
        and _capable(projected.device.index)
    )


@functools.cache
def _capable(index: int) -> bool:
    return obstacle(index) is None


def obstacle(index: int) -> str | None:
    """Why the op is not for this machine and card, or None: it wants a copy engine and a large shared memory, as
    Hopper has, and Blackwell for servers."""
    card = torch.cuda.get_device_properties(index)
    if card.major < 9 or card.shared_memory_per_block_optin < SHARED_BYTES:
        return f"{card.name} has no copy engine, or too little shared memory"
    return op_obstacle("attention_streamed")


def launch(*arguments, splits: int) -> torch.Tensor:
    """Run it on the arguments of attention_decode, which it and ``takes`` have checked; ``splits`` is 1 to 64."""
    return load("attention_streamed").attention_streamed(*arguments, splits)
