# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The ranks that share the layers of one model: they start together, sample alike, and fail together.

Ranks that each have a whole model are no peers: nothing here waits for them.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch
import torch.distributed

from deepspeed_hybrid.ops.collectives import bounded_waits, everyones, is_lost_peer, post, posted, waits_are_bounded

PATIENCE = 8.0  # seconds: between peers that run the same steps, more is a failure
APART = 1.0  # seconds by which peers may be at different places, where one wants to know what the others did
REFUSED, CALL, ROWS, ROUND, SYNC = range(5)  # what a rank is about when it meets the others
ERROR, LOST = "error ", "lost"  # beginnings of what a rank leaves for the others
RUNS = itertools.count()  # of this process; peers count alike
WORDS = 7  # that peers exchange when they meet


def words(*values: int) -> list[int]:
    """What one rank passes to the others; all pass as much, whatever they are about."""
    return [*values, *[0] * (WORDS - len(values))]


def digest_of(content: bytes) -> int:
    """63 bits of it, for peers to compare."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def check_kind(rank: int, kind: int, own: int) -> None:
    """
    Raises:
        RuntimeError: another rank is about something else than this one.
    """
    if kind == REFUSED:
        raise RuntimeError(f"rank {rank} of those that share this model refused the call; its error says why")
    if kind != own:
        raise RuntimeError(
            f"rank {rank} of those that share this model is about something else: they call generate(), take the rows "
            "of generate_iter() and sync together"
        )


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
        self._failed: str | None = None  # the run that ended here by an error, until it is known how it ended there
        self._lost: str | None = None

    @property
    def lost(self) -> bool:
        """Whether peers cannot speak to one another any more."""
        return self._lost is not None

    def exchange(self, values: list[int]) -> list[list[int]]:
        """What every peer passes, in their order; as many values of each. Peers wait here for one another.

        Raises:
            RuntimeError: peers were lost before.
        """
        if self.group is None:
            return [values]
        self._settle()
        if self.lost:
            raise RuntimeError(f"the ranks that share this model were separated, and cannot go on: {self._lost}")
        return everyones(torch.tensor(values, dtype=torch.int64, device=self.device), self.group).tolist()

    def least(self, value: int) -> int:
        """The smallest of what peers pass. They wait here for one another."""
        return min(other for other, *_ in self.exchange(words(value)))

    def meet(self, kind: int, state: int = 0) -> bool:
        """Wait for the others, who must be about the same; whether they all passed the same ``state``.

        Raises:
            RuntimeError: one of them is not, or peers were lost before.
        """
        every = self.exchange(words(kind, state))
        for rank, (other, *_) in enumerate(every):
            check_kind(rank, other, kind)
        return len({passed for _, passed, *_ in every}) == 1

    @contextmanager
    def meeting(self, kind: int) -> Iterator[None]:
        """``meet()`` behind what runs inside; where that fails here, the others are told."""
        try:
            yield
        except BaseException:
            self.exchange(words(REFUSED))
            raise
        self.meet(kind)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Peers run the same inside. Where one fails, none of the others waits for ever.

        Raises:
            RuntimeError: another rank has failed, or has not taken part for ``PATIENCE`` seconds.
        """
        if self.group is None:
            yield
            return
        run = f"deepspeed_hybrid/{torch.distributed.get_process_group_ranks(self.group)[0]}/{next(RUNS)}"
        try:
            with bounded_waits(self.group, self.device, PATIENCE):
                yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failed = run
            lost = is_lost_peer(error)
            told = self._told(run) if lost else None
            post(f"{run}/{self.rank}", LOST if lost else f"{ERROR}{type(error).__name__}: {error}")
            if not lost:
                raise
            self._lost = told or f"another rank did not take part for {PATIENCE:.0f} s"
            raise RuntimeError(f"generation has failed on all ranks that share this model: {self._lost}") from error

    def _settle(self) -> None:
        """After an error of this rank's own: peers that were waiting for it then are lost, those that failed alike,
        or were done, are not. To wait for a lost one would end the process."""
        run, self._failed = self._failed, None
        if run is None or self._lost is not None:
            return
        end = time.monotonic() + PATIENCE + APART  # by then all that were waiting have said so
        while time.monotonic() < end:
            messages = [posted(f"{run}/{rank}") for rank in range(self.count)]
            if LOST in messages:
                self._lost = f"rank {messages.index(LOST)} was waiting when this one failed"
                return
            if None not in messages:
                return
            time.sleep(0.05)
        if not waits_are_bounded(self.group, self.device):
            self._lost = "this rank failed, and others may be waiting for it"

    def _told(self, run: str) -> str | None:
        """What the first other rank that failed by itself has said of it."""
        for rank in range(self.count):
            message = posted(f"{run}/{rank}")
            if message is not None and message.startswith(ERROR):
                return f"rank {rank} raised {message.removeprefix(ERROR)}"
        return None
