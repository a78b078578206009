# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ranks that share the layers of one model: they start together, sample alike, and fail together.

Ranks that each have a whole model are no peers: nothing here waits for them.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch

from deepspeed_hybrid.ops.collectives import bounded_waits, everyones, is_lost_peer, post, posted

PATIENCE = 8.0  # seconds: between peers that run the same steps, more is a failure
RUNS = itertools.count()  # of this process; peers count alike


class Peers:
    """
    Args:
        group: of the peers; None: this rank has a whole model.
        device: of tensors that the group can exchange.
        replica: which of the models that are trained together this one is; 0 for the first.
    """

    def __init__(self, group, device: torch.device, replica: int = 0):
        self.group, self.device, self.replica = group, device, replica
        self.rank = 0 if group is None else deepspeed.comm.get_rank(group=group)
        self.count = 1 if group is None else deepspeed.comm.get_world_size(group=group)
        self._lost: str | None = None

    def exchange(self, values: list[int]) -> list[list[int]]:
        """What every peer passes, in their order; as many values of each. Peers wait here for one another.

        Raises:
            RuntimeError: peers were lost before.
        """
        if self.group is None:
            return [values]
        if self._lost is not None:
            raise RuntimeError(f"the ranks that share this model were separated, and cannot go on: {self._lost}")
        return everyones(torch.tensor(values, dtype=torch.int64, device=self.device), self.group).tolist()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Peers run the same inside. Where one fails, none of the others waits for ever.

        Raises:
            RuntimeError: another rank has failed, or has not taken part for ``PATIENCE`` seconds.
        """
        if self.group is None:
            yield
            return
        run = f"deepspeed_hybrid/{next(RUNS)}"
        try:
            with bounded_waits(self.group, PATIENCE):
                yield
        except GeneratorExit:
            raise
        except BaseException as error:
            if not is_lost_peer(error):
                post(f"{run}/{self.rank}", f"{type(error).__name__}: {error}")
                raise
            self._lost = self._told(run) or f"another rank did not take part for {PATIENCE:.0f} s"
            raise RuntimeError(f"generation has failed on all ranks that share this model: {self._lost}") from error

    def _told(self, run: str) -> str | None:
        """What the first other rank that failed by itself has said of it."""
        for rank in range(self.count):
            message = posted(f"{run}/{rank}")
            if message is not None:
                return f"rank {rank} raised {message}"
        return None
