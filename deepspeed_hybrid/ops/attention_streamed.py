# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""attention_decode by the CUDA op attention_streamed: which layers it takes, how a row is shared, and the call.

The copy engine brings tiles of keys and values to each warp, and the tensor cores multiply them. It asks for the first
tiles before the kernel ahead of it has ended. Kernels that let their successors start may stand in a row, so that none
of them since the last plain launch may have written anything but a row's latest LATEST positions: a step begins with
one, and has each layer once, or once for each token of a block that is no longer.
"""

import functools

import torch

from deepspeed_hybrid.ops.loader import load, op_obstacle

DIMS, DTYPES = (128, 256), (torch.bfloat16, torch.float16)
MOST_GROUP, MOST_SPLITS, MOST_ROWS = 8, 64, 65535
SHARED_BYTES = 160 * 1024  # of a block of many warps
TILE = 16  # tokens that a warp takes at once
LATEST = 64  # positions of a row that are not read ahead
FEW_WARPS, MANY_WARPS = 4, 8  # of a block
PROCESSORS = 132  # of the largest Hopper cards, with room for a block of many warps, or two of few
FILLED = 0.9  # of them, where no other number of blocks would do better
FEW_HEADS = 32  # blocks that do not meet at the memory
SPARED = 560  # positions of a block, for which a second launch pays


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
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> bool:
    """Whether the op computes such a layer on this card; arguments as of attention_decode, which has checked them."""
    dtype = projected.dtype
    tables = [table for table in (cos, sin, q_norm, k_norm) if table is not None]
    return (
        projected.is_cuda
        and projected.shape[0] <= MOST_ROWS
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


def choose_splits(rows: int, kv_heads: int, capacity: int) -> tuple[int, int]:
    """How many splits, and the warps of a block: such that blocks fill the card, each has something to do, and what
    splits spare one another is worth the launch that merges them."""
    heads = rows * kv_heads

    def share(blocks: int, warps: int) -> int:
        turns = -(-capacity // (TILE * warps))
        splits = max(1, min(blocks // heads, turns, MOST_SPLITS))
        return splits if capacity - capacity // splits >= SPARED else 1

    splits = share(PROCESSORS, MANY_WARPS)
    if splits * heads <= FEW_HEADS or splits > 1 or FILLED * PROCESSORS <= heads <= PROCESSORS:
        return splits, MANY_WARPS
    return share(2 * PROCESSORS, FEW_WARPS), FEW_WARPS


def launch(
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
    gated: bool,
    scaling: float,
    splits: int = 0,
) -> torch.Tensor:
    """Run it on the arguments of attention_decode, which it and ``takes`` have checked; 0 chooses the splits."""
    _, kv_heads, capacity, _ = keys.shape
    warps = FEW_WARPS  # whatever the batch, as a number of splits is given for
    if not splits:
        splits, warps = choose_splits(max(1, projected.shape[0]), kv_heads, capacity)
    tensors = projected, cos, sin, keys, values, position, parked, q_norm, k_norm
    settings = norm_offset, eps, query_heads, gated, scaling, splits, warps
    return load("attention_streamed").attention_streamed(*tensors, *settings)
