// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include "tokens.cuh"

// A state in a group's hands: how it takes tokens in, and its products with keys and queries.

namespace ds_hybrid {

constexpr int kWarpRows = kStageRows / kGroupWarps;  // of a stage
constexpr int kRows = 4;                             // at a time

// Tokens from..end into four rows of a state, from `row` on, four columns of them. Deltas are what
// is left of them by then.
template <typename Element>
__device__ __forceinline__ void take_in(float (&rows)[kRows][4], const Beside& beside,
                                        float of_state, int from, int end, int row, int column)
{
#pragma unroll
    for (auto& of_row : rows) {
#pragma unroll
        for (float& value : of_row) value *= of_state;
    }
#pragma unroll 4
    for (int token = from; token < end; ++token) {
        const float4 delta = *reinterpret_cast<const float4*>(&beside.deltas[token][column]);
        float key[4];
        unpack<Element>(key, reinterpret_cast<const uint2*>(beside.keys[token])[row / 4]);
        const float added[] = {delta.x, delta.y, delta.z, delta.w};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) rows[i][j] = fmaf(key[i], added[j], rows[i][j]);
        }
    }
}

template <int kTokens>
struct Sums {
    float known[kTokens][4] = {}, read[kTokens][4] = {};

    // Four rows, from `row` on, with all tokens' keys and queries; tokens from `change` on have
    // the later ones.
    template <bool kChanges>
    __device__ __forceinline__ void add(const Scratch<kTokens>& scratch,
                                        const float (&rows)[kRows][4],
                                        const float (&later)[kRows][4], int row, int change)
    {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float2* const pairs = scratch.products.key_query +
                                        Scratch<kTokens>::pairs_of(row) +
                                        i * (kDim / 4) * Scratch<kTokens>::kPitch;
            float2 both[kTokens];
            if constexpr (kTokens == 1) {
                both[0] = pairs[0];
            } else {
#pragma unroll
                for (int token = 0; token < kTokens; token += 2) {
                    const float4 two = *reinterpret_cast<const float4*>(pairs + token);
                    both[token] = make_float2(two.x, two.y);
                    both[token + 1] = make_float2(two.z, two.w);
                }
            }
#pragma unroll
            for (int token = 0; token < kTokens; ++token) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float value = kChanges && token >= change ? later[i][j] : rows[i][j];
                    known[token][j] = fmaf(value, both[token].x, known[token][j]);
                    read[token][j] = fmaf(value, both[token].y, read[token][j]);
                }
            }
        }
    }
};

// The state's products with keys and queries, for this thread's column. A warp reads four rows of
// every stage, a lane four columns of them. What the first token finds in the state is written.
template <typename Element, int kTokens>
__device__ __forceinline__ void multiply_state(const BlockPlace& place, Scratch<kTokens>& scratch,
                                               Inbox& inbox, float* state, bool writes, int group,
                                               int number, float (&known)[kTokens],
                                               float (&read)[kTokens])
{
    const int thread = threadIdx.x % kGroupThreads, warp = thread / kWarp, lane = thread % kWarp;
    const int column = lane * 4;
    const float taken[] = {scratch.taken[0], scratch.taken[1]};
    Sums<kTokens> sums;
#pragma unroll 1
    for (int part = 0; part < kHeadStages; ++part) {
        const Stage stage(number + part);
        wait_for_phase(shared_address(&inbox.full[stage.place]), stage.parity);
#pragma unroll
        for (int within = 0; within < kWarpRows; within += kRows) {
            const int of_stage = warp * kWarpRows + within, row = part * kStageRows + of_stage;
            const float* const from = inbox.stages[stage.place] + of_stage * kDim + column;
            float rows[kRows][4], later[kRows][4];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float4 four = *reinterpret_cast<const float4*>(from + i * kDim);
                rows[i][0] = four.x;
                rows[i][1] = four.y;
                rows[i][2] = four.z;
                rows[i][3] = four.w;
            }
            if (place.first) {
                take_in<Element>(rows, inbox.beside, taken[0], 0, place.first, row, column);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    if (!writes) break;
                    *reinterpret_cast<float4*>(state + (row + i) * kDim + column) =
                        make_float4(rows[i][0], rows[i][1], rows[i][2], rows[i][3]);
                }
            }
            if (place.change < kTokens) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) later[i][j] = rows[i][j];
                }
                take_in<Element>(later, inbox.beside, taken[1], place.first, place.last, row,
                                 column);
                sums.template add<true>(scratch, rows, later, row, place.change);
            } else {
                sums.template add<false>(scratch, rows, rows, row, 0);
            }
        }
        give_back(inbox.empty[stage.place]);
    }
    meet_group(group);  // keys and queries give their room to the sums
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        const auto& of_key = sums.known[token];
        const auto& of_query = sums.read[token];
        *reinterpret_cast<float4*>(&scratch.sums[0][warp][token][column]) =
            make_float4(of_key[0], of_key[1], of_key[2], of_key[3]);
        *reinterpret_cast<float4*>(&scratch.sums[1][warp][token][column]) =
            make_float4(of_query[0], of_query[1], of_query[2], of_query[3]);
    }
    meet_group(group);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        const auto total = [&](int which) {
            const auto& of = scratch.sums[which];
            return (of[0][token][thread] + of[1][token][thread]) +
                   (of[2][token][thread] + of[3][token][thread]);
        };
        known[token] = total(0);
        read[token] = total(1);
    }
    meet_group(group);  // and the sums to what is read of them
}

}  // namespace ds_hybrid
