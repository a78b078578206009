// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "cluster.cuh"
#include "stream.cuh"

namespace ds_hybrid {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float sum_of_warp(float value)
{
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    return value;
}

// 1 / rms of every row, by one warp. A row's partial sums are dealt out to four shares whatever the
// shape, so that they are added up in one order; lanes that are kRows apart share a row's shares.
template <typename S>
__device__ __forceinline__ void find_factors(const FewRowsArguments& args, float* factors)
{
    constexpr int kShares = 4, kLanes = kWarp / S::kRows, kOfLane = kShares / kLanes;
    static_assert(kLanes <= kShares && kShares % kLanes == 0, "whole shares for a lane");
    const int lane = threadIdx.x % kWarp, row = lane % S::kRows;
    float share[kOfLane] = {};
    if (row < args.rows) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
#pragma unroll 16
            for (int part = lane / S::kRows + i * kLanes; part < args.parts; part += kShares) {
                share[i] += args.squares[static_cast<int64_t>(part) * args.rows + row];
            }
        }
    }
    // Neighbours first, then the two halves: across lanes as far as they go, then within this one.
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
#pragma unroll
        for (int offset = S::kRows; offset < kWarp; offset *= 2) {
            share[i] += __shfl_xor_sync(kAllLanes, share[i], offset);
        }
    }
#pragma unroll
    for (int count = kOfLane; count > 1; count /= 2) {
#pragma unroll
        for (int i = 0; i < count / 2; ++i) share[i] = share[2 * i] + share[2 * i + 1];
    }
    if (lane < S::kRows) {
        factors[row] = args.squares ? 1.0f / sqrtf(share[0] / args.inner + args.eps) : 1.0f;
    }
}

// Bias, residual and norm weight at one warp's places of a tile, which the last tile of a block
// asks for while its sums are still being made; and everything that follows the product there. Rows
// are dealt out to all warps of the cluster, columns to lanes.
template <typename Element, typename S, bool glu>
class Finish {
public:
    __device__ __forceinline__ Finish(const FewRowsArguments& args, int warp, int warps)
        : args_(args), warp_(warp), warps_(warps)
    {
    }

    __device__ __forceinline__ void load(int tile)
    {
        for_each(tile, [&](int i, int j, int row, int column) {
            residual_[i][j] = bias_[j] = gain_[j] = 0.0f;
            if (args_.bias) bias_[j] = value(args_.bias, column);
            if (args_.residual) {
                residual_[i][j] = value(args_.residual, offset(row, column));
                gain_[j] = value(args_.next_norm, column) + args_.next_offset;
            }
        });
    }

    __device__ __forceinline__ void store(int tile, float* shared, const float* factors) const
    {
        Found found = {}, up = {};
        add_up(found, shared, 0);
        if constexpr (glu) add_up(up, shared, kOut);
        float squares[kRowsOfWarp] = {};
        for_each(tile, [&](int i, int j, int row, int column) {
            float result = rounded(factors[row] * found[i][j] + bias_[j]);
            if constexpr (glu) {
                result =
                    rounded(result / (1.0f + expf(-result))) * rounded(factors[row] * up[i][j]);
            }
            const Element out = result + residual_[i][j];
            static_cast<Element*>(args_.out)[offset(row, column)] = out;
            if (args_.residual) {
                const float hidden = out;  // the next norm sees what its layer sees
                static_cast<Element*>(args_.scaled)[offset(row, column)] = hidden * gain_[j];
                if (column >= tile * kOut) squares[i] += hidden * hidden;
            }
        });
        if (!args_.residual) return;
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i) {
            const int row = warp_ + i * warps_;
            const float sum = sum_of_warp(squares[i]);
            if (row < args_.rows && threadIdx.x % kWarp == 0) {
                args_.next_squares[static_cast<int64_t>(tile) * args_.rows + row] = sum;
            }
        }
    }

private:
    static constexpr int kOut = Tiling<S, glu>::kOut;
    static constexpr int kRowsOfWarp = (S::kRows + kWarps) / (kWarps + 1);
    static constexpr int kColumnsOfLane = (kOut + kWarp - 1) / kWarp;

    using Found = float[kRowsOfWarp][kColumnsOfLane];

    // What the warps of the cluster found, in a fixed order, from a column of the tile on. Of all
    // places before anything is stored, so that no read waits for another.
    __device__ __forceinline__ void add_up(Found& found, float* shared, int first) const
    {
        const int lane = threadIdx.x % kWarp;
        for (int rank = 0; rank < args_.split; ++rank) {
            const float* const of = of_block(shared, args_.split, rank) + first + lane;
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; ++i) {
                const int row = warp_ + i * warps_;
#pragma unroll
                for (int j = 0; j < kColumnsOfLane; ++j) {
                    const bool present = row < args_.rows && lane + j * kWarp < kOut;
#pragma unroll
                    for (int warp = 0; warp < kWarps; ++warp) {
                        const int at = (warp * S::kRows + row) * S::kPitch + j * kWarp;
                        found[i][j] += present ? of[at] : 0.0f;
                    }
                }
            }
        }
    }

    template <typename Visit>
    __device__ __forceinline__ void for_each(int tile, Visit visit) const
    {
        const int lane = threadIdx.x % kWarp;
        const int first = Tiling<S, glu>::first_column(args_, tile) + lane;
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i) {
            const int row = warp_ + i * warps_;
#pragma unroll
            for (int j = 0; j < kColumnsOfLane; ++j) {
                if (row < args_.rows && lane + j * kWarp < kOut) {
                    visit(i, j, row, first + j * kWarp);
                }
            }
        }
    }
    __device__ __forceinline__ int64_t offset(int row, int column) const
    {
        return static_cast<int64_t>(row) * args_.columns + column;
    }
    static __device__ __forceinline__ float rounded(float value)
    {
        return static_cast<Element>(value);
    }
    static __device__ __forceinline__ float value(const void* of, int64_t at)
    {
        return static_cast<float>(static_cast<const Element*>(of)[at]);
    }

    const FewRowsArguments& args_;
    const int warp_, warps_;  // of the cluster
    float residual_[kRowsOfWarp][kColumnsOfLane], bias_[kColumnsOfLane], gain_[kColumnsOfLane];
};

}  // namespace ds_hybrid
