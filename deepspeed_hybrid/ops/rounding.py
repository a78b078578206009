# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where ops round as the training forward does.

An op of ours computes in fp32 what is several operations of transformers' code, each of which leaves its result in the
model's dtype. Roundings follow those of that code wherever a value only passes through registers: they cost nothing
there, and what samples then stays nearer to what trains, although not nearer to the exact result.
"""

import torch


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of ``dtype`` holds of fp32 values, in fp32 again."""
    return values.to(dtype).float()


def rounded_product(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values times a weight, rounded as torch does where the values are in ``dtype``: not where the weight's
    dtype is another, for then the product is in fp32."""
    product = values * factor.float()
    return rounded(product, dtype) if factor.dtype == dtype else product


def normed(rows: torch.Tensor, weight: torch.Tensor, offset: float, eps: float) -> torch.Tensor:
    """RMSNorm [..., K] in the dtype of ``rows``. Norms of transformers that store their weight as it is round a row
    before it meets the weight, and those that store it around zero do not."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset == 0.0:
        wide = rounded(wide, rows.dtype)
    return (wide * (weight.float() + offset)).to(rows.dtype)
