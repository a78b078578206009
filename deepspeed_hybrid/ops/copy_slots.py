# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole slots of a cache, copied on the device: samples of one prompt begin where it ends."""

import torch

from deepspeed_hybrid.ops.inference import refuse_recording

PIECE_BYTES = 2**28  # of slots on their way to others: most slots may be copied at once, and memory be full


def copy_slots_reference(buffers: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """What :func:`copy_slots` does, in plain torch on any device, with memory for 256 MiB of slots or for one."""
    _check(buffers, sources, targets)
    for buffer in buffers:
        if not len(sources) or not buffer.numel():
            continue
        count = max(1, PIECE_BYTES // buffer[0].nbytes)
        for some, others in zip(sources.split(count), targets.split(count), strict=True):
            buffer.index_copy_(0, others, buffer.index_select(0, some))


@torch.library.custom_op("deepspeed_hybrid::copy_slots", mutates_args=("buffers",), device_types="cuda")
def _copy_slots(buffers: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    _check(buffers, sources, targets)
    from deepspeed_hybrid.ops.triton.copy_slots import launch  # here, because a torch for CPUs has no Triton

    launch(buffers, sources, targets)


_copy_slots.register_fake(lambda *_: None)
_copy_slots.register_kernel("cpu")(copy_slots_reference)


def copy_slots(buffers: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """In every buffer, make slot ``targets[i]`` what slot ``sources[i]`` is, in place.

    On CUDA this is one launch for all buffers whose slots have the same size, up to 64 of them, without a host sync
    and without memory of its own; the first call for a number of buffers, or another size of slots, may compile it.
    On a CPU it is :func:`copy_slots_reference`. There is no gradient.

    Args:
        buffers: each [S, ...], contiguous, of any dtype.
        sources, targets: [N] int64, on the buffers' device. Slots must be below S, none among both nor twice among the
            targets: no kernel looks.

    Raises:
        RuntimeError: an argument of another dtype, shape, layout or device; nothing is changed.
    """
    refuse_recording("copy_slots", *buffers)
    _copy_slots(buffers, sources, targets)


def _check(buffers: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"copy_slots: {message}")

    for name, slots in (("sources", sources), ("targets", targets)):
        fits = slots.dtype == torch.int64 and slots.dim() == 1 and slots.is_contiguous()
        require(fits, f"{name} must be contiguous int64 [N], got {slots.dtype} {tuple(slots.shape)}")
        require(slots.device == sources.device, f"targets is on {slots.device}, sources on {sources.device}")
    count = len(sources)
    require(len(targets) == count, f"there must be as many targets as sources, got {len(targets)} and {count}")
    for index, buffer in enumerate(buffers):
        fits = buffer.dim() >= 1 and buffer.is_contiguous()
        require(fits, f"buffer {index} must be contiguous [S, ...], got strides {buffer.stride()}")
        require(buffer.device == sources.device, f"buffer {index} is on {buffer.device}, sources on {sources.device}")
