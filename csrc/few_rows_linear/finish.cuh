// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "exchange.cuh"

namespace ds_hybrid {

constexpr unsigned kAllLanes = 0xffffffffu;

// Of as many neighbours, for each of them.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value)
{
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
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
#pragma unroll 4
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

// Everything that follows the sums of a tile, for two of the block's rows at a time. Half a warp
// takes a row; its threads have two columns that are neighbours and the two that lie with them,
// eight further or of the other half of the product. `load` asks for bias, residual and norm weight
// while the sums are still being made, and leaves them as they come, for to convert them would be
// to wait for them. Every launch fetches this code anew, so that its length is its time.
template <typename Element, typename S, bool glu>
class Finish {
public:
    __device__ __forceinline__ Finish(const FewRowsArguments& args, const Exchange<S>& exchange,
                                      int tile, int pair)
        : args_(args),
          exchange_(exchange),
          quad_(threadIdx.x % kLanes),
          here_(quad_ / 4 * (glu ? kGroup : kTile) + quad_ % 4 * 2),
          tile_(tile),
          column_(Tiling<S, glu>::first_column(args, tile) + here_),
          number_(pair * 2 + threadIdx.x % kWarp / kLanes)
    {
    }

    __device__ __forceinline__ void load()
    {
        if constexpr (!glu) {
            if (!is_row()) return;
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                if (!is_column(j)) continue;
                if (args_.bias) bias_[j] = of(args_.bias, column_ + beyond(j));
                if (args_.residual) {
                    gain_[j] = of(args_.next_norm, column_ + beyond(j));
                    residual_[j] = of(args_.residual, place() + beyond(j));
                }
            }
        }
    }

    __device__ __forceinline__ void store(const float* factors) const
    {
        float4 sums = {};
        const int number = min(number_, exchange_.numbers() - 1);
#pragma unroll 1
        for (int rank = 0; rank < args_.split; ++rank) {
            exchange_.add_to(sums, rank, number, min(quad_, S::kTiles * 4 - 1));
        }
        const float factor = factors[min(exchange_.row(number_), S::kRows - 1)];
        if constexpr (glu) {
            put(args_.out, 0, gated(factor * sums.x, factor * sums.y),
                gated(factor * sums.z, factor * sums.w));
        } else {
            float results[kColumns] = {factor * sums.x, factor * sums.z, factor * sums.y,
                                       factor * sums.w};
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
                if (args_.bias) results[j] += static_cast<float>(bias_[j]);
                results[j] = rounded(results[j]);
            }
            if (args_.residual) return store_sum(results);
#pragma unroll
            for (int j = 0; j < kColumns; j += 2) put(args_.out, j, results[j], results[j + 1]);
        }
    }

    // On to the rows of another pair.
    __device__ __forceinline__ void advance(int pairs) { number_ += pairs * 2; }

private:
    static constexpr int kOut = Tiling<S, glu>::kOut;
    static constexpr int kLanes = kWarp / 2;
    static constexpr int kColumns = glu ? 2 : 4;  // of a thread
    static_assert(S::kTiles * 4 <= kLanes && kOut % 4 == 0);

    __device__ __forceinline__ void store_sum(float (&results)[kColumns]) const
    {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            results[j] = rounded(results[j] + static_cast<float>(residual_[j]));
            // The next norm sees what its layer sees; a column that two tiles have counts once.
            const bool counts = is_column(j) && column_ + beyond(j) >= tile_ * kOut;
            squares += counts ? results[j] * results[j] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kColumns; j += 2) {
            put(args_.out, j, results[j], results[j + 1]);
            put(args_.scaled, j, results[j] * gain(j), results[j + 1] * gain(j + 1));
        }
        const float sum = sum_of_lanes<kLanes>(squares);
        if (is_row() && quad_ == 0) {
            const int64_t at = static_cast<int64_t>(tile_) * args_.rows;
            args_.next_squares[at + exchange_.row(number_)] = sum;
        }
    }

    __device__ __forceinline__ bool is_row() const { return exchange_.row(number_) < args_.rows; }
    // Of the j-th column of this thread: how far behind its first, and whether the tile has it.
    static __device__ __forceinline__ constexpr int beyond(int j) { return j / 2 * kGroup + j % 2; }
    __device__ __forceinline__ bool is_column(int j) const { return here_ + beyond(j) < kOut; }
    __device__ __forceinline__ int64_t place() const
    {
        return static_cast<int64_t>(exchange_.row(number_)) * args_.columns + column_;
    }
    __device__ __forceinline__ float gain(int j) const
    {
        return static_cast<float>(gain_[j]) + args_.next_offset;
    }

    // Two neighbours, in one where that is a whole word.
    __device__ __forceinline__ void put(void* to, int j, float left, float right) const
    {
        if (!is_row() || !is_column(j)) return;
        Element* const at = static_cast<Element*>(to) + place() + beyond(j);
        struct alignas(2 * sizeof(Element)) {
            Element left, right;
        } const both{left, right};
        if (args_.columns % 2 == 0) {
            *reinterpret_cast<uint32_t*>(at) = reinterpret_cast<const uint32_t&>(both);
        } else {
            at[0] = both.left;
            at[1] = both.right;
        }
    }
    // silu(gate) * up with the roundings of each; x / (1 + exp(-x)) to a few units in the last
    // place of fp32, and without a branch.
    static __device__ __forceinline__ float gated(float gate, float up)
    {
        gate = rounded(gate);
        return rounded(__fdividef(gate, 1.0f + __expf(-gate))) * rounded(up);
    }
    static __device__ __forceinline__ float rounded(float value)
    {
        return static_cast<Element>(value);
    }
    static __device__ __forceinline__ const Element& of(const void* all, int64_t at)
    {
        return static_cast<const Element*>(all)[at];
    }

    const FewRowsArguments& args_;
    const Exchange<S>& exchange_;
    const int quad_, here_, tile_, column_;
    int number_;
    Element residual_[kColumns] = {}, bias_[kColumns] = {}, gain_[kColumns] = {};
};

}  // namespace ds_hybrid
