# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton kernel of copy_slots, and its launches."""

from collections import defaultdict

import torch
import triton
import triton.language as tl

MOST_BUFFERS = 64  # of a launch: their addresses are its parameters, of which 4 KiB are sure
TILE_BYTES = 16384  # of a program
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


# How many slots there are is no reason to compile again.
@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["sources", "targets"])
def _copy(buffers, sources, targets, slots, words, BUFFERS: tl.constexpr, TILE: tl.constexpr):
    """Grid (slots of each tile, buffers): a tile is read from memory once for all slots it goes to."""
    program, which = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(sources + program % slots), tl.load(targets + program % slots)
    buffer = buffers[0]
    for index in tl.static_range(1, BUFFERS):
        buffer = tl.where(which == index, buffers[index], buffer)
    word = program // slots * TILE + tl.arange(0, TILE)
    inside = word < words
    tl.store(buffer + target * words + word, tl.load(buffer + source * words + word, mask=inside), mask=inside)


def _word(buffer: torch.Tensor) -> torch.dtype:
    """The largest whose multiples a slot's size, its first address and its place in its storage are."""
    facts = buffer[0].nbytes, buffer.data_ptr(), buffer.storage_offset() * buffer.itemsize
    return next(dtype for dtype in WORDS if not any(fact % dtype.itemsize for fact in facts))


def launch(buffers: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Run the kernel on arguments that the op has checked."""
    alike: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for buffer in buffers:
        if len(sources) and buffer.numel():
            alike[buffer[0].nbytes, _word(buffer)].append(buffer)
    for (size, dtype), group in alike.items():
        words, tile = size // dtype.itemsize, TILE_BYTES // dtype.itemsize
        with torch.cuda.device_of(sources):  # Triton launches on the current device
            for first in range(0, len(group), MOST_BUFFERS):
                some = tuple(buffer.view(-1).view(dtype) for buffer in group[first : first + MOST_BUFFERS])
                grid = (len(sources) * triton.cdiv(words, tile), len(some))
                _copy[grid](some, sources, targets, len(sources), words, BUFFERS=len(some), TILE=tile, num_warps=4)
