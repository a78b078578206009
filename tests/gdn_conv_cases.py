# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for gdn_conv, and a float64 oracle written from the formula."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from fused_linear_cases import normal
from glue_cases import slice_of_poison

from deepspeed_hybrid.ops.gdn_decode import L2_EPS, window_from_ring


class Widths(NamedTuple):
    key: int
    value: int
    kernel: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key + self.value


REAL = Widths(2048, 4096)
SMALL = Widths(8, 16)
WIDTHS = [SMALL, Widths(64, 128), Widths(1, 1), Widths(70, 33), Widths(5, 131, 3), Widths(8, 8, 1), Widths(3, 9, 8)]


def arguments_of(
    widths: Widths,
    rows: int,
    tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    bias: bool = True,
    seed: int = 0,
) -> dict:
    """Arguments of :func:`windowed` on the CPU, in the middle of sequences; qkv is columns of a wider tensor."""
    channels = widths.channels
    qkv = normal(rows, tokens, channels, dtype=dtype, seed=seed + 1)
    return {
        "qkv": slice_of_poison(qkv, channels + 5, 2),
        "window": normal(rows, channels, widths.kernel, dtype=dtype, seed=seed + 2),
        "conv_weight": normal(channels, widths.kernel, dtype=weights, seed=seed + 3),
        "conv_bias": normal(channels, dtype=weights, seed=seed + 4) if bias else None,
        "key_dim": widths.key,
        "value_dim": widths.value,
        "head_dim": None,
    }


def slots_of(qkv: torch.Tensor, window: torch.Tensor | None, conv_weight: torch.Tensor, **_) -> dict:
    """What gdn_conv writes to: slots of NaN, two more than there are rows, and odd lengths of rows."""
    rows, tokens, channels = qkv.shape
    kernel = conv_weight.shape[1]
    return {
        "ring": torch.full((rows + 2, channels, kernel), float("nan"), dtype=qkv.dtype, device=qkv.device),
        "slots": torch.arange(rows, device=qkv.device).flip(0) + 1,
        "lengths": torch.arange(rows, device=qkv.device) * 3 + tokens,
    }


def windowed(op: Callable, **arguments) -> tuple[torch.Tensor, ...]:
    """gdn_conv with slots of its own: q, k, v, and the new window [B, C, K] in the order of time."""
    slots = slots_of(**arguments)
    results = op(**arguments, **slots)
    others = [0, len(slots["ring"]) - 1]
    assert slots["ring"][others].isnan().all()
    return *results, window_from_ring(slots["ring"][slots["slots"]], slots["lengths"])


def conv_oracle(
    qkv: torch.Tensor,
    window: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    key_dim: int,
    value_dim: int,
    head_dim: int | None,
) -> tuple[torch.Tensor, ...]:
    """q, k and v in float64, and the window after them in its own dtype."""
    kernel = conv_weight.shape[1]
    window = qkv.new_zeros(qkv.shape[0], qkv.shape[2], kernel) if window is None else window
    extended = torch.cat([window, qkv.transpose(1, 2)], dim=2)
    reached = extended[..., 1:].double().unfold(2, kernel, 1)  # [B, C, T, K]
    mixed = (reached * conv_weight.double()[:, None]).sum(-1).transpose(1, 2)
    if conv_bias is not None:
        mixed = mixed + conv_bias.double()
    query, key, value = (mixed * mixed.sigmoid()).split([key_dim, key_dim, value_dim], dim=-1)
    if head_dim is not None:
        query, key = (normalised(part, head_dim) for part in (query, key))
    return query, key, value, extended[..., -kernel:]


def normalised(part: torch.Tensor, head_dim: int) -> torch.Tensor:
    heads = part.unflatten(-1, (-1, head_dim))
    return (heads / (heads.square().sum(-1, keepdim=True) + L2_EPS).sqrt()).flatten(-2)
