// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "activations.cuh"
#include "gdn_streamed.h"

// What a token brings to one value head: the conv of its channels, normalised query and key, gates.

namespace ds_hybrid {

constexpr int kWarp = 32, kGroupThreads = kDim, kGroupWarps = kGroupThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)
constexpr float kNormEps = 1e-6f;               // under the root when query and key are normalised

template <typename Element>
__device__ __forceinline__ float value_of(uint32_t bits)
{
    if constexpr (std::is_same_v<Element, c10::BFloat16>) return __uint_as_float(bits << 16);
    return static_cast<float>(Element(static_cast<uint16_t>(bits), Element::from_bits()));
}

// Two that lie in one word.
template <typename Element>
__device__ __forceinline__ float2 values_of(uint32_t word)
{
    if constexpr (std::is_same_v<Element, c10::BFloat16>) {
        return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    }
    return {value_of<Element>(word & 0xffffu), value_of<Element>(word >> 16)};
}

template <typename Element>
__device__ __forceinline__ float rounded(float value)
{
    return static_cast<float>(static_cast<Element>(value));
}

// What there is at an index, and what that is as a float: apart, so that all of a thread's loads
// are under way before it looks at the first.
__device__ __forceinline__ uint32_t bits_at(const PerHead& values, int index)
{
    if (values.wide) return static_cast<const uint32_t*>(values.data)[index];
    return static_cast<const uint16_t*>(values.data)[index];
}

template <typename Element>
__device__ __forceinline__ float value_of(const PerHead& values, uint32_t bits)
{
    return values.wide ? __uint_as_float(bits) : value_of<Element>(bits);
}

template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value)
{
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    return value;
}

__device__ __forceinline__ void meet_group(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

__device__ __forceinline__ float sum_of_warps(const float (&of_warps)[kGroupWarps])
{
    return (of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3]);
}

// The sum over a group's threads, in one order. Nobody may read `of_warps` from before any more.
__device__ __forceinline__ float sum_of_group(float value, float (&of_warps)[kGroupWarps],
                                              int group)
{
    value = sum_of_lanes<kWarp>(value);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp % kGroupWarps] = value;
    meet_group(group);
    return sum_of_warps(of_warps);
}

// Whose state one turn of a group is about.
struct Head {
    int row, value_head, key_head;
    bool first;  // of the value heads that share a key head

    __device__ __forceinline__ Head(const GdnStreamedArguments& args, int item)
    {
        const int sharing = args.value_heads / args.key_heads;
        row = item / args.value_heads;
        value_head = item % args.value_heads;
        key_head = value_head / sharing;
        first = value_head % sharing == 0;
    }

    // Its place among all states, its key head's among all keys, and that of the first of its
    // channels among all windows.
    __device__ __forceinline__ int64_t of_values(const GdnStreamedArguments& args) const
    {
        return static_cast<int64_t>(row) * args.value_heads + value_head;
    }

    __device__ __forceinline__ int64_t of_keys(const GdnStreamedArguments& args) const
    {
        return static_cast<int64_t>(row) * args.key_heads + key_head;
    }

    __device__ __forceinline__ int64_t of_channels(const GdnStreamedArguments& args, int part) const
    {
        return static_cast<int64_t>(row) * args.channels + channel(args, part);
    }

    // The first of its query's (0), key's (1) or value's (2) channels.
    __device__ __forceinline__ int channel(const GdnStreamedArguments& args, int part) const
    {
        const int before = part == 0 ? 0 : part == 1 ? args.key_heads : 2 * args.key_heads;
        return (before + (part < 2 ? key_head : value_head)) * kDim;
    }
};

// A channel of the conv with SiLU, each rounded. `window` has the value of position p in place
// p % 4; `now` is the place of the raw one.
template <typename Element>
__device__ __forceinline__ float activated(const uint2& window, const uint2& taps, uint16_t raw,
                                           int now)
{
    const uint64_t ring = static_cast<uint64_t>(window.y) << 32 | window.x;
    const float2 front = values_of<Element>(taps.x), back = values_of<Element>(taps.y);
    const float weights[] = {back.x, front.y, front.x};  // of the value before, and so on
    float sum = 0.0f;
#pragma unroll
    for (int age = 1; age < kTaps; ++age) {
        const int place = (now + kTaps - age) % kTaps;
        const auto bits = static_cast<uint32_t>(ring >> place * 16) & 0xffffu;
        sum = fmaf(value_of<Element>(bits), weights[age - 1], sum);
    }
    return rounded<Element>(silu(rounded<Element>(fmaf(value_of<Element>(raw), back.y, sum))));
}

}  // namespace ds_hybrid
