// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace ds_hybrid {

constexpr int kThreads = 512;
constexpr int kPack = 4;  // entries of one 16-byte load

// Keys are ordered as the floats are; both zeros have one key.
__device__ __forceinline__ uint32_t key_of(float value)
{
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float value_of(uint32_t key)
{
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

constexpr uint32_t kLowestKey = 0x00800000u;   // of -FLT_MAX
constexpr uint32_t kHighestKey = 0xff7fffffu;  // of FLT_MAX
constexpr uint32_t kBrokenKey = 0xffffffffu;   // stands for a row with a NaN or an infinity

// Where an entry stands in the order of a stable sort: by its key, then by its index.
using Place = uint64_t;

__device__ __forceinline__ Place place_of(uint32_t key, int index)
{
    return static_cast<Place>(key) << 32 | static_cast<uint32_t>(index);
}
__device__ __forceinline__ uint32_t key_at(Place place)
{
    return static_cast<uint32_t>(place >> 32);
}
__device__ __forceinline__ int index_at(Place place) { return static_cast<int>(place); }

// The smallest key from `low` to `high` for which a condition holds that holds for all above it.
template <typename Condition>
__device__ uint32_t first_key(uint32_t low, uint32_t high, Condition holds)
{
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (holds(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// A block's slice of a row. With kAligned its packs are whole, and lie on 16-byte boundaries. It is
// kept in shared memory, and copied to registers for a pass.
template <bool kAligned>
struct Row {
    static constexpr int kLoads = kAligned ? 4 : 2;  // packs of a thread on their way at a time

    const float* scores;  // of the whole row, as is all but the last line
    float* out;
    Place least;  // what stands below it is dropped, whatever top-k and top-p say
    float highest;
    int vocab;
    int begin, end;

    // Entries past the slice read as -inf, which nothing counts or keeps.
    __device__ __forceinline__ float4 load(int index) const
    {
        if constexpr (kAligned) {
            if (index < end) return __ldcg(reinterpret_cast<const float4*>(scores + index));
            return make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        } else {
            float values[kPack];
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                values[i] = index + i < end ? __ldcg(scores + index + i) : -INFINITY;
            }
            return make_float4(values[0], values[1], values[2], values[3]);
        }
    }

    __device__ __forceinline__ void store(int index, const float (&values)[kPack]) const
    {
        if constexpr (kAligned) {
            if (index < end) {
                *reinterpret_cast<float4*>(out + index) =
                    make_float4(values[0], values[1], values[2], values[3]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                if (index + i < end) out[index + i] = values[i];
            }
        }
    }
};

// Calls visit(values, index of the first) for every pack of the slice.
template <typename Row, typename Visit>
__device__ __forceinline__ void visit_packs(const Row& row, const Visit& visit)
{
    constexpr int kStep = kThreads * kPack, kLoads = Row::kLoads;
    const int first = row.begin + static_cast<int>(threadIdx.x) * kPack;
    for (int index = first; index < row.end; index += kLoads * kStep) {
        float4 packs[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) packs[i] = row.load(index + i * kStep);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const float values[kPack] = {packs[i].x, packs[i].y, packs[i].z, packs[i].w};
            visit(values, index + i * kStep);
        }
    }
}

}  // namespace ds_hybrid
