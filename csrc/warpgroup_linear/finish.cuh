// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "copies.cuh"
#include "warpgroup_linear.h"

namespace ds_hybrid {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 4 * kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Element>
__device__ __forceinline__ float rounded(float value)
{
    return static_cast<Element>(value);
}

// Two neighbours in one word, or nothing; without a branch.
template <typename Element>
__device__ __forceinline__ void put(bool wanted, void* to, int64_t at, float left, float right)
{
    struct alignas(2 * sizeof(Element)) {
        Element left, right;
    } const both{left, right};
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %0, 0;\n@wanted st.global.b32 [%1], %2;\n}" ::
            "r"(static_cast<int>(wanted)),
        "l"(static_cast<Element*>(to) + at), "r"(reinterpret_cast<const uint32_t&>(both))
        : "memory");
}

// 1 / rms of every row, by one warp, two rows a lane.
__device__ __forceinline__ void find_factors(const WarpgroupArguments& args, float* factors)
{
#pragma unroll
    for (int i = 0; i < kMostRows / kWarp; ++i) {
        const int row = threadIdx.x % kWarp + i * kWarp;
        float sum = 0.0f;
        if (row < args.rows) {
#pragma unroll 8
            for (int part = 0; part < args.parts; ++part) {
                sum += args.squares[static_cast<int64_t>(part) * args.rows + row];
            }
        }
        factors[row] = args.squares ? 1.0f / sqrtf(sum / args.inner + args.eps) : 1.0f;
    }
}

// silu(gate) * up with the roundings of each; x / (1 + exp(-x)) to a few units in the last place
// of fp32, and without a branch.
template <typename Element>
__device__ __forceinline__ float gated(float gate, float up)
{
    gate = rounded<Element>(gate);
    const float silu = rounded<Element>(__fdividef(gate, 1.0f + __expf(-gate)));
    return silu * rounded<Element>(up);
}

// A tile whose sums one block has: straight from the registers. Rows from `rows` on are nobody's.
template <typename Element, int kTile, bool kGlu>
__device__ __forceinline__ void store_tile(const WarpgroupArguments& args, int rows, int column,
                                           const float* factors, const float (&sums)[kTile / 2])
{
    const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * 16 + lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int here = row + half * kGroup;
        const int64_t at = static_cast<int64_t>(here) * args.columns + column;
        const float factor = factors[here];
        if constexpr (kGlu) {
#pragma unroll
            for (int group = 0; group < kTile / (2 * kGroup); ++group) {
                const float* gates = sums + group * 8 + half * 2;
                const float* ups = gates + 4;
                put<Element>(here < rows, args.out, at + group * kGroup,
                             gated<Element>(factor * gates[0], factor * ups[0]),
                             gated<Element>(factor * gates[1], factor * ups[1]));
            }
        } else {
#pragma unroll
            for (int group = 0; group < kTile / kGroup; ++group) {
                float left = factor * sums[group * 4 + half * 2];
                float right = factor * sums[group * 4 + half * 2 + 1];
                if (args.bias) {
                    const Element* bias = static_cast<const Element*>(args.bias) + column;
                    left += static_cast<float>(bias[group * kGroup]);
                    right += static_cast<float>(bias[group * kGroup + 1]);
                }
                put<Element>(here < rows, args.out, at + group * kGroup, left, right);
            }
        }
    }
}

// A tile that the blocks of a cluster share: 16 rows of x are a block's, and sums go to where they
// are added up, in `shared`, where they count themselves in at `barrier`. What follows a product
// with a residual is done there.
template <typename Element, int kTile>
class Shares {
public:
    static constexpr int kRows = kMostRows / kSplit;
    static constexpr int kPitch = kTile % 32 ? kTile : kTile + 16;  // no bank conflicts
    static constexpr int kFloats = kSplit * kRows * kPitch;

    __device__ __forceinline__ Shares(const WarpgroupArguments& args, float* shared,
                                      uint32_t barrier, int rank, int column)
        : args_(args), shared_(shared), barrier_(barrier), rank_(rank)
    {
        row_ = rank * kRows + threadIdx.x / kLanes;
        column_ = column + threadIdx.x % kLanes * 2;
    }

    // By one thread, before anything may arrive.
    __device__ __forceinline__ void expect() const
    {
        const int rows = min(max(args_.rows - rank_ * kRows, 0), kRows);
        expect_bytes(barrier_, rows * kTile * kSplit * static_cast<int>(sizeof(float)));
    }

    __device__ __forceinline__ bool has_rows() const { return rank_ * kRows < args_.rows; }

    // Asks for what is added, while the sums are still being made.
    __device__ __forceinline__ void load()
    {
        if (row_ >= args_.rows) return;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int column = column_ + i * kLanes * 2;
            residual_[i] = pair(args_.residual, place() + i * kLanes * 2);
            gain_[i] = pair(args_.next_norm, column);
            if (args_.bias) bias_[i] = pair(args_.bias, column);
        }
    }

    // Each warp's rows are another block's.
    __device__ __forceinline__ void give(int rows, const float (&sums)[kTile / 2]) const
    {
        const int lane = threadIdx.x % kWarp, owner = threadIdx.x / kWarp, row = lane / 4;
        static_assert(kSplit * kWarp == kWarpgroup && kRows == 16, "a warp's rows are a block's");
        const uint32_t barrier = of_block(barrier_, owner);
        const uint32_t to = of_block(
            shared_address(shared_ + (rank_ * kRows + row) * kPitch + lane % 4 * 2), owner);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool wanted = owner * kRows + row + half * kGroup < rows;
#pragma unroll
            for (int group = 0; group < kTile / kGroup; ++group) {
                const int place = half * kGroup * kPitch + group * kGroup;
                send(wanted, to + place * sizeof(float), sums[group * 4 + half * 2],
                     sums[group * 4 + half * 2 + 1], barrier);
            }
        }
    }

    // Columns before `fresh` are another tile's as well.
    __device__ __forceinline__ void finish(int rows, int tile, int fresh) const
    {
        float squares = 0.0f;
        const float* at = shared_ + threadIdx.x / kLanes * kPitch + threadIdx.x % kLanes * 2;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            float2 sum = {};
#pragma unroll
            for (int share = 0; share < kSplit; ++share) {
                const float2 one =
                    *reinterpret_cast<const float2*>(at + share * kRows * kPitch + i * kLanes * 2);
                sum.x += one.x;
                sum.y += one.y;
            }
            const float2 residual = both(residual_[i]), gain = both(gain_[i]);
            if (args_.bias) {
                const float2 bias = both(bias_[i]);
                sum.x += bias.x;
                sum.y += bias.y;
            }
            // The next norm sees what its layer sees.
            sum.x = rounded<Element>(rounded<Element>(sum.x) + residual.x);
            sum.y = rounded<Element>(rounded<Element>(sum.y) + residual.y);
            const bool counts = column_ + i * kLanes * 2 >= fresh;
            squares += counts ? sum.x * sum.x + sum.y * sum.y : 0.0f;
            put<Element>(row_ < rows, args_.out, place() + i * kLanes * 2, sum.x, sum.y);
            put<Element>(row_ < rows, args_.scaled, place() + i * kLanes * 2,
                         sum.x * (gain.x + args_.next_offset),
                         sum.y * (gain.y + args_.next_offset));
        }
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
            squares += __shfl_xor_sync(kAllLanes, squares, offset);
        }
        if (row_ < rows && threadIdx.x % kLanes == 0) {
            args_.next_squares[static_cast<int64_t>(tile) * args_.rows + row_] = squares;
        }
    }

private:
    static constexpr int kLanes = kWarpgroup / kRows;
    static constexpr int kPairs = kTile / (2 * kLanes);
    static_assert(kPairs * 2 * kLanes == kTile);

    __device__ __forceinline__ int64_t place() const
    {
        return static_cast<int64_t>(row_) * args_.columns + column_;
    }
    static __device__ __forceinline__ uint32_t pair(const void* all, int64_t at)
    {
        // One by one: parameters may be views of a flat buffer, at any place of it.
        const uint16_t* const from = static_cast<const uint16_t*>(all) + at;
        return from[0] | static_cast<uint32_t>(from[1]) << 16;
    }
    static __device__ __forceinline__ float2 both(const uint32_t& pair)
    {
        const Element* const one = reinterpret_cast<const Element*>(&pair);
        return {static_cast<float>(one[0]), static_cast<float>(one[1])};
    }

    const WarpgroupArguments& args_;
    float* const shared_;
    const uint32_t barrier_;
    const int rank_;
    int row_, column_;
    uint32_t residual_[kPairs] = {}, gain_[kPairs] = {}, bias_[kPairs] = {};
};

}  // namespace ds_hybrid
