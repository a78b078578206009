# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of gdn_windows, and its launch."""

import torch
import triton
import triton.language as tl

from deepspeed_hybrid.ops.gdn_windows import checked_windows
from deepspeed_hybrid.ops.triton.dependent import announce, pdl, wait
from deepspeed_hybrid.ops.triton.gdn_block import MOST_LAYERS, _of_layer

CHANNELS = 512  # of a program


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["position", "counts"])
def gdn_windows_kernel(
    all_projected,
    all_windows,
    position,
    counts,
    stride,
    channels,
    LAYERS: tl.constexpr,
    KERNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for some channels of a row of a layer: all columns of their ring, each of its own token or as it
    was."""
    announce(PDL)
    row, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    layer = tl.program_id(2)
    projected, window = _of_layer(all_projected, layer, LAYERS), _of_layer(all_windows, layer, LAYERS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    wait(PDL)
    count, start = tl.load(counts + row).to(tl.int32), (tl.load(position + row) % KERNEL).to(tl.int32)
    # The last token of those taken over that is in this column; before the first there is none.
    index = count - 1 - (start + count - 1 - column + 2 * KERNEL) % KERNEL
    there = (channel < channels)[:, None] & ((index >= 0) & (column < KERNEL) & (count > 0))[None, :]
    from_place = projected + (index[None, :] * lanes + row) * stride + channel[:, None]
    place = window + (row * channels + channel[:, None]) * KERNEL + column[None, :]
    tl.store(place, tl.load(from_place, mask=there, other=0.0), mask=there)


def launch(
    projected: list[torch.Tensor], window: list[torch.Tensor], position: torch.Tensor, counts: torch.Tensor
) -> None:
    """``gdn_windows`` through the kernel, all layers in one launch, on CUDA or in Triton's interpreter."""
    checked_windows(projected, window, position, counts)
    if not projected or not projected[0].numel():
        return
    channels, kernel = window[0].shape[1:]
    grid = triton.cdiv(channels, CHANNELS), counts.numel()
    for first in range(0, len(window), MOST_LAYERS):
        some = slice(first, first + MOST_LAYERS)
        rows, rings = tuple(projected[some]), tuple(window[some])
        with torch.cuda.device_of(counts):  # Triton launches on the current device
            gdn_windows_kernel[(*grid, len(rings))](
                rows,
                rings,
                position,
                counts,
                rows[0].stride(0),
                channels,
                LAYERS=len(rings),
                KERNEL=kernel,
                COLUMNS=triton.next_power_of_2(kernel),
                CHANNELS=CHANNELS,
                **pdl(counts),
            )
