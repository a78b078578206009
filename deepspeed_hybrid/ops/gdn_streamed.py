# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_deferred in one launch, by the CUDA op gdn_streamed: which layers it takes, and the call.

Conv, gates, delta rule and norm of a row and head are one turn of four warps, while the copy engine reads the states
ahead. It asks for the first of them before the kernel ahead of it has ended, which must not write there and let its
successor start.
"""

import functools

import torch

from deepspeed_hybrid.ops.gdn_decode import GdnSizes
from deepspeed_hybrid.ops.loader import load, op_obstacle

DIM, TAPS, DTYPES = 128, 4, (torch.bfloat16, torch.float16)
SHARED_BYTES = 113 * 1024  # of a block


def takes(
    projected: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    decays: torch.Tensor,
    norm_weight: torch.Tensor,
    sizes: GdnSizes,
) -> bool:
    """Whether the op computes such a layer on this card; arguments as of gdn_deferred, of the sizes named."""
    dtype = projected.dtype
    return (
        suits(sizes.key_dim, sizes.value_dim, sizes.conv_kernel, dtype, projected.device)
        and conv_bias is None
        and conv_weight.dtype == keys.dtype == dtype
        and state.dtype == torch.float32
        and all(weight.dtype in (dtype, torch.float32) for weight in (A_log, dt_bias, norm_weight))
        and not projected.stride(0) % 8
        and not any(part.data_ptr() % 16 for part in (projected, window, conv_weight, state, keys, deltas, decays))
    )


def suits(key_dim: int, value_dim: int, taps: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it would, for all that is known before a tensor is there."""
    of_heads = key_dim == value_dim == DIM and taps == TAPS and dtype in DTYPES
    return of_heads and device.type == "cuda" and _capable(device.index)


@functools.cache
def _capable(index: int) -> bool:
    return obstacle(index) is None


def obstacle(index: int) -> str | None:
    """Why the op is not for this machine and card, or None: it wants a copy engine and a large shared memory, as
    Hopper has, and Blackwell for servers."""
    card = torch.cuda.get_device_properties(index)
    if card.major < 9 or card.shared_memory_per_block_optin < SHARED_BYTES:
        return f"{card.name} has no copy engine, or too little shared memory"
    return op_obstacle("gdn_streamed")


def launch(*arguments) -> torch.Tensor:
    """Run it on the arguments of gdn_deferred but ``conv_bias`` and ``rounded_heads``, which it and ``takes`` have
    checked."""
    return load("gdn_streamed").gdn_streamed(*arguments)
