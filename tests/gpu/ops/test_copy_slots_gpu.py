# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The Triton copy_slots on a GPU."""

import pytest
import torch
from copy_slots_cases import buffers_of, copied
from decode_cases import same_bits

from deepspeed_hybrid.ops.copy_slots import copy_slots

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("sources, targets", [([0], [3]), ([4, 4, 0], [1, 2, 5]), ([], [])], ids=str)
def test_slots(sources, targets):
    buffers = buffers_of(6)
    expected, moved = copied(buffers, sources, targets), [buffer.cuda() for buffer in buffers]
    copy_slots(moved, *(torch.tensor(slots, dtype=torch.int64, device="cuda") for slots in (sources, targets)))
    assert all(same_bits(one.cpu(), other) for one, other in zip(moved, expected, strict=True))


def test_slots_as_large_as_a_model_has():
    """More than 2 GiB into a buffer, and more buffers than one launch takes."""
    large = torch.zeros(5, 2**28, dtype=torch.float32, device="cuda")
    large[1].normal_()
    small = [torch.randn(5, 32, device="cuda") for _ in range(70)]
    expected = copied(small, [1, 1], [0, 4])
    copy_slots([large, *small], torch.tensor([1, 1], device="cuda"), torch.tensor([0, 4], device="cuda"))
    assert all(torch.equal(large[slot], large[1]) for slot in (0, 4)) and not large[2].any()
    assert all(same_bits(*pair) for pair in zip(small, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_neither_sync_nor_memory_is_needed():
    buffers = [torch.randn(4, 1000, device="cuda")]
    sources, targets = (torch.tensor([slot], device="cuda") for slot in (0, 3))
    copy_slots(buffers, sources, targets)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy_slots(buffers, sources, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
