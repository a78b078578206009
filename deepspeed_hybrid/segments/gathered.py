# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Whole copies of weights that ZeRO-3 has partitioned, and the model made to generate with them.

While it generates, the modules' tables of parameters and hooks are exchanged, not the parameters' data: DeepSpeed's
parameters, with their status, partitions, gradients and what autograd saved of them, are then not touched at all, its
hooks have nothing to fetch or to free, and whatever a module or a user's hook reads (``self.conv1d.weight`` without a
call of conv1d, a tied embedding, an external parameter) is a plain parameter.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import deepspeed
import torch
from torch import nn

from deepspeed_hybrid.hung_on import is_zero3_hook
from deepspeed_hybrid.segments.apply import ModuleTables

# Copies lie in blocks of about this size. Launching one copy a parameter would take about as long as the copying; one
# for all of them would leave the device idle while it is put together.
BLOCK_BYTES = 2**28
ALIGNMENT = 16  # bytes, as vector loads of kernels want it


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has taken the parameter; its own shape and data then mean nothing."""
    return hasattr(parameter, "ds_id")


def partition_obstacle(parameter: nn.Parameter) -> str | None:
    """Why a partitioned parameter cannot be gathered here, or None."""
    partition, ranks = parameter.ds_tensor, _ranks(parameter)
    if getattr(partition, "final_location", None) == "nvme":
        return "its partition is offloaded to NVMe"
    if partition.dtype != parameter.dtype:
        return f"its partition is quantised ({partition.dtype})"
    if partition.numel() != -(-parameter.ds_numel // ranks):
        return f"its partition is not the share of one of {ranks} ranks (MiCS)"
    return None


def address(tensor: torch.Tensor) -> tuple:
    """What changes when a weight is moved or replaced. The memory of a partitioned one comes and goes by itself."""
    if is_partitioned(tensor):
        return tensor.ds_id, tensor.dtype, tensor.ds_shape
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class GatheredWeights:
    """A whole copy of every parameter of ``model``, at an address that stays until ``release()``.

    Args:
        model: its parameters are partitioned by ZeRO-3. Those that are not, such as an adapter's that was added
            later, are copied too.
        engine: counts optimizer steps in ``global_steps``.
        device: where the copies are.
    """

    def __init__(self, model: nn.Module, engine, device: torch.device):
        self.model, self.engine, self.device = model, engine, device
        self.step: int | None = None  # that the copies are of; None: there are none
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[nn.Parameter, torch.Tensor, int]] = []  # its copy, flat, and the ranks it is from
        self._sources: list[int] = []  # where the shares lay when the runs were made
        self._runs: list[tuple[int, int]] = []  # of places: the first, and how many elements it has with neighbours
        self._tables = ModuleTables(model, dropped=is_zero3_hook)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def whole_bytes(self) -> int:
        """Of copies of all parameters."""
        return sum(_shape(parameter).numel() * parameter.dtype.itemsize for parameter in self.model.parameters())

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have a part of some parameter."""
        return any(_ranks(parameter) > 1 for parameter in self.model.parameters())

    def check(self) -> None:
        """Raise a RuntimeError if the engine has stepped since the copies were gathered."""
        if self.step not in (None, self.engine.global_steps):
            raise RuntimeError(
                f"the gathered weights are those of optimizer step {self.step} and the engine is at step "
                f"{self.engine.global_steps}: under ZeRO stage 3 call sync_segki_weights(), or sync_weights(), after "
                "engine.step() and before generate()"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def allocate(self, groups: Iterable[list[nn.Parameter]]) -> None:
        """Make room, for ``gather()`` to fill: in the model's order, but with the parameters of a group side by side.

        DeepSpeed lays partitions in that order too, so that most of them are copied with their neighbours.
        """
        self.release()
        group_of = {parameter: group for group in groups for parameter in group}
        parameters = list(self.model.parameters())
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            unit = ALIGNMENT // dtype.itemsize
            waiting = dict.fromkeys(parameter for parameter in parameters if parameter.dtype == dtype)
            starts: dict[nn.Parameter, int] = {}  # in the block to be made next
            end = 0
            while waiting:
                first = next(iter(waiting))
                end = -(-end // unit) * unit
                for member in group_of.get(first, [first]):
                    if member in waiting:  # a parameter of two groups has one place
                        del waiting[member]
                        starts[member] = end
                        end += _shape(member).numel()
                if end * dtype.itemsize >= BLOCK_BYTES or not waiting:
                    self._make_block(torch.empty(end, dtype=dtype, device=self.device), starts)
                    starts, end = {}, 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather(self) -> int:
        """Copy every parameter, in place; the bytes written. A collective operation."""
        shares = [_share(parameter) for parameter, _, _ in self._places]
        sources = [share.data_ptr() for share in shares]
        if sources != self._sources:
            self._sources, self._runs = sources, _runs(self._places, shares)
        for (parameter, whole, ranks), share in zip(self._places, shares, strict=True):
            if ranks > 1:
                _all_gather(whole, share.to(whole.device), ranks, parameter.ds_process_group)
        for first, elements in self._runs:
            _copy(self._places[first][1], shares[first], elements)
        self.step = self.engine.global_steps
        return self.nbytes

    def serving(self) -> AbstractContextManager[None]:
        """Inside, modules have the copies for parameters and only the hooks of others; on exit, what they had."""
        return self._tables.exchanged(self._copies.__getitem__)

    def bare(self) -> AbstractContextManager[None]:
        """Inside, modules have their parameters and only the hooks of others.

        DeepSpeed's table gathers a parameter that is asked for by name where it believes to be in a forward, as it
        does for ever after one that failed.
        """
        return self._tables.exchanged(lambda own: own)

    def release(self) -> None:
        self.step = None
        self._copies, self._places = {}, []
        self._sources, self._runs = [], []

    def _make_block(self, block: torch.Tensor, starts: dict[nn.Parameter, int]) -> None:
        for parameter, start in starts.items():
            shape = _shape(parameter)
            whole = block[start : start + shape.numel()]
            self._copies[parameter] = nn.Parameter(whole.view(shape), requires_grad=False)
            self._places.append((parameter, whole, _ranks(parameter)))


def _ranks(parameter: nn.Parameter) -> int:
    return deepspeed.comm.get_world_size(parameter.ds_process_group) if is_partitioned(parameter) else 1


def _shape(parameter: nn.Parameter) -> torch.Size:
    return parameter.ds_shape if is_partitioned(parameter) else parameter.shape


def _share(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter, flat; all of it where there is one rank."""
    return parameter.ds_tensor if is_partitioned(parameter) else parameter.detach().reshape(-1)


def _runs(places: list[tuple[nn.Parameter, torch.Tensor, int]], shares: list[torch.Tensor]) -> list[tuple[int, int]]:
    """What one copy can take: the first place of each run of neighbours in both memories, and all of its elements."""
    runs: list[tuple[int, int]] = []
    last = None
    for index, ((_, whole, ranks), share) in enumerate(zip(places, shares, strict=True)):
        if ranks > 1:
            last = None
            continue
        if last is not None and _adjacent(last[0], whole) and _adjacent(last[1], share):
            runs[-1] = runs[-1][0], runs[-1][1] + whole.numel()
        else:
            runs.append((index, whole.numel()))
        last = whole, share
    return runs


def _copy(target: torch.Tensor, source: torch.Tensor, elements: int) -> None:
    """So many elements from the beginning of both, those of their neighbours included."""
    target.as_strided((elements,), (1,)).copy_(source.as_strided((elements,), (1,)), non_blocking=True)


def _adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _all_gather(whole: torch.Tensor, share: torch.Tensor, ranks: int, group) -> None:
    """Straight into its place; shares are padded where the parameter does not divide evenly."""
    padded = ranks * share.numel()
    target = whole if padded == whole.numel() else whole.new_empty(padded)
    deepspeed.comm.all_gather_into_tensor(target, share, group=group)
    if target is not whole:
        whole.copy_(target[: whole.numel()])
