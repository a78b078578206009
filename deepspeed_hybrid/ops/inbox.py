# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Memory of a card into which the cards of other ranks write."""

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

# One of torch's own modules, whose name says that its interface may move: it is used here alone.
from torch.distributed import _symmetric_memory as symmetric_memory


class Inbox:
    """Zeros that every rank of a group can address. Making it is a collective operation.

    Attributes:
        own: [size] int64, this rank's.
        addresses: [ranks] int64 on the device, of every rank's.
        rank: this rank's number in the group.

    Raises:
        RuntimeError: the cards cannot reach one another's memory. Every rank finds the same.
    """

    def __init__(self, size: int, device: torch.device, group):
        self.rank = torch.distributed.get_rank(group)
        error = None
        try:
            self.own = symmetric_memory.empty(size, dtype=torch.int64, device=device)
            self.own.zero_()
            get_accelerator().synchronize(device)  # before any rank can write
            self._handle = symmetric_memory.rendezvous(self.own, group)
            addresses = list(self._handle.buffer_ptrs)
            if addresses[self.rank] != self.own.data_ptr():
                error = "its address is not that of the memory handed out"
            self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        except (RuntimeError, ValueError) as raised:  # no peer access, another host, no such backend
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(failed, group=group)
        if int(failed):
            raise RuntimeError(error or "another rank cannot address the memory of this one")
