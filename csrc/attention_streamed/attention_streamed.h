// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/core/ScalarType.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ds_hybrid {

constexpr int kMostGroup = 8;    // query heads that share a key head: columns of a product
constexpr int kMostSplits = 64;  // of a row's positions
constexpr int kTile = 16;        // tokens that a warp takes at once
constexpr int kMostWarps = 8;    // of a block, or half of them

// Values in float32 or in the model's type.
struct Table {
    const void* data;
    bool wide;  // float32
};

// B rows, each in the slot of its number; H query heads, HK heads of keys and values, D dimensions.
// What is void is of one type: bfloat16 or float16.
struct AttentionArguments {
    CUtensorMap keys_map, values_map;  // boxes of a tile's tokens
    const void* projected;             // [B, q | k | v], rows `stride` apart
    Table cos, sin;                    // [B, rotary], rows `cos_stride` and `sin_stride` apart
    Table q_norm, k_norm;              // [D], or null for none
    const int64_t* position;           // [B]
    const bool* parked;                // [B]
    void *keys, *values;               // [slots, HK, capacity, D]
    void* out;                         // [B, H * D]
    float* partial;                    // [B, HK, splits, H / HK, D], null where splits is 1
    float2* marks;                     // [B, HK, splits, H / HK]: peak and total
    int64_t stride, cos_stride, sin_stride, capacity;
    float norm_offset, eps;
    float scale;  // of scores, for powers of two
    int rows, kv_heads, group, rotary, splits, dim, warps;
    bool gated;
    c10::ScalarType type;
};

void launch_attention_streamed(const AttentionArguments& args, cudaStream_t stream);

}  // namespace ds_hybrid
