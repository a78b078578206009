# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Layers and tokens for gdn_decode, and a float64 oracle: transformers' own functions over whole sequences."""

import inspect
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from glue_cases import slice_of_poison
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs Triton and TRITON_INTERPRET=1",
)
EPS = 1e-6


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> list[int]:
        return [self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads]


SHAPES = [
    Shape(2, 4, 16, 16),
    Shape(1, 3, 8, 32),
    Shape(2, 2, 128, 128),
    Shape(1, 2, 12, 20),
    Shape(1, 1, 16, 8, kernel=1),
    Shape(1, 2, 8, 8, kernel=3),
    Shape(2, 2, 8, 8, kernel=8),
]
REAL = Shape(16, 32, 128, 128)


def layer_of(shape: Shape, *, dtype: torch.dtype = torch.float32, bias: bool = False, seed: int = 0) -> dict:
    """The arguments of gdn_decode that belong to a layer, its weights in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return {
        "conv_weight": normal(shape.channels, shape.kernel).to(dtype),
        "conv_bias": normal(shape.channels).to(dtype) if bias else None,
        "A_log": (torch.rand(shape.value_heads, generator=generator) * 16 + 0.01).log(),
        "dt_bias": normal(shape.value_heads).sub(3).to(dtype),  # slow enough a decay that early tokens are seen
        "norm_weight": normal(shape.value_dim).to(dtype),
        "eps": EPS,
        "key_heads": shape.key_heads,
    }


def tokens_of(
    shape: Shape, rows: int, length: int, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> torch.Tensor:
    """Input projections, [rows, length, N]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, sum(shape.columns), generator=generator).to(dtype)


def buffers_of(
    shape: Shape, slots: int, *, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32
) -> dict:
    """A window and a state for sequences that begin."""
    return {
        "window": torch.zeros(slots, shape.channels, shape.kernel, dtype=dtype),
        "state": torch.zeros(slots, shape.value_heads, shape.key_dim, shape.value_dim, dtype=state_dtype),
    }


def arguments_of(
    shape: Shape,
    rows: int,
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    bias: bool = True,
    slots: int | None = None,
    seed: int = 0,
) -> dict:
    """Keyword arguments of one gdn_decode in the middle of sequences; every third row is parked."""
    generator = torch.Generator().manual_seed(seed)
    arguments = layer_of(shape, dtype=weights, bias=bias, seed=seed) | buffers_of(
        shape, slots or rows, dtype=dtype, state_dtype=state_dtype
    )
    for name in ("window", "state"):
        arguments[name].copy_(torch.randn(arguments[name].shape, generator=generator))
    projected = tokens_of(shape, rows, 1, dtype=dtype, seed=seed + 1)[:, 0]
    return arguments | {
        "projected": slice_of_poison(projected, projected.shape[1] + 5, 2),
        "position": torch.randint(shape.kernel, 262144, (rows,), generator=generator),
        "parked": torch.arange(rows) % 3 == 1,
    }


def decoded(
    op: Callable,
    layer: dict,
    tokens: torch.Tensor,
    buffers: dict,
    *,
    starts: list[int] | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Run ``tokens`` [rows, length, N] one at a time; the outputs, [rows, length, HV * DV].

    Args:
        starts: the step in which each row begins; before it and after its last token the row is parked and its
            projection is NaN. 0 for all unless given.
        first: position of the first token.
    """
    rows, length, _ = tokens.shape
    device = tokens.device
    step_of_row = torch.tensor(starts or [0] * rows, device=device)
    outputs = []
    for step in range(length + max(starts or [0])):
        index = step - step_of_row
        parked = (index < 0) | (index >= length)
        projected = tokens[torch.arange(rows, device=device), index.clamp(0, length - 1)]
        projected = torch.where(parked[:, None], float("nan"), projected)
        out = op(projected=projected, position=index + first, parked=parked, **layer, **buffers)
        assert (out[parked] == 0).all()
        outputs.append(out)
    stacked = torch.stack(outputs, dim=1)
    return torch.stack([stacked[row, start : start + length] for row, start in enumerate(step_of_row.tolist())])


# --------------------------------------------------------------------------------------------------------- the oracle


class Float64Torch:
    """torch for a function whose text says float32 and that is to compute in float64."""

    float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


def in_float64(function: Callable) -> Callable:
    """A function of transformers, under its kernel decorators, in float64."""
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    plain = inspect.unwrap(function)
    return FunctionType(plain.__code__, plain.__globals__ | {"torch": Float64Torch()}, None, plain.__defaults__)


recurrent_rule = in_float64(qwen.torch_recurrent_gated_delta_rule)
gated_norm = in_float64(qwen.Qwen3_5RMSNormGated.forward)


def mixed_of(
    shape: Shape, layer: dict, tokens: torch.Tensor, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """float64 q, k [rows, length, HK, DK] and v [rows, length, HV, DV] after the conv over sequences from 0.

    ``dtype``: of the model, which the conv's sums are rounded to where its weight has it, and their activation is.
    """
    rows, length, _ = tokens.shape
    raw = tokens[..., : shape.channels].double().transpose(1, 2)
    weight, bias = (None if layer[name] is None else layer[name].double() for name in ("conv_weight", "conv_bias"))
    padded = F.pad(raw, (shape.kernel - 1, 0))
    mixed = F.conv1d(padded, weight[:, None], bias, groups=shape.channels)
    mixed = mixed.to(dtype).double() if layer["conv_weight"].dtype == dtype else mixed
    mixed = F.silu(mixed).to(dtype).double().transpose(1, 2)
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    query, key, value = mixed.split([keys, keys, values], dim=-1)
    heads = (rows, length, shape.key_heads, shape.key_dim)
    return query.reshape(heads), key.reshape(heads), value.reshape(rows, length, shape.value_heads, shape.value_dim)


def gates_of(shape: Shape, layer: dict, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 beta and g, [rows, length, HV]."""
    _, _, b, a = tokens.double().split(shape.columns, dim=-1)
    softplus = torch.logaddexp(a + layer["dt_bias"].double(), torch.zeros((), dtype=torch.float64, device=a.device))
    return b.sigmoid(), -layer["A_log"].double().exp() * softplus


def oracle(
    shape: Shape,
    layer: dict,
    tokens: torch.Tensor,
    state: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, length, HV * DV] and the last state, of sequences from their beginning, in float64.

    ``state`` is the one before the first token; zeros unless given. What goes into the scan is what ``dtype`` holds.
    """
    query, key, value = mixed_of(shape, layer, tokens, dtype)
    beta, g = gates_of(shape, layer, tokens)
    beta = beta.to(dtype).double()
    initial = None if state is None else state.double()
    core, last = recurrent_rule(query, key, value, g, beta, initial, True, True)
    norm = SimpleNamespace(weight=layer["norm_weight"].double(), variance_epsilon=layer["eps"], activation="silu")
    z = tokens.double().split(shape.columns, dim=-1)[1].reshape(core.shape)
    return gated_norm(norm, core, z).flatten(2), last


def one_token_oracle(shape: Shape, arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state of one gdn_decode from any ring and state, in float64: the window's tokens come first.

    Their gates are closed (beta 0, decay 1), so that only the conv sees them.
    """
    window, position = arguments["window"], arguments["position"]
    rows, kernel = position.numel(), shape.kernel
    taps = [window[torch.arange(rows), :, (position - back) % kernel] for back in range(kernel - 1, 0, -1)]
    layer = {name: arguments[name] for name in ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight", "eps")}
    outer = torch.zeros(rows, sum(shape.columns) - shape.channels, dtype=torch.float64)
    outer[:, shape.columns[1] :] = float("-inf")
    tokens = [torch.cat([tap.double(), outer], dim=1) for tap in taps] + [arguments["projected"].double()]
    tokens, dtype = torch.stack(tokens, dim=1), arguments["projected"].dtype
    out, state = oracle(shape, layer, tokens, arguments["state"][:rows], dtype)
    return out[:, -1], state
