# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for fused_silu_mul_halves and gdn_gates, their float64 oracles, and poison for what they allocate."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 127, 4097]
EXTREMES = (-1e4, -200.0, -90.0, -20.0, -1e-4, 0.0, 1e-4, 20.0, 90.0, 200.0, 1e4)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory that an op allocates starts as NaN."""
    enabled, fill = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        deterministic.fill_uninitialized_memory = fill


def slice_of_poison(values: torch.Tensor, row_stride: int | None = None, skipped: int = 0) -> torch.Tensor:
    """``values`` as columns of a wider tensor, whose other columns are NaN.

    Args:
        row_stride: columns of the wider tensor; as many as are needed unless given.
        skipped: columns before the first.
    """
    width = values.shape[-1]
    storage = values.new_full((*values.shape[:-1], row_stride or skipped + width), float("nan"))
    storage[..., skipped : skipped + width] = values
    return storage[..., skipped : skipped + width]


def gate_up_case(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).to(dtype)


def extreme_gate_up(dtype: torch.dtype) -> torch.Tensor:
    """Every extreme gate with every up whose product the dtype holds: [11, 2 * 22]."""
    gates = torch.tensor(EXTREMES)[:, None].expand(-1, 2 * len(EXTREMES))
    limit = 2.0 if dtype == torch.float16 else 1e4
    ups = torch.cat([torch.tensor(EXTREMES).clamp(-limit, limit), torch.linspace(-2, 2, len(EXTREMES))])
    return torch.cat([gates, ups.expand(len(EXTREMES), -1)], dim=1).to(dtype)


def silu_mul_oracle(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU."""
    gate, up = gate_up.cpu().double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def gate_arguments(
    batch: int,
    tokens: int,
    heads: int,
    *,
    dtype: torch.dtype = torch.float32,
    a_dtype: torch.dtype | None = None,
    per_head: torch.dtype = torch.float32,
    parked: bool = True,
    seed: int = 0,
) -> dict:
    """Keyword arguments of gdn_gates on the CPU: b and a are columns of wider tensors, every third row is parked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def projection(kind: torch.dtype, skipped: int) -> torch.Tensor:
        return slice_of_poison((4 * normal(batch, tokens, heads)).to(kind), 2 * heads + 5, skipped)

    return {
        "b": projection(dtype, skipped=2),
        "a": projection(a_dtype or dtype, skipped=heads + 1),
        "A_log": (torch.rand(heads, generator=generator) * 16 + 0.01).log().to(per_head),
        "dt_bias": normal(heads).to(per_head),
        "parked": torch.arange(batch) % 3 == 1 if parked else None,
    }


def extreme_gate_arguments(dtype: torch.dtype) -> dict:
    """Every extreme of a with every one of dt_bias; b runs over them as well. [1, 11, 11]"""
    extremes = torch.tensor(EXTREMES)
    raw = extremes[None, :, None].expand(1, -1, len(EXTREMES)).to(dtype).contiguous()
    return {
        "b": raw.clone(),
        "a": raw,
        "A_log": torch.linspace(-7, 3, len(EXTREMES)),
        "dt_bias": extremes.clone(),
        "parked": None,
    }


def gates_oracle(
    b: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, parked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 on the CPU; beta is what b's dtype holds."""
    kind = b.dtype
    b, a, A_log, dt_bias = (tensor.cpu().double() for tensor in (b, a, A_log, dt_bias))
    beta = (1 / (1 + (-b).exp())).to(kind).double()
    g = -A_log.exp() * torch.logaddexp(a + dt_bias, torch.zeros(()).double())
    if parked is not None:
        beta[parked.cpu()], g[parked.cpu()] = 0, 0
    return beta, g


def moved(arguments: dict, device: str) -> dict:
    """A copy on a device in which slices stay slices."""
    return {
        name: _moved(value, device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    return slice_of_poison(tensor.to(device), tensor.stride(-2), tensor.storage_offset() % tensor.stride(-2))
