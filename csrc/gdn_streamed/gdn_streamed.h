// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kDim = 128;  // of every head
constexpr int kTaps = 4;   // of the conv
constexpr int kPlaces =
    16;  // for tokens beside a state: those that wait there, and the present one
constexpr int kMostKept = kPlaces - 1;

// [heads] values, in float32 or in the model's type.
struct PerHead {
    const void* data;
    bool wide;  // float32
};

// B rows, each in the slot of its number; HK key heads, HV value heads, C = (2 * HK + HV) * 128.
// What is void is of one type: bfloat16 or float16.
struct GdnStreamedArguments {
    const void* projected;                        // [B, C + HV * 128 + 2 * HV], rows `stride` apart
    const void* conv_weight;                      // [C, 4]
    PerHead A_log, dt_bias;                       // [HV]
    PerHead norm_weight;                          // [128]
    const int64_t *position, *answered, *counts;  // [B]
    void* window;                                 // [slots, C, 4]
    float* state;                                 // [slots, HV, 128, 128]
    void* keys;                                   // [slots, HK, 16, 128]
    float* deltas;                                // [slots, HV, 16, 128]
    float* decays;                                // [slots, HV, 16]
    void* out;                                    // [B, HV * 128]
    int64_t stride;
    float eps;
    int rows, key_heads, value_heads, channels;
    int processors;  // of the card
    c10::ScalarType type;

    __host__ __device__ int items() const { return rows * value_heads; }  // states
};

void launch_gdn_streamed(const GdnStreamedArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
