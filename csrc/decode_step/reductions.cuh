// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda_runtime.h>

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A value and where it stands.
struct Choice {
    float value;
    int index;
};

// The larger of two choices, the lower index of equal ones. A NaN as `other` never wins.
__device__ __forceinline__ Choice better(Choice best, Choice other)
{
    const bool wins =
        other.value > best.value || (other.value == best.value && other.index < best.index);
    return wins ? other : best;
}

// Combinations that reductions take.
struct Maximum {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Better {
    __device__ __forceinline__ Choice operator()(Choice a, Choice b) const { return better(a, b); }
};

__device__ __forceinline__ float exchange(float value, int mask)
{
    return __shfl_xor_sync(kAllLanes, value, mask);
}

__device__ __forceinline__ Choice exchange(Choice choice, int mask)
{
    return {__shfl_xor_sync(kAllLanes, choice.value, mask),
            __shfl_xor_sync(kAllLanes, choice.index, mask)};
}

// Lane 0 ends with the whole warp's, and every lane where exchanging a combination's arguments
// changes no bit.
template <typename Value, typename Combine>
__device__ __forceinline__ Value reduce_warp(Value value, Combine combine)
{
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        value = combine(value, exchange(value, mask));
    }
    return value;
}

// Every thread ends with the whole block's, and the same bits. Once a kernel for each Value:
// nothing waits before the shared memory is written again.
template <int Warps, typename Value, typename Combine>
__device__ __forceinline__ Value reduce_block(Value value, Combine combine)
{
    __shared__ Value of_warps[Warps];
    value = reduce_warp(value, combine);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < Warps; ++warp) value = combine(value, of_warps[warp]);
    return value;
}

}  // namespace ds_hybrid
