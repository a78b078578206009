# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What ranks need of one another while they generate."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import deepspeed
import torch
import torch.distributed
from deepspeed.comm.comm import comms_logger


def everyones(mine: torch.Tensor, group) -> torch.Tensor:
    """[ranks, ...]: what each rank of ``group`` passes, of one shape. A collective operation."""
    ranks = deepspeed.comm.get_world_size(group=group)
    every = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
    deepspeed.comm.all_gather_into_tensor(every, mine.contiguous(), group=group)
    return every.view(ranks, *mine.shape)


def capture_obstacle(group, device: torch.device) -> str | None:
    """Why what goes between the ranks of a group cannot be part of a CUDA graph, or None.

    Args:
        device: of the tensors; a group may have a backend for each kind.
    """
    name = _backend(group, device).name()
    if name != "nccl":
        return f"collective operations of the backend {name!r} cannot be captured"
    if comms_logger.enabled:
        return "DeepSpeed's comms_logger waits for every collective operation, which a capture does not permit"
    if torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective operation on the host"
    return None


def waits_are_bounded(group, device: torch.device) -> bool:
    """Whether :func:`bounded_waits` has an effect."""
    return _gloo(group, device) is not None


def group_patience(group, device: torch.device) -> float:
    """Seconds that the group's own operations wait for a rank."""
    return _backend(group, device).options._timeout.total_seconds()


@contextmanager
def bounded_waits(group, device: torch.device, seconds: float) -> Iterator[None]:
    """Inside, a rank that waits longer than this for another raises, where the backend is gloo; NCCL's own watchdog
    ends processes after the time that the group was made with."""
    backend = _gloo(group, device)
    if backend is None:
        yield
        return
    before = backend.options._timeout
    backend._set_default_timeout(min(before, timedelta(seconds=seconds)))
    try:
        yield
    finally:
        backend._set_default_timeout(before)


def _backend(group, device: torch.device):
    """The group's for tensors on such a device."""
    return group._get_backend(torch.device(device.type))


def _gloo(group, device: torch.device):
    """The same, where that is gloo; else None."""
    backend = _backend(group, device)
    return backend if isinstance(backend, torch.distributed.ProcessGroupGloo) else None


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective operation failed since another rank did not take part."""
    known = isinstance(error, torch.distributed.DistError)
    return known or isinstance(error, RuntimeError) and "gloo" in str(error)


def post(key: str, text: str) -> None:
    """Leave a message for the other ranks of the job, past any collective operation, if there is still a way."""
    with suppress(torch.distributed.DistError):
        torch.distributed.distributed_c10d._get_default_store().set(key, text)


def posted(key: str) -> str | None:
    """The message that was left; None: there is none, or whoever kept them is gone."""
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.get(key).decode() if store.check([key]) else None
    except torch.distributed.DistError:
        return None
