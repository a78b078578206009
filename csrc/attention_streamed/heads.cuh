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

    __device__ __forceinline__ Element element(int i) const
    {
        return Element(static_cast<uint16_t>(bits[i]), Element::from_bits());
    }

    __device__ __forceinline__ float operator[](int i) const
    {
        return wide ? __uint_as_float(bits[i]) : static_cast<float>(element(i));
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

// Of one token, by a warp: one head through norm and rotation, into shared memory.
template <typename Element, int kDim>
struct Turner {
    static constexpr int kValues = kDim / kWarp;
    using Row = Values<Element, kDim>;

    const AttentionArguments& args;
    Row cosine, sine;
    float* scratch;  // [D], the warp's own
    int lane;

    __device__ __forceinline__ Turner(const AttentionArguments& args, int row, float* scratch,
                                      int lane)
        : args(args),
          cosine(args.cos, row * args.cos_stride, args.rotary, lane),
          sine(args.sin, row * args.sin_stride, args.rotary, lane),
          scratch(scratch),
          lane(lane)
    {
    }

    __device__ __forceinline__ void normalise(float (&own)[kValues], const Row& gains) const
    {
        float squares = 0.0f;
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

    __device__ __forceinline__ void turn(const Row& raw, bool has_norm, const Row& gains,
                                         Element* to) const
    {
        float own[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) own[i] = raw[i];
        if (has_norm) normalise(own, gains);
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
};

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
