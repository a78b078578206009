# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Buffers of slots for copy_slots, and what they become."""

import torch

# Slots of sizes that 8, 4, 2 and 1 bytes divide, two of them alike, and one without anything in it.
SHAPES = [
    ((4, 8, 8), torch.float32),
    ((3, 5), torch.float32),
    ((4, 8, 8), torch.float32),
    ((7,), torch.bfloat16),
    ((2, 3, 5), torch.bool),
    ((), torch.int64),
    ((2, 0), torch.float16),
    ((2100, 16), torch.bfloat16),
]


def buffers_of(slots: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(slots)
    made = [torch.randint(-100, 100, (slots, *shape), generator=generator).to(dtype) for shape, dtype in SHAPES]
    made[0][-1] = float("nan")
    return [buffer.to(device) for buffer in made]


def copied(buffers: list[torch.Tensor], sources: list[int], targets: list[int]) -> list[torch.Tensor]:
    """Slot by slot."""
    after = [buffer.clone() for buffer in buffers]
    for buffer, one in zip(buffers, after, strict=True):
        for source, target in zip(sources, targets, strict=True):
            one[target] = buffer[source]
    return after
