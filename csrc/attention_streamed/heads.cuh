// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "activations.cuh"
#include "attention_streamed.h"

// A token's heads: where they are, their norm and their rotation, and the gate of what they mix.

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Element>
__device__ __forceinline__ float rounded(float value)
{
    return static_cast<float>(static_cast<Element>(value));
}

template <typename Element>
__device__ __forceinline__ float rounded_if(bool same, float value)
{
    return same ? rounded<Element>(value) : value;
}

template <typename Element>
__device__ __forceinline__ float value_at(const Table& table, int64_t index)
{
    if (table.wide) return static_cast<const float*>(table.data)[index];
    return static_cast<float>(static_cast<const Element*>(table.data)[index]);
}

// Places in a row of `projected`: queries, each with its gate behind it if there are gates, keys
// and values.
template <int kDim>
struct Columns {
    int of_query, keys, values;

    __device__ __forceinline__ explicit Columns(const AttentionArguments& args)
        : of_query(args.gated ? 2 * kDim : kDim),
          keys(args.kv_heads * args.group * of_query),
          values(keys + args.kv_heads * kDim)
    {
    }
};

// A norm's weights, a lane's of them: no kernel writes these.
template <typename Element, int kDim>
struct Gains {
    float values[kDim / kWarp];

    __device__ __forceinline__ Gains(const Table& norm, int lane)
    {
#pragma unroll
        for (int i = 0; i < kDim / kWarp; ++i) {
            values[i] = norm.data ? value_at<Element>(norm, i * kWarp + lane) : 0.0f;
        }
    }
};

// One head through norm and rotation, by a warp, into shared memory. `scratch` is the warp's own.
template <typename Element, int kDim>
__device__ __forceinline__ void turn_head(const AttentionArguments& args, int row,
                                          const Element* head, const Table& norm,
                                          const Gains<Element, kDim>& gains, float (&scratch)[kDim],
                                          Element* to, int lane)
{
    constexpr int kValues = kDim / kWarp;
    float own[kValues], cosine[kValues], sine[kValues], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) own[i] = static_cast<float>(head[i * kWarp + lane]);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int dim = i * kWarp + lane;
        const bool turns = dim < args.rotary;
        cosine[i] = turns ? value_at<Element>(args.cos, row * args.cos_stride + dim) : 1.0f;
        sine[i] = turns ? value_at<Element>(args.sin, row * args.sin_stride + dim) : 0.0f;
    }
    if (norm.data) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) squares = fmaf(own[i], own[i], squares);
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) {
            squares += __shfl_xor_sync(kAllLanes, squares, offset);
        }
        const float scale = rsqrtf(squares / kDim + args.eps);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const float normed = rounded_if<Element>(args.norm_offset == 0.0f, own[i] * scale);
            own[i] = rounded<Element>(normed * (gains.values[i] + args.norm_offset));
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kValues; ++i) scratch[i * kWarp + lane] = own[i];
    __syncwarp();
    const int half = args.rotary / 2;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int dim = i * kWarp + lane;
        const float by_cos = rounded_if<Element>(!args.cos.wide, own[i] * cosine[i]);
        float by_sin = 0.0f;
        if (dim < args.rotary) {
            const float other = dim < half ? -scratch[dim + half] : scratch[dim - half];
            by_sin = rounded_if<Element>(!args.sin.wide, other * sine[i]);
        }
        to[dim] = static_cast<Element>(by_cos + by_sin);
    }
}

// What a head answers: what it mixes, through its gate if there is one.
template <typename Element>
__device__ __forceinline__ Element answer(float mixed, bool gated, Element gate)
{
    if (gated) {
        mixed = rounded<Element>(mixed) * rounded<Element>(sigmoid(static_cast<float>(gate)));
    }
    return static_cast<Element>(mixed);
}

}  // namespace ds_hybrid
