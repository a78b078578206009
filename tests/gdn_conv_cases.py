# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments for gdn_conv, and a float64 oracle written from the formula."""

from typing import NamedTuple

import torch
from fused_linear_cases import normal
from glue_cases import slice_of_poison


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
    """Keyword arguments of gdn_conv on the CPU, in the middle of sequences; qkv is columns of a wider tensor."""
    channels = widths.channels
    qkv = normal(rows, tokens, channels, dtype=dtype, seed=seed + 1)
    return {
        "qkv": slice_of_poison(qkv, channels + 5, 2),
        "window": normal(rows, channels, widths.kernel, dtype=dtype, seed=seed + 2),
        "conv_weight": normal(channels, widths.kernel, dtype=weights, seed=seed + 3),
        "conv_bias": normal(channels, dtype=weights, seed=seed + 4) if bias else None,
        "key_dim": widths.key,
        "value_dim": widths.value,
    }


def conv_oracle(
    qkv: torch.Tensor,
    window: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    key_dim: int,
    value_dim: int,
) -> tuple[torch.Tensor, ...]:
    """q, k and v in float64, and the window after them in its own dtype."""
    kernel = window.shape[2]
    extended = torch.cat([window, qkv.transpose(1, 2)], dim=2)
    reached = extended[..., 1:].double().unfold(2, kernel, 1)  # [B, C, T, K]
    mixed = (reached * conv_weight.double()[:, None]).sum(-1).transpose(1, 2)
    if conv_bias is not None:
        mixed = mixed + conv_bias.double()
    return *(mixed * mixed.sigmoid()).split([key_dim, key_dim, value_dim], dim=-1), extended[..., -kernel:]
