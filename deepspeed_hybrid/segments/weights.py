# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Fused weights over the parameters that train: views where memory allows it, packed copies where it does not."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

ALIASED, PACKED = "aliased", "packed"


@dataclass(frozen=True)
class WeightSyncReport:
    """Modes of the fused weights and what refreshing them cost."""

    # Segment path, and 'model' where all of it is gathered (ZeRO-3) -> 'aliased' (never stale) or 'packed'.
    modes: dict[str, str] = field(default_factory=dict)
    bytes_copied: int = 0
    seconds: float = 0.0


class FusedTensor:
    """Parameters that follow one another in a single tensor, [sum of rows, ...].

    Args:
        parameters: of one dtype, device and row shape, contiguous.
        may_move: whether parameters that own their storage may be moved into a common one.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, parameters: list[nn.Parameter], may_move: bool = True):
        self.parameters = parameters
        if (
            may_move
            and not _side_by_side(parameters)
            and all(_owns_its_storage(parameter) for parameter in parameters)
        ):
            _rehome(parameters)
        if _side_by_side(parameters):
            self.mode, self.data = ALIASED, _view_over(parameters)
        else:
            self.mode, self.data = PACKED, torch.cat([parameter.detach() for parameter in parameters])

    def refresh(self) -> int:
        """Copy the parameters into a packed tensor, in place; the bytes written. A view has nothing to copy."""
        if self.mode == ALIASED:
            return 0
        sizes = [parameter.shape[0] for parameter in self.parameters]
        for target, parameter in zip(self.data.split(sizes), self.parameters, strict=True):
            target.copy_(parameter.detach())
        return self.data.numel() * self.data.element_size()


class FusedLinear:
    """Linear layers of one input as one: ``weight`` [sum of outputs, inputs], ``bias`` or None.

    Args:
        layers: plain linear layers, in the order of their rows.
    """

    def __init__(self, layers: list[nn.Linear], may_move: bool = True):
        self.sizes = [layer.weight.shape[0] for layer in layers]
        self._weight = FusedTensor([layer.weight for layer in layers], may_move)
        self._bias = None if layers[0].bias is None else FusedTensor([layer.bias for layer in layers], may_move)
        self._packed = [tensor for tensor in self.tensors if tensor.mode == PACKED]  # a call looks for some to refresh

    @property
    def tensors(self) -> list[FusedTensor]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    @property
    def weight(self) -> torch.Tensor:
        return self._weight.data

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self._bias is None else self._bias.data

    @property
    def mode(self) -> str:
        return PACKED if any(tensor.mode == PACKED for tensor in self.tensors) else ALIASED

    @property
    def packed_bytes(self) -> int:
        return sum(
            tensor.data.numel() * tensor.data.element_size() for tensor in self.tensors if tensor.mode == PACKED
        )

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., sum of outputs]."""
        return nn.functional.linear(inputs, self.weight, self.bias)

    def columns(self, inputs: torch.Tensor, start: int, end: int | None = None) -> torch.Tensor:
        """[..., inputs] -> [..., end - start]: these outputs alone."""
        bias = None if self.bias is None else self.bias[start:end]
        return nn.functional.linear(inputs, self.weight[start:end], bias)

    def parts(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each layer gives for [..., inputs]: views of one product."""
        return self(inputs).split(self.sizes, dim=-1)

    def refresh(self) -> int:
        return sum(tensor.refresh() for tensor in self._packed)


def refresh(fused: dict[str, FusedLinear]) -> int:
    """Copy what is packed, in place; the bytes written. Views cost nothing."""
    return sum(linear.refresh() for linear in fused.values())


def sync(fused: dict[str, FusedLinear]) -> WeightSyncReport:
    """Refresh every packed copy, and wait for it."""
    return timed({path: linear.mode for path, linear in fused.items()}, lambda: refresh(fused))


def timed(modes: dict[str, str], copy: Callable[[], int]) -> WeightSyncReport:
    """The report of a ``copy`` that returns the bytes it wrote."""
    start = time.perf_counter()
    copied = copy()
    if copied:
        get_accelerator().synchronize()  # else the clock would show the launching of the copies
    return WeightSyncReport(modes, copied, time.perf_counter() - start)


def _side_by_side(parameters: list[nn.Parameter]) -> bool:
    """Whether each parameter starts where the one before it ends, in one storage (ZeRO-1/2's flat buffers do so)."""
    storage, address = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for parameter in parameters:
        if (
            not parameter.is_contiguous()
            or parameter.data_ptr() != address
            or parameter.untyped_storage().data_ptr() != storage
        ):
            return False
        address += parameter.numel() * parameter.element_size()
    return True


def _owns_its_storage(parameter: nn.Parameter) -> bool:
    """A parameter that is all of its storage is nobody's view, and may move."""
    return parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def _rehome(parameters: list[nn.Parameter]) -> None:
    """Move the parameters into one new storage, one behind the other; they stay the same objects."""
    home = torch.cat([parameter.detach() for parameter in parameters])
    sizes = [parameter.shape[0] for parameter in parameters]
    for parameter, place in zip(parameters, home.split(sizes), strict=True):
        parameter.data = place


def _view_over(parameters: list[nn.Parameter]) -> torch.Tensor:
    first = parameters[0].detach()
    rows = sum(parameter.shape[0] for parameter in parameters)
    view = torch.empty(0, dtype=first.dtype, device=first.device)
    return view.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]))
