# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Roundings in registers, where the training forward leaves a result in the model's dtype."""

import triton
import triton.language as tl


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """What a tensor of ``dtype`` holds of fp32 values, in fp32 again."""
    return values.to(dtype).to(tl.float32)


@triton.jit
def rounded_if(same: tl.constexpr, values, dtype: tl.constexpr):
    """Rounded where torch would have computed in ``dtype``, since weight and values have it both."""
    if same:
        values = rounded(values, dtype)
    return values


@triton.jit
def weighted(normed, weight, offset, dtype: tl.constexpr):
    """Normalised rows times weight + offset, fp32: rounded before it where the weight is stored as it is."""
    normed = tl.where(offset == 0.0, rounded(normed, dtype), normed)
    return normed * (weight.to(tl.float32) + offset)
