# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""gdn_deferred in one launch, by the CUDA op gdn_streamed: which layers it takes, and the call.

Conv, gates, delta rule and norm of a row and head are one turn of four warps, while the copy engine reads the states
ahead. It asks for the first states, windows and taps before the kernel ahead of it has ended. Kernels that let their
successors start may stand in a row, so that nothing since the last plain launch may have written to any of them: a
step, which has each layer once, begins with one.
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
        suits(sizes, dtype, state.dtype, conv_bias is not None, projected.device)
        and conv_weight.dtype == keys.dtype == dtype
        and all(weight.dtype in (dtype, torch.float32) for weight in (A_log, dt_bias, norm_weight))
        and not projected.stride(0) % 8
        and not any(part.data_ptr() % 16 for part in (projected, window, conv_weight, state, keys, deltas, decays))
    )


def suits(sizes: GdnSizes, dtype: torch.dtype, state_dtype: torch.dtype, biased: bool, device: torch.device) -> bool:
    """Whether it would, for all that is known of a layer before its tensors are there."""
    return (
        device.type == "cuda"
        and (sizes.key_dim, sizes.value_dim, sizes.conv_kernel) == (DIM, DIM, TAPS)
        and dtype in DTYPES
        and state_dtype == torch.float32
        and not biased
        and _capable(device.index)
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
    return op_obstacle("gdn_streamed")


def launch(*arguments) -> torch.Tensor:
    """Run it on the arguments of gdn_deferred but ``conv_bias`` and ``rounded_heads``, which it and ``takes`` have
    checked."""
    return load("gdn_streamed").gdn_streamed(*arguments)
