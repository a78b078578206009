// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cmath>

namespace ds_hybrid {

// 1 / x for x in [1, 2]: an estimate and a correction. Away from the ends of fp32's range, this
// spares the greater part of an IEEE division and is as close, but for the last bit.
__device__ __forceinline__ float reciprocal(float x)
{
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    return fmaf(fmaf(-x, estimate, 1.0f), estimate, estimate);
}

// These take the exponential of -|x| alone, which cannot overflow.

__device__ __forceinline__ float sigmoid(float x)
{
    const float small = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : small) * reciprocal(1.0f + small);
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float softplus(float x)
{
    return log1pf(expf(-fabsf(x))) + fmaxf(x, 0.0f);
}

}  // namespace ds_hybrid
