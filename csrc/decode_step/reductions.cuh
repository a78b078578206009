// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cfloat>
#include <cmath>

#include "decode_step.h"
#include "philox.cuh"

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The best value so far and where it stands; of equal values the lowest index wins. It starts at
// index 0, so that even a row without a finite value names an entry of the vocabulary.
struct Choice {
    float value = -INFINITY;
    int index = 0;

    __device__ __forceinline__ void merge(float other_value, int other_index)
    {
        if (other_value > value || (other_value == value && other_index < index)) {
            value = other_value;
            index = other_index;
        }
    }
};

// Running sum of exp(value - max). The maximum starts at the lowest finite float: no difference of
// infinities ever arises, and entries at -inf add exactly 0.
struct SumExp {
    float max = -FLT_MAX;
    float sum = 0.0f;

    template <int N>
    __device__ __forceinline__ void add(const float (&values)[N], float highest)
    {
        if (highest > max) {
            sum *= quick_exp(max - highest);
            max = highest;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sum += quick_exp(values[i] - max);
    }

    __device__ __forceinline__ void merge(float other_max, float other_sum)
    {
        const float highest = fmaxf(max, other_max);
        sum = sum * expf(max - highest) + other_sum * expf(other_max - highest);
        max = highest;
    }
};

template <int N>
__device__ __forceinline__ float highest_of(const float (&values)[N])
{
    float highest = values[0];
#pragma unroll
    for (int i = 1; i < N; ++i) highest = fmaxf(highest, values[i]);
    return highest;
}

// Lane 0 ends with the whole warp's.
__device__ __forceinline__ void reduce_warp(Choice& choice, SumExp& total)
{
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        choice.merge(__shfl_down_sync(kAllLanes, choice.value, offset),
                     __shfl_down_sync(kAllLanes, choice.index, offset));
        total.merge(__shfl_down_sync(kAllLanes, total.max, offset),
                    __shfl_down_sync(kAllLanes, total.sum, offset));
    }
}

// Thread 0 ends with the whole block's. Call it once a kernel.
template <int Warps>
__device__ __forceinline__ Partial reduce_block(Choice choice, SumExp total)
{
    static_assert(Warps <= kWarp, "one warp combines what the warps found");
    __shared__ Partial found[Warps];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    reduce_warp(choice, total);
    if (lane == 0) found[warp] = {choice.value, choice.index, total.max, total.sum};
    __syncthreads();
    if (warp == 0) {
        choice = Choice();
        total = SumExp();
        if (lane < Warps) {
            choice = {found[lane].value, found[lane].index};
            total = {found[lane].max, found[lane].sum};
        }
        reduce_warp(choice, total);
    }
    return {choice.value, choice.index, total.max, total.sum};
}

// A float in shared memory that any thread may raise. Integers of the same order stand for it.
class SharedMaximum {
public:
    __device__ __forceinline__ explicit SharedMaximum(int* storage) : storage_(storage) {}
    __device__ __forceinline__ void set(float value) { *storage_ = flip(__float_as_int(value)); }
    __device__ __forceinline__ void raise(float value)
    {
        atomicMax(storage_, flip(__float_as_int(value)));
    }
    // Another thread may be raising it; an older value is as valid.
    __device__ __forceinline__ float read() const
    {
        return __int_as_float(flip(*static_cast<volatile int*>(storage_)));
    }

private:
    static __device__ __forceinline__ int flip(int bits)
    {
        return bits >= 0 ? bits : bits ^ 0x7fffffff;
    }
    int* storage_;
};

}  // namespace ds_hybrid
