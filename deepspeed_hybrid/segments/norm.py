# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What kind of RMSNorm a module is, found by asking its forward and not its name."""

from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_hybrid.hung_on import hooks_of

NORM_METHODS = ("forward", "_norm")  # in which transformers' norms compute


@dataclass(frozen=True)
class Norm:
    """x * rsqrt(mean(x^2) + eps) * (weight + offset), over ``size`` elements."""

    size: int
    weight: torch.Tensor
    offset: float
    eps: float


def as_rms_norm(module: nn.Module) -> Norm | None:
    """The form of a norm module, or None where its forward is not an RMSNorm of either form.

    The forward runs on a probe in place of the module's weight, so that weights need not be there, and without hooks.
    """
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not isinstance(eps, float):
        return None
    if hooks_of(module) or any(callable(getattr(type(module), name, None)) for name in module.__dict__):
        return None  # it has a forward of its own, or another method that the forward may call
    size = getattr(weight, "ds_shape", weight.shape)[0]  # a partitioned parameter is empty
    methods = [getattr(type(module), name, None) for name in NORM_METHODS]  # a class may inherit one and not the other
    key = (*methods, size, eps)
    if key not in _OFFSETS:
        _OFFSETS[key] = _offset(module, size, eps)
    offset = _OFFSETS[key]
    return None if offset is None else Norm(size, weight, offset, eps)


def rms_norm(module: nn.Module) -> Norm:
    """The form of a module that is known to be an RMSNorm.

    Raises:
        ValueError: it is none.
    """
    norm = as_rms_norm(module)
    if norm is None:
        raise ValueError(f"{type(module).__name__} is not an RMSNorm")
    return norm


_OFFSETS: dict[tuple, float | None] = {}  # every layer has two of the same


def _offset(module: nn.Module, size: int, eps: float) -> float | None:
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    probe = torch.sin(torch.arange(1, size + 1, dtype=torch.float32, device="cpu"))
    shell.__dict__["_parameters"] = {"weight": nn.Parameter(0.5 * probe, requires_grad=False)}
    x = 3 * torch.cos(torch.arange(2 * size, dtype=torch.float32, device="cpu")).reshape(2, size)
    try:
        with torch.no_grad():
            actual = type(module).forward(shell, x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # it wants more than a hidden state, or another one
    for offset in (0.0, 1.0):
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (0.5 * probe + offset)
        if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-4, atol=1e-5):
            return offset
    return None
