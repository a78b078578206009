// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "feed.cuh"

// A state in a group's hands: its products with key and query, and how it is written.

namespace ds_hybrid {

constexpr int kWarpRows = kStageRows / kGroupWarps;  // of a stage

// Of one group.
struct alignas(16) Scratch {
    float2 key_query[kDim];
    float with_key[kPlaces], with_query[kPlaces], left[kPlaces];  // of kept tokens, by age
    float squares[2][kGroupWarps], norm[kGroupWarps];
    alignas(16) float sums[2][kGroupWarps][kDim];  // of the state's products with key and query
};

// A warp's rows of a stage, a lane's four columns of them, with what tokens have written. Deltas
// are what is left of them by now, and zeros where there is no token.
template <typename Element>
__device__ __forceinline__ void write_rows(const Beside& beside, float of_state, int row,
                                           int column, const float4* from, float4* to)
{
    constexpr int kRows = 4, kUnrolled = 5;
#pragma unroll 1
    for (int end = row + kWarpRows; row < end; row += kRows) {
        float sums[kRows][4];
#pragma unroll
        for (int i = 0; i < kRows; ++i, from += kDim / 4) {
            const float4 old = *from;
            sums[i][0] = old.x * of_state;
            sums[i][1] = old.y * of_state;
            sums[i][2] = old.z * of_state;
            sums[i][3] = old.w * of_state;
        }
#pragma unroll kUnrolled
        for (int token = 0; token < kMostKept; ++token) {
            const float4 delta = *reinterpret_cast<const float4*>(&beside.deltas[token][column]);
            const uint2 words = beside.keys[token][row / 4];
            const float added[] = {delta.x, delta.y, delta.z, delta.w};
            const float2 low = values_of<Element>(words.x), high = values_of<Element>(words.y);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sums[0][j] = fmaf(low.x, added[j], sums[0][j]);
                sums[1][j] = fmaf(low.y, added[j], sums[1][j]);
                sums[2][j] = fmaf(high.x, added[j], sums[2][j]);
                sums[3][j] = fmaf(high.y, added[j], sums[3][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i, to += kDim / 4) {
            *to = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        }
    }
}

// The state's products with key and query, for this thread's column: [known, read]. A warp reads
// eight rows of every stage, a lane four columns of them. `write` has the rows after each stage.
template <typename Write>
__device__ __forceinline__ float2 multiply_state(Scratch& scratch, Inbox& inbox, int group,
                                                 int number, const Write& write)
{
    const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarp, lane = thread % kWarp;
    float known[4] = {}, read[4] = {};
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const Stage stage(number + part);
        const int first = part * kStageRows + warp * kWarpRows;
        const float4* const rows = reinterpret_cast<const float4*>(
            inbox.stages[stage.place] + warp * kWarpRows * kDim + lane * 4);
        const float4* const pairs = reinterpret_cast<const float4*>(scratch.key_query + first);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
#pragma unroll
        for (int row = 0; row < kWarpRows; row += 2) {
            const float4 both = pairs[row / 2];
            const float4 upper = rows[row * (kDim / 4)], lower = rows[(row + 1) * (kDim / 4)];
            const float above[] = {upper.x, upper.y, upper.z, upper.w};
            const float below[] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                known[i] = fmaf(above[i], both.x, known[i]);
                read[i] = fmaf(above[i], both.y, read[i]);
                known[i] = fmaf(below[i], both.z, known[i]);
                read[i] = fmaf(below[i], both.w, read[i]);
            }
        }
        write(rows, first, lane * 4);
        give_back(inbox.empty[stage.place]);
    }
    float4* const sums = reinterpret_cast<float4*>(&scratch.sums[0][warp][lane * 4]);
    sums[0] = make_float4(known[0], known[1], known[2], known[3]);
    sums[kGroupWarps * kDim / 4] = make_float4(read[0], read[1], read[2], read[3]);
    meet_group(group);
    const auto total = [&](const float (&of_warps)[kGroupWarps][kDim]) {
        return (of_warps[0][thread] + of_warps[1][thread]) +
               (of_warps[2][thread] + of_warps[3][thread]);
    };
    return {total(scratch.sums[0]), total(scratch.sums[1])};
}

}  // namespace ds_hybrid
