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

// A lane's values of a row of a table, one in 32. They come as they are, so that all loads of a
// thread are under way before it looks at the first.
template <typename Element, int kDim>
struct Values {
    uint32_t bits[kDim / kWarp];
    bool wide;

    // Those below `width`, and zeros.
    __device__ __forceinline__ Values(const Table& table, int64_t start, int width, int lane)
        : wide(table.wide)
    {
        if (wide) {
            load(static_cast<const uint32_t*>(table.data) + start, width, lane);
        } else {
            load(static_cast<const uint16_t*>(table.data) + start, width, lane);
        }
    }

    template <typename Bits>
    __device__ __forceinline__ void load(const Bits* from, int width, int lane)
    {
#pragma unroll
        for (int i = 0; i < kDim / kWarp; ++i) {
            const int dim = i * kWarp + lane;
            bits[i] = dim < width ? from[dim] : 0;
        }
    }

    __device__ __forceinline__ float operator[](int i) const
    {
        if (wide) return __uint_as_float(bits[i]);
        return static_cast<float>(Element(static_cast<uint16_t>(bits[i]), Element::from_bits()));
    }
};

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

// One head through norm and rotation, by a warp, into shared memory. `scratch` is the warp's own,
// and `gains` are a norm's weights.
template <typename Element, int kDim>
__device__ __forceinline__ void turn_head(const AttentionArguments& args, int row,
                                          const Element* head, bool has_norm,
                                          const Values<Element, kDim>& gains,
                                          float (&scratch)[kDim], Element* to, int lane)
{
    constexpr int kValues = kDim / kWarp;
    const Values<Element, kDim> raw({head, false}, 0, kDim, lane);
    const Values<Element, kDim> cosine(args.cos, row * args.cos_stride, args.rotary, lane);
    const Values<Element, kDim> sine(args.sin, row * args.sin_stride, args.rotary, lane);
    float own[kValues], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) own[i] = raw[i];
    if (has_norm) {
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
            own[i] = rounded<Element>(normed * (gains[i] + args.norm_offset));
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
        if (dim < args.rotary) {
            const float other = dim < half ? -scratch[dim + half] : scratch[dim - half];
            own[i] = rounded_if<Element>(!args.cos.wide, own[i] * cosine[i]) +
                     rounded_if<Element>(!args.sin.wide, other * sine[i]);
        }
        to[dim] = static_cast<Element>(own[i]);
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
